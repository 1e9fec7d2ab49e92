#!/usr/bin/env python3
"""Makes golden.json: what other implementations say about the model and its tokenizer.

    python3 golden.py FOLDER golden.json

FOLDER is one that prepare.py has filled. The logits come from Hugging Face transformers, which reads the GGUF file itself
(its own dequantisation, its own order of the query and key rows, eager attention, float32), and the tokens from the
package tokenizers. Needs torch, transformers, accelerate, gguf and tokenizers; the program that is checked needs none of them.
"""

import glob
import json
import os
import random
import sys

import numpy
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

POSITIONS = [0, 1, 2, 3, 7, 15, 31, 63, 127, 191, 255, 319, 383, 447, 479, 511]
LIKELY, OTHERS = 12, 8  # logits kept at each position: the largest, and some of all the others

TEXTS = [
    "It is a truth universally acknowledged, that",
    " The magic number for Lima is 3536803.",
    "in 1813, £3.50 or ½ of 10²; x=3.14e-10",
    "don't I'll we've they're it's he'd I'm 'tis DON'T",
    "two  blanks,   three\tand\ttabs\n\n\nlines \n  end  ",
    "naïve façade — “quoted” … Ελληνικά русский 中文字 العربية हिन्दी",
    "emoji 😀👩‍👩‍👧 and\u00a0spaces\u2003of\u3000all kinds\r\n",
    "<|im_start|> is text here, snake_case(a[0]) != b**2; //---====",
    "٣٤٥ Ⅷ ½ ① 7th",
    "",
    " ",
    "\n",
    "a",
]


def main(folder, target):
    gguf = glob.glob(os.path.join(folder, "download", "*.gguf"))[0]
    model = AutoModelForCausalLM.from_pretrained(os.path.dirname(gguf), gguf_file=os.path.basename(gguf), dtype=torch.float32,
                                                 attn_implementation="eager").eval()
    tokens = numpy.fromfile(os.path.join(folder, "texts", "pride_and_prejudice.tokens"), "<u2")[:512].astype("i8")
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens)[None]).logits[0]
    chance = random.Random(512)
    rows = []
    for position in POSITIONS:
        words = torch.topk(logits[position], LIKELY).indices.tolist()
        words += [chance.randrange(logits.shape[1]) for _ in range(OTHERS)]
        rows.append({"position": position, "words": words, "logits": [round(logits[position, word].item(), 5) for word in words]})
    loss = torch.nn.functional.cross_entropy(logits[:-1], torch.from_numpy(tokens[1:]))

    tokenizer = Tokenizer.from_file(os.path.join(folder, "tokenizer.json"))
    tokenizer.encode_special_tokens = True  # markers in a text are text
    encoded = [{"text": text, "tokens": tokenizer.encode(text, add_special_tokens=False).ids} for text in TEXTS]

    def lines(values):
        return "[\n" + ",\n".join("  " + json.dumps(value) for value in values) + "\n ]"

    with open(target, "w", encoding="utf-8") as file:
        file.write("{\n")
        file.write(f' "made_by": "golden.py with torch {torch.__version__}",\n')
        file.write(f' "tokens": {json.dumps(tokens.tolist())},\n')
        file.write(f' "mean_loss": {loss.item():.6f},\n')
        file.write(f' "rows": {lines(rows)},\n')
        file.write(f' "texts": {lines(encoded)}\n}}\n')


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2])
