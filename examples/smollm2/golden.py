#!/usr/bin/env python3
"""Makes golden.json: what other implementations say about the models and the tokenizer.

    python3 golden.py FOLDER golden.json

FOLDER is one that prepare.py has filled. Three sources:

* logits of SmolLM2 from Hugging Face transformers, which reads the GGUF file itself (its own dequantisation, its own
  order of the query and key rows, eager attention, float32);
* logits of the built-in random model under every policy from the textbook formulas below, in double precision; the same
  formulas must first agree with transformers on SmolLM2;
* tokens of awkward texts from the package tokenizers.

Needs torch, transformers, accelerate, gguf and tokenizers; the program that is checked needs none of them.
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

BUILT_IN_TEXT = ("It is a truth universally acknowledged, that a single man in possession of a good fortune, "
                 "must be in want of a wife. However little known the feelings or views of such a man may be")
BUILT_IN_POSITIONS = [0, 1, 3, 47, 48, 49, 52, 53, 80, 120, 170]
BUILT_IN_POLICIES = [
    {"policy": "full"},
    {"policy": "48", "window": 48},
    {"policy": "44+4", "window": 44, "sinks": 4},
    {"policy": "44+4:compact", "window": 44, "sinks": 4, "compact": True},
    {"policy": "linear"},
]

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


# -------------------------------------------------------------------------------- the textbook


def turned(x, positions, base):
    """x [tokens, heads, dim], each token's rows turned at its position: dimension i goes with dimension i + dim / 2."""
    half = x.shape[2] // 2
    angle = positions[:, None, None] * base ** (-numpy.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    cosine, sine = numpy.cos(angle), numpy.sin(angle)
    return numpy.concatenate([a * cosine - b * sine, a * sine + b * cosine], axis=2)


def attention(q, k, v, base, policy="full", window=None, sinks=0, compact=False):
    """Weights [query, key] row by row, then their mean of the values. A query i sees key j <= i if i - j < window or
    j < sinks; in the compact frame it reads the sinks from position min(i, sinks + window - 1)."""
    tokens, heads, dim = q.shape
    k, v = (numpy.repeat(x, heads // x.shape[1], axis=1) for x in (k, v))
    i = numpy.arange(tokens)
    k_turned, q_turned = turned(k, i, base), turned(q, i, base)
    sees = i[None, :] <= i[:, None]
    if policy == "linear":
        def phi(x):
            return numpy.where(x > 0, x + 1, numpy.exp(numpy.minimum(x, 0)))

        weights = numpy.einsum("ihd,jhd->hij", phi(q_turned), phi(k_turned)) * sees
    else:
        scores = numpy.einsum("ihd,jhd->hij", q_turned, k_turned) / numpy.sqrt(dim)
        if window:
            sees &= (i[:, None] - i[None, :] < window) | (i[None, :] < sinks)
        if compact:
            q_sinks = turned(q, numpy.minimum(i, sinks + window - 1), base)
            scores[:, :, :sinks] = numpy.einsum("ihd,jhd->hij", q_sinks, k_turned[:sinks]) / numpy.sqrt(dim)
        scores = numpy.where(sees, scores, -numpy.inf)
        weights = numpy.exp(scores - scores.max(axis=2, keepdims=True))
    weights = weights / weights.sum(axis=2, keepdims=True)
    return numpy.einsum("hij,jhd->ihd", weights, v).reshape(tokens, -1)


def textbook(weights, config, tokens, **policy):
    """Logits [tokens, vocabulary] of a Llama model in double precision."""

    def weight(name):
        return weights[name + ".weight"].astype(numpy.float64)

    def norm(x, name):
        mean_square = (x * x).mean(axis=1, keepdims=True)
        return x / numpy.sqrt(mean_square + config["rms_norm_eps"]) * weight(name).reshape(1, -1)

    dim = config["head_dim"]
    embedding = weight("model.embed_tokens")
    x = embedding[tokens]
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        n = norm(x, layer + "input_layernorm")
        q, k, v = ((n @ weight(f"{layer}self_attn.{part}_proj").T).reshape(len(tokens), -1, dim) for part in "qkv")
        x = x + attention(q, k, v, config["rope_theta"], **policy) @ weight(layer + "self_attn.o_proj").T
        n = norm(x, layer + "post_attention_layernorm")
        gate, up = (n @ weight(f"{layer}mlp.{part}_proj").T for part in ("gate", "up"))
        x = x + (gate / (1 + numpy.exp(-gate)) * up) @ weight(layer + "mlp.down_proj").T
    return norm(x, "model.norm") @ embedding.T


def built_in_model():
    """The random weights of model.cpp: the same generator, drawn in the same order."""
    config = {"num_hidden_layers": 4, "head_dim": 16, "rope_theta": 100000.0, "rms_norm_eps": 1e-5}
    hidden, inner, heads, kv_heads, vocabulary = 96, 256, 6, 2, 256
    generator = numpy.random.MT19937()
    generator._legacy_seeding(1)
    weights = {}

    def draw(name, rows, columns):
        most = numpy.float32(2) / numpy.sqrt(numpy.float32(columns))
        bits = generator.random_raw(rows * columns) >> 8
        unit = bits.astype(numpy.float32) * numpy.float32(2.0 ** -23) - numpy.float32(1)
        weights[name + ".weight"] = most * unit.reshape(rows, columns)

    def ones(name):
        weights[name + ".weight"] = numpy.ones((1, hidden), numpy.float32)

    draw("model.embed_tokens", vocabulary, hidden)
    ones("model.norm")
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        ones(layer + "input_layernorm")
        draw(layer + "self_attn.q_proj", heads * config["head_dim"], hidden)
        draw(layer + "self_attn.k_proj", kv_heads * config["head_dim"], hidden)
        draw(layer + "self_attn.v_proj", kv_heads * config["head_dim"], hidden)
        draw(layer + "self_attn.o_proj", hidden, heads * config["head_dim"])
        ones(layer + "post_attention_layernorm")
        draw(layer + "mlp.gate_proj", inner, hidden)
        draw(layer + "mlp.up_proj", inner, hidden)
        draw(layer + "mlp.down_proj", hidden, inner)
    return weights, config


# -------------------------------------------------------------------------------- the file


def chosen_logits(logits, positions, likely, others, chance):
    rows = []
    for position in positions:
        words = numpy.argsort(-logits[position])[:likely].tolist()
        words += [chance.randrange(logits.shape[1]) for _ in range(others)]
        values = [round(float(logits[position, word]), 5) for word in words]
        rows.append({"position": position, "words": words, "logits": values})
    return rows


def main(folder, target):
    gguf = glob.glob(os.path.join(folder, "download", "*.gguf"))[0]
    model = AutoModelForCausalLM.from_pretrained(os.path.dirname(gguf), gguf_file=os.path.basename(gguf),
                                                 dtype=torch.float32, attn_implementation="eager").eval()
    tokens = numpy.fromfile(os.path.join(folder, "texts", "pride_and_prejudice.tokens"), "<u2")[:512].astype("i8")
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens)[None]).logits[0]
    loss = torch.nn.functional.cross_entropy(logits[:-1], torch.from_numpy(tokens[1:])).item()
    logits = logits.numpy()
    chance = random.Random(512)
    rows = chosen_logits(logits, POSITIONS, LIKELY, OTHERS, chance)

    with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
        config = json.load(file)
    weights = {name: value.numpy() for name, value in model.state_dict().items()}
    apart = numpy.abs(textbook(weights, config, tokens) - logits).max()
    print(f"the textbook and transformers: largest difference {apart:.2g} in {logits.size} logits")
    assert apart < 1e-3

    weights, config = built_in_model()
    letters = list(BUILT_IN_TEXT.encode())
    built_in = []
    for policy in BUILT_IN_POLICIES:
        logits = textbook(weights, config, letters, **policy)
        built_in.append({**policy, "rows": chosen_logits(logits, BUILT_IN_POSITIONS, 4, 4, chance)})

    tokenizer = Tokenizer.from_file(os.path.join(folder, "tokenizer.json"))
    tokenizer.encode_special_tokens = True  # markers in a text are text
    encoded = [{"text": text, "tokens": tokenizer.encode(text, add_special_tokens=False).ids} for text in TEXTS]

    def lines(values):
        return "[\n" + ",\n".join("  " + json.dumps(value) for value in values) + "\n ]"

    with open(target, "w", encoding="utf-8") as file:
        file.write("{\n")
        file.write(f' "made_by": "golden.py with torch {torch.__version__}",\n')
        file.write(f' "tokens": {json.dumps(tokens.tolist())},\n')
        file.write(f' "mean_loss": {loss:.6f},\n')
        file.write(f' "rows": {lines(rows)},\n')
        file.write(f' "texts": {lines(encoded)},\n')
        file.write(f' "built_in_text": {json.dumps(BUILT_IN_TEXT)},\n')
        file.write(f' "built_in": {lines(built_in)}\n}}\n')


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2])
