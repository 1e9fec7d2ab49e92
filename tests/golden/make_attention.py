#!/usr/bin/env python3
"""Golden values of the softmax policies: PyTorch's scaled_dot_product_attention in float64 with an explicit mask.

Nothing here knows how sash works: every case forms the whole [queries, keys] mask (or every score) and lets PyTorch do
the rest. Inputs are float32 numbers, so that a C++ reader starts from exactly the same ones. transformers only checks
the formulas, against models that others wrote; no golden value comes from it.
"""
import copy
import math
import struct

import torch
import transformers
from torch.nn.functional import scaled_dot_product_attention
from transformers.masking_utils import sliding_window_overlay
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.bloom import modeling_bloom
from transformers.models.cohere import modeling_cohere
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama import modeling_llama

from golden_file import File, Inputs, deliver, exact, expected, precise, to_float32

VERSIONS = f"torch {torch.__version__.split('+')[0]}; formulas checked against transformers {transformers.__version__}"
NARROW = {"float16": torch.float16, "bfloat16": torch.bfloat16}
UNBOUNDED = 1 << 62  # a window no sequence fills


def double(values):
    return torch.tensor(values, dtype=torch.float64)


# ---------------------------------------------------------------------------------------------- inputs

class Tokens:
    """query [queries, heads, key_dim], key [keys, kv_heads, key_dim], value [keys, kv_heads, value_dim].

    The queries are the last ones: query row i stands at position keys - queries + i.
    """

    def __init__(self, seed, keys, heads, kv_heads, key_dim, value_dim=None, queries=None, query_heads=None,
                 value_heads=None):
        inputs = Inputs(seed)
        self.queries = queries or keys
        self.keys, self.heads, self.kv_heads = keys, heads, kv_heads
        self.key_dim, self.value_dim = key_dim, value_dim or key_dim

        def tensor(tokens, heads, dim):
            return double(inputs.numbers(tokens * heads * dim)).view(tokens, heads, dim)

        self.query = tensor(self.queries, query_heads or heads, key_dim)
        self.key = tensor(keys, kv_heads, key_dim)
        self.value = tensor(keys, value_heads or kv_heads, self.value_dim)
        self.positions = torch.arange(keys)
        self.query_positions = self.positions[keys - self.queries:]


# ---------------------------------------------------------------------------------------------- what is seen

def visible(tokens, causal=True, window=UNBOUNDED, sinks=0):
    """bool [queries, keys]: { j <= i : i - j < window or j < sinks }, or everything."""
    i, j = tokens.query_positions[:, None], tokens.positions[None, :]
    if not causal:
        return torch.ones(tokens.queries, tokens.keys, dtype=torch.bool)
    inside = sliding_window_overlay(window)(0, 0, i, j)
    assert torch.equal(inside, i - j < window)
    return (j <= i) & (inside | (j < sinks))


# ---------------------------------------------------------------------------------------------- rotary positions

def frequency_table(dims, base, scaling="none", factor=1.0, low=1.0, high=4.0, trained=8192):
    """Radians per position of each pair, in double; linear and Llama-3 scaling as published with the models."""
    table = [base ** (-2 * pair / dims) for pair in range(dims // 2)]
    if scaling == "linear":
        table = [f / factor for f in table]
    if scaling == "llama3":
        def stretched(f):
            turns = trained * f / (2 * math.pi)  # how often this pair turns within the trained length
            blend = min(max((turns - low) / (high - low), 0.0), 1.0)
            return (1 - blend) * f / factor + blend * f
        table = [stretched(f) for f in table]
    return [float(precise(f)) for f in table]  # the printed decimals are the golden values


def rotated(x, positions, frequencies, layout):
    """x [..., dim] turned by positions [...] times frequencies; the dims beyond 2 * len(frequencies) stay."""
    angle = positions[..., None].double() * double(frequencies)
    cos, sin = angle.cos(), angle.sin()
    dims = 2 * len(frequencies)
    if layout == "half_split":
        a, b = x[..., :dims // 2], x[..., dims // 2:dims]
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    else:
        a, b = x[..., 0:dims:2], x[..., 1:dims:2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    return torch.cat((turned, x[..., dims:]), -1)


def everywhere(x, positions):
    """positions [tokens], one for each head of x [tokens, heads, dim]."""
    return positions[:, None].expand(x.shape[:2])


# ---------------------------------------------------------------------------------------------- attention

def narrowed(x, element):
    return x.to(NARROW[element]).double() if element in NARROW else x


def repeated(x, heads):
    """[tokens, kv_heads, dim] -> [heads, tokens, dim]: head h reads KV head h / (heads / kv_heads)."""
    return x.repeat_interleave(heads // x.shape[1], dim=1).transpose(0, 1)


def softmax_of(scores, value, sink_logits):
    """scores [heads, queries, keys], -inf where unseen -> output [queries, heads, value_dim], lse [queries, heads]."""
    lse = torch.logsumexp(scores, -1).T
    heads, queries, _ = scores.shape
    if sink_logits is not None:  # one more key per head: its score is the logit, its value zero
        logits = double(sink_logits)[:, None, None].expand(heads, queries, 1)
        scores = torch.cat((scores, logits), -1)
        value = torch.cat((value, torch.zeros_like(value[:, :1])), 1)
    nothing = torch.zeros(heads, queries, 1, dtype=torch.float64)
    output = scaled_dot_product_attention(nothing, torch.zeros_like(value[..., :1]), value, attn_mask=scores)
    return output.transpose(0, 1), lse


def attention(tokens, seen, scale=None, soft_cap=0.0, alibi=None, sink_logits=None, element="float32", rotary=None,
              cache_positions=None):
    """One case: (output, lse, largest |score| that is seen).

    cache_positions(i) -> (position of query i, positions of all keys) where they are counted inside the cache.
    """
    scale = scale or tokens.key_dim**-0.5
    value = repeated(narrowed(tokens.value, element), tokens.heads)
    key, query = tokens.key, tokens.query

    if cache_positions is None:
        distance = (tokens.query_positions[:, None] - tokens.positions[None, :]).double()
        if rotary:
            query = rotated(query, everywhere(query, tokens.query_positions), *rotary)
            key = rotated(key, everywhere(key, tokens.positions), *rotary)
        query = repeated(query, tokens.heads)
        key = repeated(narrowed(key, element), tokens.heads)
        scores = query @ key.transpose(1, 2) * scale
    else:  # the frame moves with the query: turn everything afresh for each, as if the cache had just been filled
        rows, distances = [], []
        for row, i in enumerate(tokens.query_positions.tolist()):
            own, others = cache_positions(i)
            q = rotated(query[row], torch.full(query[row].shape[:1], own), *rotary)
            k = rotated(key, everywhere(key, others), *rotary)
            rows.append(torch.einsum("hd,hkd->hk", q, repeated(k, tokens.heads)) * scale)
            distances.append((own - others).double())
        scores, distance = torch.stack(rows, 1), torch.stack(distances)

    plain = not (soft_cap or alibi or cache_positions)
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if alibi:
        scores = scores - double(alibi)[:, None, None] * distance
    largest = scores.masked_fill(~seen, 0).abs().max().item()
    output, lse = softmax_of(scores.masked_fill(~seen, -math.inf), value, sink_logits)
    if plain and not sink_logits:  # the ordinary way in: q, k, v and a boolean mask
        output = scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scale).transpose(0, 1)
    return output, lse, largest


# ---------------------------------------------------------------------------------------------- writing

def put_inputs(file, tokens):
    for name, x in (("query", tokens.query), ("key", tokens.key), ("value", tokens.value)):
        file.tensor(name, x.shape, x.flatten().tolist(), exact)


def put_expected(file, result):
    output, lse, largest = result
    file.lines.append(f"real largest_score {largest:.3g}")
    file.tensor("output", output.shape, output.flatten().tolist(), expected)
    file.tensor("lse", lse.shape, lse.flatten().tolist(), expected)


def add(file, name, tokens, like=None, causal=True, window=None, sinks=0, **score):
    """A case of full attention (no window) or of a sliding window; `like` names the case whose inputs it shares.

    score: what attention() takes, and `rotary` = (frequencies, layout), turned by the library.
    """
    policy = "full" if window is None else "sliding_window"
    entries = {"policy": policy}
    if window is None:
        entries["causal"] = int(causal)
        seen = visible(tokens, causal)
    else:
        entries |= {"window": window, "sinks": sinks, "frame": "original"}
        seen = visible(tokens, True, window, sinks)
    entries |= {key: float(score[key]) for key in ("scale", "soft_cap") if key in score}
    entries |= {key: score[key] for key in ("element",) if key in score}
    if "rotary" in score:
        frequencies, layout = score["rotary"]
        entries |= {"layout": layout, "dims": 2 * len(frequencies), "rotates_by": "library"}
    file.case(name, like, **entries)
    if "rotary" in score:
        file.tensor("frequencies", [len(frequencies)], frequencies, precise)
    for key in ("alibi", "sink_logits"):
        if key in score:
            file.tensor(key, [tokens.heads], score[key], exact)
    if not like:
        put_inputs(file, tokens)
    put_expected(file, attention(tokens, seen, **score))


def header(what):
    return [f"{what}, float64; inputs are float32 numbers.", f"Written by make_attention.py: {VERSIONS}."]


# ---------------------------------------------------------------------------------------------- the files

def full():
    file = File(header("Full attention, causal and bidirectional"))
    add(file, "one token", Tokens(1, 1, 2, 1, 4))
    add(file, "one head each", Tokens(2, 20, 4, 4, 12))
    add(file, "grouped 6 over 2", Tokens(3, 20, 6, 2, 8))
    add(file, "grouped 8 over 4", Tokens(4, 17, 8, 4, 8))
    add(file, "grouped 28 over 4", Tokens(5, 9, 28, 4, 6))
    add(file, "grouped 9 over 3", Tokens(6, 14, 9, 3, 8))
    add(file, "one KV head", Tokens(7, 19, 5, 1, 8))
    add(file, "grouped values", Tokens(23, 18, 4, 2, 8, 6, query_heads=2, value_heads=4))
    add(file, "grouped queries", Tokens(24, 18, 6, 3, 6, 8, query_heads=2, value_heads=1))
    add(file, "dims 1 and 1", Tokens(8, 25, 2, 1, 1))
    add(file, "dims 3 and 5", Tokens(9, 25, 2, 2, 3, 5))
    add(file, "dims 65 and 33", Tokens(10, 12, 2, 1, 65, 33))
    add(file, "dims 80 and 80", Tokens(11, 8, 2, 1, 80))
    add(file, "dims 16 and 40", Tokens(12, 12, 4, 2, 16, 40))
    add(file, "dims 128 and 1", Tokens(13, 10, 2, 1, 128, 1))
    add(file, "300 tokens", Tokens(14, 300, 2, 1, 4))
    add(file, "13 tokens after 70", Tokens(15, 83, 4, 2, 8, queries=13))
    add(file, "5 tokens after 257", Tokens(16, 262, 3, 1, 5, queries=5))
    add(file, "20 tokens after 600", Tokens(17, 620, 2, 1, 3, queries=20))
    add(file, "one token after 130", Tokens(18, 131, 9, 3, 4, queries=1))
    add(file, "large scores", Tokens(19, 40, 2, 1, 8), scale=8.0)
    add(file, "bidirectional", Tokens(20, 25, 4, 2, 10), causal=False)
    add(file, "bidirectional, 150 tokens", Tokens(21, 150, 2, 1, 4, 3), causal=False)
    add(file, "bidirectional, 7 queries over 50 keys", Tokens(22, 50, 6, 2, 8, queries=7), causal=False)
    return file


def window():
    file = File(header("Sliding windows with sinks, original frame"))
    tokens, first = Tokens(30, 36, 2, 1, 4), None
    for w in (1, 2, 3, 7, 16, 35, 36, 50, UNBOUNDED):
        for s in (0, 1, 4, 6, 20, 40):
            name = f"window {w} sinks {s}"
            add(file, name, tokens, first, window=w, sinks=s)
            first = first or name
    add(file, "grouped 8 over 4", Tokens(31, 20, 8, 4, 6), window=6, sinks=2)
    add(file, "grouped 28 over 4", Tokens(32, 11, 28, 4, 5), window=4, sinks=1)
    add(file, "dims 65 and 3", Tokens(33, 20, 2, 1, 65, 3), window=9, sinks=4)
    add(file, "200 tokens, window 64", Tokens(34, 200, 2, 1, 5, 3), window=64, sinks=4)
    add(file, "400 tokens, window 100, no sinks", Tokens(35, 400, 1, 1, 3), window=100)
    add(file, "30 tokens after 500", Tokens(36, 530, 2, 1, 4, queries=30), window=128, sinks=4)
    add(file, "one token after 300", Tokens(37, 301, 9, 3, 4, queries=1), window=60, sinks=4)
    return file


def score():
    file = File(header("Scale, soft cap, ALiBi slopes, sink logits"))
    tokens = Tokens(40, 24, 4, 2, 8)
    slopes = [2.0 ** -(h + 1) for h in range(4)]  # the published slopes of four heads are 2^-2, 2^-4 ...: any will do
    logits = [to_float32(x) for x in (0.0, 1.5, -2.25, 40.0)]
    options = {
        "scale": dict(scale=0.75),
        "soft cap": dict(soft_cap=2.0),
        "wide soft cap": dict(soft_cap=30.0, scale=2.0),
        "alibi": dict(alibi=slopes),
        "sink logits": dict(sink_logits=logits),
        "everything": dict(scale=1.25, soft_cap=3.0, alibi=slopes, sink_logits=[0.5, -1.0, 2.0, 3.0]),
    }
    plain = "full, no option"  # `like` copies options too: what the others share has none
    add(file, plain, tokens)
    for policy, entries in {"full": {}, "window 5 sinks 2": dict(window=5, sinks=2),
                            "window 3 sinks 6": dict(window=3, sinks=6)}.items():
        for name, chosen in options.items():
            add(file, f"{policy}, {name}", tokens, plain, **entries, **chosen)
    add(file, "bidirectional, soft cap and sink logits", tokens, plain, causal=False, soft_cap=2.0, sink_logits=logits)
    add(file, "150 tokens, everything", Tokens(41, 150, 4, 1, 4, 2), window=70, sinks=3, **options["everything"])
    return file


def narrow():
    file = File(header("Keys and values stored in 16 bits: rounded to nearest even, then computed with"))
    for element, dtype in NARROW.items():
        patterns = conversion_patterns()
        floats = torch.tensor([struct.unpack("f", struct.pack("I", p))[0] for p in patterns], dtype=torch.float32)
        bits = floats.to(dtype).view(torch.int16).tolist()
        file.case(f"conversion to {element}", element=element)
        file.tensor("from", [len(patterns)], patterns, str)  # bit patterns, in decimal
        file.tensor("to", [len(bits)], [b & 0xFFFF for b in bits], str)

        tokens = Tokens(50, 40, 4, 2, 8)
        first = f"{element}, full"
        add(file, first, tokens, None if element == "float16" else "float16, full", element=element)
        add(file, f"{element}, bidirectional", tokens, first, causal=False, element=element)
        add(file, f"{element}, window 6 sinks 2", tokens, first, window=6, sinks=2, element=element)
        add(file, f"{element}, everything", tokens, first, window=9, sinks=1, element=element, scale=0.75, soft_cap=3.0,
            alibi=[0.5, 0.25, 0.125, 0.0625], sink_logits=[0.5, -1.0, 2.0, 3.0])
        add(file, f"{element}, dims 65 and 3", Tokens(51, 20, 2, 1, 65, 3), element=element)
        add(file, f"{element}, 9 tokens after 290", Tokens(52, 299, 2, 1, 4, queries=9), element=element)
    return file


def conversion_patterns():
    """float32 bit patterns around every border of both 16-bit formats: ties, subnormals, overflow, infinities, NaN."""
    near = [0x00000000, 0x00000001, 0x00008000, 0x00008001, 0x00018000, 0x007FFFFF, 0x00800000,  # bfloat16 subnormals
            0x33000000, 0x33000001, 0x33400000, 0x33800000, 0x33C00000, 0x387FC000, 0x387FE000, 0x387FF000,  # float16's
            0x38800000, 0x3F7FE000, 0x3F7FF000, 0x3F7FF001, 0x3F800000, 0x3F801000, 0x3F801001, 0x3F803000, 0x3F808000,
            0x3F808001, 0x3F818000, 0x477FDFFF, 0x477FE000, 0x477FEFFF, 0x477FF000, 0x47800000, 0x7F7F0000, 0x7F7F7FFF,
            0x7F7F8000, 0x7F7FFFFF, 0x7F800000]
    inputs = Inputs(53)
    ordinary = [inputs.number() * 10.0 ** (n % 12 - 7) for n in range(120)]
    return near + [p | 0x80000000 for p in near] + [struct.unpack("I", struct.pack("f", x))[0] for x in ordinary]


def rope():
    file = File(header("Rotary positions, frames, frequency tables"))
    tables = {
        "base 10000, dims 8": dict(dims=8, base=10000.0),
        "base 100000, dims 64": dict(dims=64, base=100000.0),
        "base 500000, dims 128": dict(dims=128, base=500000.0),
        "linear by 4": dict(dims=64, base=10000.0, scaling="linear", factor=4.0),
        "Llama-3 by 8": dict(dims=128, base=500000.0, scaling="llama3", factor=8.0, low=1.0, high=4.0, trained=8192),
        "Llama-3 by 32": dict(dims=64, base=500000.0, scaling="llama3", factor=32.0, low=1.0, high=4.0, trained=8192),
    }
    for name, entries in tables.items():
        file.case(f"frequencies, {name}", **{"scaling": "none"} | entries)
        table = frequency_table(**entries)
        file.tensor("frequencies", [len(table)], table, precise)

    for layout in ("half_split", "interleaved"):
        rotation(file, layout)
        tokens = Tokens(59, 30, 4, 2, 8)
        add(file, f"full, {layout}", tokens, rotary=(frequency_table(8, 100.0), layout))
        add(file, f"full, {layout}, 4 dims", tokens, f"full, {layout}", rotary=(frequency_table(4, 100.0), layout))
        rotary = (frequency_table(64, 10000.0), layout)
        add(file, f"full, {layout}, dims 65", Tokens(58, 12, 2, 1, 65, 3), rotary=rotary)
    narrow_and_rotated(file)
    frames_of_one_pair(file)
    for layout in ("half_split", "interleaved"):
        frames(file, f"{layout}", Tokens(60, 40, 4, 2, 8), 8, 3, layout, frequency_table(8, 100.0))
        frames(file, f"{layout}, 6 dims of 10", Tokens(61, 30, 2, 1, 10, 4), 5, 2, layout, frequency_table(6, 50.0))
    frames(file, "no sinks", Tokens(62, 24, 2, 1, 4), 5, 0, "half_split", frequency_table(4, 20.0))
    frames(file, "window 1, sinks 2", Tokens(63, 24, 2, 1, 4), 1, 2, "half_split", frequency_table(4, 20.0))
    frames(file, "window 3, sinks 9", Tokens(64, 30, 2, 1, 6), 3, 9, "interleaved", frequency_table(6, 20.0))
    frames(file, "window beyond the end", Tokens(65, 20, 2, 1, 4), 50, 4, "half_split", frequency_table(4, 20.0))
    frames(file, "6 dims of 7", Tokens(66, 20, 2, 1, 7, 3), 4, 2, "half_split", frequency_table(6, 20.0))
    usual = frequency_table(8, 10000.0)
    frames(file, "grouped 9 over 3, alibi, sink logits", Tokens(67, 20, 9, 3, 8), 6, 4, "half_split", usual,
           alibi=[2.0 ** -h for h in range(9)], sink_logits=[h / 4 - 1 for h in range(9)])
    frames(file, "soft cap", Tokens(68, 30, 2, 1, 8), 7, 2, "half_split", usual, soft_cap=2.0)
    frames(file, "8 tokens after 300", Tokens(69, 308, 2, 1, 6, queries=8), 40, 4, "half_split", usual[:3])
    return file



def cache_positions(tokens, i, window, sinks):
    """StreamingLLM: positions count inside the cache. At query i it holds the sinks, then the window, packed."""
    kept = [j for j in range(i + 1) if j < sinks or i - j < window]
    place = {j: index for index, j in enumerate(kept)}
    return place[i], torch.tensor([place.get(j, 0) for j in range(tokens.keys)])


def frames(file, name, tokens, window, sinks, layout, frequencies, **score):
    """Three cases on one input: the original frame, and the compact one with either side rotating."""
    rotary = (frequencies, layout)
    seen = visible(tokens, True, window, sinks)
    inside = lambda i: cache_positions(tokens, i, window, sinks)

    entries = {"policy": "sliding_window", "window": window, "sinks": sinks, "layout": layout}
    entries |= {"dims": 2 * len(frequencies)}
    entries |= {key: float(score[key]) for key in ("scale", "soft_cap") if key in score}
    file.case(f"{name}, original", frame="original", rotates_by="library", **entries)
    file.tensor("frequencies", [len(frequencies)], frequencies, precise)
    for key in ("alibi", "sink_logits"):
        if key in score:
            file.tensor(key, [tokens.heads], score[key], exact)
    put_inputs(file, tokens)
    put_expected(file, attention(tokens, seen, rotary=rotary, **score))

    file.case(f"{name}, compact", f"{name}, original", frame="compact", rotates_by="library")
    put_expected(file, attention(tokens, seen, rotary=rotary, cache_positions=inside, **score))

    # Rotated by the caller: what arrives is float32. It is turned back in double, so that the golden values are of what
    # arrived.
    query = rotated(tokens.query, everywhere(tokens.query, tokens.query_positions), *rotary).float().double()
    key = rotated(tokens.key, everywhere(tokens.key, tokens.positions), *rotary).float().double()
    file.case(f"{name}, compact, rotated by the caller", f"{name}, original", frame="compact", rotates_by="caller")
    file.tensor("query", query.shape, query.flatten().tolist(), exact)
    file.tensor("key", key.shape, key.flatten().tolist(), exact)
    arrived = copy.copy(tokens)
    arrived.query = rotated(query, -everywhere(query, tokens.query_positions), *rotary)
    arrived.key = rotated(key, -everywhere(key, tokens.positions), *rotary)
    put_expected(file, attention(arrived, seen, rotary=rotary, cache_positions=inside, **score))


def rotation(file, layout):
    """Single vectors at near and far positions: angles need double before they are narrowed."""
    positions = [0, 1, 2, 17, 1000, 4096, 65537, 999_999, 1_000_003, 16_777_217, 100_000_007]
    inputs = Inputs(70)
    frequencies = frequency_table(6, 10000.0)
    x = double(inputs.numbers(len(positions) * 8)).view(-1, 8)
    file.case(f"rotation, {layout}", layout=layout, dims=6)
    file.tensor("frequencies", [3], frequencies, precise)
    file.tensor("positions", [len(positions)], positions, str)
    file.tensor("input", x.shape, x.flatten().tolist(), exact)
    turned = rotated(x, torch.tensor(positions), frequencies, layout)
    file.tensor("output", turned.shape, turned.flatten().tolist(), expected)


def narrow_and_rotated(file):
    """Keys are turned, then rounded, then read. None lies so near a border that float32 would round it over."""
    for element in NARROW:
        rotary = (frequency_table(4, 20.0), "half_split")
        for seed in range(71, 200):
            tokens = Tokens(seed, 20, 2, 1, 4)
            key = rotated(tokens.key, everywhere(tokens.key, tokens.positions), *rotary)
            low, high = narrowed(key - 1e-6, element), narrowed(key + 1e-6, element)
            if torch.equal(low, high):
                break
        else:
            raise RuntimeError("every seed puts a key near a rounding border")
        add(file, f"{element}, rotated by the library", tokens, element=element, rotary=rotary)


def frames_of_one_pair(file):
    """One pair at .5 rad a position, q = k = (1, 0), scale 1, 2 sinks, window 4: the weights of the six keys seen."""
    known = {"original": (.180199, .117808, .095214, .152276, .213359, .241144),
             "compact": (.049749, .073112, .118970, .190269, .266592, .301309)}
    rotary = ([0.5], "half_split")
    for row, frame in ((11, "original"), (11, "compact"), (1011, "compact")):
        tokens = Tokens(0, row + 1, 1, 1, 2, 6, queries=1)
        tokens.query = double([[[1.0, 0.0]]])
        tokens.key = tokens.query.expand(row + 1, 1, 2)
        tokens.value = torch.zeros(row + 1, 1, 6, dtype=torch.float64)
        for place, j in enumerate([0, 1, row - 3, row - 2, row - 1, row]):
            tokens.value[j, 0, place] = 1
        inside = (lambda i: cache_positions(tokens, i, 4, 2)) if frame == "compact" else None
        result = attention(tokens, visible(tokens, True, 4, 2), 1.0, rotary=rotary, cache_positions=inside)
        assert torch.allclose(result[0].flatten(), double(known[frame]), atol=1e-6, rtol=0)
        file.case(f"one pair, {frame}, row {row}", policy="sliding_window", window=4, sinks=2, frame=frame, scale=1.0,
                  layout="half_split", dims=2, rotates_by="library")
        file.tensor("frequencies", [1], [0.5], precise)
        put_inputs(file, tokens)
        put_expected(file, result)


# ---------------------------------------------------------------------------------------------- what others wrote

def cross_check():
    """The formulas above against the models of transformers (several of which compute in float32: hence 1e-5)."""
    def close(a, b, tolerance):
        assert torch.allclose(a.double(), b.double(), rtol=tolerance, atol=tolerance), (a - b).abs().max()

    def same_table(ours, theirs):
        assert torch.allclose(double(ours), theirs.double(), rtol=2e-6, atol=0)

    for dims, base, entries in ((128, 500000.0, dict(factor=8.0, low=1.0, high=4.0, trained=8192)),
                                (64, 500000.0, dict(factor=32.0, low=1.0, high=4.0, trained=8192))):
        config = transformers.LlamaConfig(
            head_dim=dims, max_position_embeddings=131072,
            rope_parameters=dict(rope_type="llama3", rope_theta=base, factor=entries["factor"], low_freq_factor=1.0,
                                 high_freq_factor=4.0, original_max_position_embeddings=8192))
        same_table(frequency_table(dims, base, "llama3", **entries), ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")[0])
        config.rope_parameters = dict(rope_type="linear", rope_theta=base, factor=4.0)
        same_table(frequency_table(dims, base, "linear", 4.0), ROPE_INIT_FUNCTIONS["linear"](config, "cpu")[0])
        plain = modeling_llama.LlamaRotaryEmbedding.compute_default_rope_parameters(config)[0]
        same_table(frequency_table(dims, base), plain)

    tokens = Tokens(90, 24, 4, 2, 8)
    batch = lambda x: x.transpose(0, 1)[None]  # [tokens, heads, dim] -> [1, heads, tokens, dim]
    q, k, v = batch(tokens.query), batch(tokens.key), batch(tokens.value)
    frequencies = frequency_table(8, 100.0)
    angle = tokens.positions[:, None] * double(frequencies)
    for layout, model, spread, tolerance in (
            ("half_split", modeling_llama, torch.cat((angle, angle), -1), 1e-12),
            ("interleaved", modeling_cohere, angle.repeat_interleave(2, -1), 1e-5)):
        theirs, _ = model.apply_rotary_pos_emb(q, k, spread.cos()[None], spread.sin()[None])
        ours = rotated(tokens.query, everywhere(tokens.query, tokens.positions), frequencies, layout)
        close(ours, theirs[0].transpose(0, 1), tolerance)

    seen = visible(tokens, True, 6, 2)
    mask = torch.zeros(24, 24, dtype=torch.float64).masked_fill(~seen, -math.inf)[None, None]
    module = torch.nn.Module()
    module.num_key_value_groups, module.training = 2, False
    module.sinks = double([0.0, 1.5, -2.25, 40.0])
    theirs, _ = modeling_gpt_oss.eager_attention_forward(module, q, k, v, mask, 0.75)
    close(attention(tokens, seen, scale=0.75, sink_logits=module.sinks.tolist())[0], theirs[0], 1e-12)
    theirs, _ = modeling_gemma2.eager_attention_forward(module, q, k, v, mask, scaling=0.75, softcap=2.0)
    close(attention(tokens, seen, scale=0.75, soft_cap=2.0)[0], theirs[0], 1e-5)

    bias = modeling_bloom.build_alibi_tensor(torch.ones(1, 24), 4, torch.float64)  # slope * j: a row's constant apart
    slopes = [2.0 ** -(2 * h + 2) for h in range(4)]
    k, v = repeated(tokens.key, 4), repeated(tokens.value, 4)
    theirs = scaled_dot_product_attention(q[0], k, v, attn_mask=bias + mask[0])
    close(attention(tokens, seen, alibi=slopes)[0], theirs.transpose(0, 1), 1e-12)


if __name__ == "__main__":
    torch.set_num_threads(1)
    cross_check()
    files = {"full.txt": full, "window.txt": window, "score.txt": score, "narrow.txt": narrow, "rope.txt": rope}
    deliver(__doc__, files, VERSIONS)
