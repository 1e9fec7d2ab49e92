#!/usr/bin/env python3
"""Golden values of the linear policies, from the naive recurrences of flash-linear-attention (package fla-core).

The recurrences are cut out of the installed package by name and run in float64: importing the package would need a GPU
compiler. A sum normaliser is one more value column of ones, as in
    S_t = exp(g_t) S_(t-1) + phi(k_t) v_t',  z_t = exp(g_t) z_(t-1) + phi(k_t),  o_t = S_t' phi(q_t) / (z_t . phi(q_t)).
The public functions add 1e-10 to that denominator; the values here do not, and a row whose denominator is 0 is 0.
"""
import math

import torch
from torch.nn import functional as F

from golden_file import File, Inputs, deliver, exact, expected, to_float32
from public_code import cut_out, version

VERSIONS = ", ".join(version(p) for p in ("torch", "fla-core"))


# ---------------------------------------------------------------------------------------------- the public recurrences

recurrent_linear = cut_out("ops/linear_attn/naive.py", "naive_recurrent_linear_attn")
chunk_linear = cut_out("ops/linear_attn/naive.py", "naive_chunk_linear_attn")
recurrent_gla = cut_out("ops/simple_gla/naive.py", "naive_recurrent_simple_gla")
parallel_gla = cut_out("ops/simple_gla/naive.py", "naive_parallel_simple_gla")
chunk_gla = cut_out("ops/simple_gla/naive.py", "naive_chunk_simple_gla")
HedgehogFeatureMap = cut_out("modules/feature_map.py", "HedgehogFeatureMap")


# ---------------------------------------------------------------------------------------------- feature maps

class Hedgehog:
    """phi of z = x W_h + b_h, weights [heads, dim, features] for queries and for keys.

    h2: softmax over the joint 2 f vector [2 z, -2 z] (the original listing, fla).
    h3: [softmax(z), softmax(-z)], each on its own, at least 1e-12 (LoLCATs).
    """

    def __init__(self, form, inputs, dim, features, query_heads, key_heads, biased=False):
        def table(heads, rows):
            values = torch.tensor(inputs.numbers(heads * rows * features, 1.0), dtype=torch.float64)
            return values.view(heads, rows, features)

        self.form, self.features = form, features
        self.query_weights, self.key_weights = table(query_heads, dim), table(key_heads, dim)
        self.query_biases = table(query_heads, 1)[:, 0] if biased else None
        self.key_biases = table(key_heads, 1)[:, 0] if biased else None

    def activation(self, z):
        if self.form == "h2":
            return torch.cat((2 * z, -2 * z), -1).softmax(-1)
        return torch.cat((z.softmax(-1), (-z).softmax(-1)), -1).clamp(min=1e-12)

    def side(self, x, weights, biases):  # x [tokens, x_heads, dim]; the tables may have more heads than x, or fewer
        heads = max(x.shape[1], weights.shape[0])
        spread = lambda table: table.repeat_interleave(heads // table.shape[0], 0)
        z = torch.einsum("thd,hdf->thf", repeated(x, heads), spread(weights))
        return self.activation(z if biases is None else z + spread(biases))

    def query(self, x):
        return self.side(x, self.query_weights, self.query_biases)

    def key(self, x):
        return self.side(x, self.key_weights, self.key_biases)


class Plain:
    def __init__(self, function):
        self.query = self.key = function


PLAIN = {"elu_plus_one": Plain(lambda x: F.elu(x) + 1), "relu": Plain(F.relu), "identity": Plain(lambda x: x)}


# ---------------------------------------------------------------------------------------------- one case

def repeated(x, heads):
    """[tokens, x_heads, ...] -> [tokens, heads, ...]: head h reads h / (heads / x_heads)."""
    return x.repeat_interleave(heads // x.shape[1], dim=1)


def decays(inputs, tokens, heads, kind):
    """[tokens, heads], natural log, <= 0. Head 0 hardly forgets, so that a lost state shows; the next forget more."""
    rows = []
    for t in range(tokens):
        for h in range(heads):
            g = abs(inputs.number(1.0)) * 0.02 * 6.0**h
            if kind == "wiping" and t % 7 == 5:
                g = 200.0 if h % 2 else 0.0
            rows.append(to_float32(-round(g, 3)) + 0.0)
    return torch.tensor(rows, dtype=torch.float64).view(tokens, heads)


def run(feature_map, query, key, value, decay, heads, normalised, scale, state=None):
    """-> output [tokens, heads, value_dim], denominators [tokens, heads] or None, state [heads, features, columns]."""
    q, k, v = (repeated(x, heads)[None] for x in (feature_map.query(query), feature_map.key(key), value))
    if normalised:
        v = torch.cat((v, torch.ones_like(v[..., :1])), -1)
    start = None if state is None else state[None]
    if decay is None:
        out, end = recurrent_linear(q, k, v, scale=scale, initial_state=start, output_final_state=True)
    else:
        out, end = recurrent_gla(q, k, v, repeated(decay, heads)[None], scale=scale, initial_state=start)
    out, end = out[0], end[0]
    if not normalised:
        return out, None, end
    numerator, denominator = out[..., :-1], out[..., -1:]
    return torch.where(denominator > 0, numerator / denominator, 0.0), denominator[..., 0], end


def add(file, name, seed, tokens, heads, kv_heads=None, key_dim=6, value_dim=5, map="elu_plus_one", hedgehog=None,
        normaliser="sum", scale=1.0, decay=None, gate_heads=None, query_heads=None, value_heads=None, dead=()):
    """dead: query and key tokens whose every number is negative (relu maps them to nothing)."""
    inputs = Inputs(seed)
    kv_heads = kv_heads or heads

    def tensor(rows, heads, dim, reach=2.0):
        return torch.tensor(inputs.numbers(rows * heads * dim, reach), dtype=torch.float64).view(rows, heads, dim)

    query = tensor(tokens, query_heads or heads, key_dim)
    key = tensor(tokens, kv_heads, key_dim)
    value = tensor(tokens, value_heads or kv_heads, value_dim)
    probe = tensor(3, query_heads or heads, key_dim)
    for side, t in dead:
        x = {"query": query, "key": key}[side]
        x[t] = -x[t].abs()
    feature_map = hedgehog(inputs) if hedgehog else PLAIN[map]
    g = decays(inputs, tokens, gate_heads or kv_heads, decay) if decay else None
    normalised = normaliser == "sum"
    cut = tokens // 3 + 1 if tokens > 1 else 1

    def go(first, last, state=None):
        q, k, v, decay = (None if x is None else x[first:last] for x in (query, key, value, g))
        return run(feature_map, q, k, v, decay, heads, normalised, scale, state)

    output, denominator, end = go(0, tokens)
    check(feature_map, query, key, value, g, heads, normalised, scale, output)
    middle = go(0, cut)[2]
    if cut < tokens:
        rest = go(cut, tokens, middle)
        torch.testing.assert_close(rest[0], output[cut:], rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(rest[2], end, rtol=1e-12, atol=1e-13)

    read = torch.einsum("thf,hfv->thv", repeated(feature_map.query(probe), heads) * scale, end)
    if normalised:
        read = torch.where(read[..., -1:] > 0, read[..., :-1] / read[..., -1:], 0.0)

    entries = {"policy": "linear", "map": "hedgehog" if hedgehog else map, "normaliser": normaliser, "heads": heads,
               "decay_kind": "per_head_and_token" if decay else "none", "cut": cut}
    if not normalised and scale != key_dim**-0.5:  # the library's default
        entries["scale"] = float(scale)
    if hedgehog:
        entries |= {"form": feature_map.form, "features": feature_map.features}
    file.case(name, **entries)
    put = lambda name, x, form: file.tensor(name, x.shape, x.flatten().tolist(), form)
    if hedgehog:
        for part in ("query_weights", "key_weights", "query_biases", "key_biases"):
            if getattr(feature_map, part) is not None:
                put(part, getattr(feature_map, part), exact)
    for part, x in (("query", query), ("key", key), ("value", value), ("probe", probe), ("decay", g)):
        if x is not None:
            put(part, x, exact)
    put("output", output, expected)
    if normalised:
        put("lse", denominator.log(), expected)
    put("probe_output", read, expected)
    if not hedgehog:  # [heads, features, value_dim], and the normaliser as one more column
        put("state_at_cut", middle, expected)
        put("state_at_end", end, expected)


# ---------------------------------------------------------------------------------------------- a second opinion

def check(feature_map, query, key, value, decay, heads, normalised, scale, output):
    """The same rows from the quadratic form, and from the package's other public forms."""
    q, k, v = repeated(feature_map.query(query), heads), repeated(feature_map.key(key), heads), repeated(value, heads)
    tokens = len(q)
    g = torch.zeros(tokens, heads, dtype=torch.float64) if decay is None else repeated(decay, heads)
    total = g.cumsum(0).T  # [heads, tokens]
    causal = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    fade = (total[:, :, None] - total[:, None, :]).masked_fill(~causal, -math.inf).exp()
    weights = torch.einsum("thf,shf->hts", q, k) * scale * fade
    rows = torch.einsum("hts,shv->thv", weights, v)
    sums = weights.sum(-1).T[..., None]
    close = lambda a, b, tolerance=1e-10: torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    close(torch.where(sums > 0, rows / sums, 0.0) if normalised else rows, output)
    batch = lambda x: x[None]
    if normalised and decay is None:
        theirs, _ = recurrent_linear(batch(q), batch(k), batch(v), scale=1.0, normalize=True)
        clear = (sums > 1e-2).expand_as(output)  # their 1e-10 in the denominator
        close(theirs[0][clear], output[clear], 1e-7)
        if tokens % 64 == 0:
            theirs = chunk_linear(batch(q), batch(k), batch(v), scale=1.0, normalize=True)
            close(theirs[0][clear], output[clear], 1e-7)
    if not normalised:
        close(parallel_gla(batch(q), batch(k), batch(v), batch(g), scale)[0][0], output, 1e-9)
        close(chunk_gla(batch(q), batch(k), batch(v), batch(g), scale=scale)[0][0], output, 1e-9)


def check_hedgehog():
    """Form h2 against the package's own module, head by head."""
    ours = Hedgehog("h2", Inputs(1), 6, 6, 4, 4, biased=True)
    x = torch.tensor(Inputs(2).numbers(10 * 4 * 6), dtype=torch.float64).view(10, 4, 6)
    for h in range(4):
        theirs = HedgehogFeatureMap(6).double()
        theirs.layer.weight.data, theirs.layer.bias.data = ours.query_weights[h].T, ours.query_biases[h]
        torch.testing.assert_close(theirs(x[:, h]), ours.query(x)[:, h], rtol=1e-12, atol=1e-13)


# ---------------------------------------------------------------------------------------------- the file

def linear():
    file = File(["Linear attention: feature maps, sum normaliser, decay, states; float64; inputs are float32 numbers.",
                 f"Written by make_linear.py: {VERSIONS}."])
    add(file, "elu, one token", 1, 1, 2)
    add(file, "elu", 2, 20, 4)
    add(file, "elu, grouped 4 over 2", 3, 20, 4, 2)
    add(file, "elu, one KV head", 4, 17, 3, 1, key_dim=3, value_dim=7)
    add(file, "elu, dims 65 and 3", 5, 15, 2, 1, key_dim=65, value_dim=3)
    add(file, "elu, dims 1 and 1", 6, 25, 2, key_dim=1, value_dim=1)
    add(file, "elu, 192 tokens", 7, 192, 2, 1, key_dim=4, value_dim=4)
    add(file, "elu, 300 tokens", 8, 300, 1, key_dim=4, value_dim=3)
    add(file, "elu, grouped values", 9, 16, 4, 2, query_heads=2, value_heads=4)
    add(file, "relu, rows that see nothing", 10, 20, 4, 2, map="relu",
        dead=[("key", 0), ("key", 1), ("query", 2), ("query", 9), ("key", 12), ("query", 19)])
    add(file, "relu, 100 tokens", 11, 100, 2, 1, map="relu", key_dim=4, value_dim=4)

    add(file, "elu, no normaliser", 20, 20, 4, 2, normaliser="none", scale=0.5)
    add(file, "identity, no normaliser", 21, 20, 4, 2, map="identity", normaliser="none", scale=6**-0.5)
    plain = dict(map="identity", normaliser="none", scale=0.25)
    add(file, "decay", 22, 24, 4, decay="plain", **plain)
    add(file, "decay, grouped 4 over 2", 23, 24, 4, 2, decay="plain", **plain)
    add(file, "decay of every query head, grouped 4 over 2", 24, 24, 4, 2, decay="plain", gate_heads=4, **plain)
    add(file, "decay, one gate for all heads", 25, 24, 4, 2, decay="plain", gate_heads=1, **plain)
    add(file, "decay that wipes", 26, 30, 4, 2, decay="wiping", gate_heads=4, **plain)
    add(file, "decay, dims 65 and 3", 27, 14, 2, 1, key_dim=65, value_dim=3, decay="plain", **plain)
    add(file, "decay, 200 tokens", 28, 200, 2, 1, key_dim=4, value_dim=4, decay="plain", gate_heads=2, **plain)
    add(file, "decay, relu", 29, 24, 4, 2, map="relu", normaliser="none", decay="plain", scale=0.25)
    add(file, "decay, grouped values", 30, 20, 4, 2, query_heads=2, value_heads=4, decay="plain", gate_heads=4, **plain)
    add(file, "decay under a normaliser", 31, 24, 4, 2, decay="plain", gate_heads=4)
    add(file, "decay under a normaliser, 150 tokens", 32, 150, 2, 1, key_dim=4, value_dim=4, decay="plain",
        gate_heads=2)

    for form in ("h2", "h3"):
        def features(dim, f, query_heads, key_heads, biased=False, form=form):
            return lambda inputs: Hedgehog(form, inputs, dim, f, query_heads, key_heads, biased)
        add(file, f"hedgehog {form}", 40, 20, 4, hedgehog=features(6, 6, 4, 4))
        add(file, f"hedgehog {form}, biased", 41, 16, 4, hedgehog=features(6, 6, 4, 4, True))
        add(file, f"hedgehog {form}, 4 features", 42, 20, 4, 2, hedgehog=features(6, 4, 4, 2))
        add(file, f"hedgehog {form}, keys mapped for every query head", 43, 20, 4, 2, hedgehog=features(6, 5, 4, 4))
        add(file, f"hedgehog {form}, 130 tokens", 44, 130, 2, 1, key_dim=3, value_dim=3, hedgehog=features(3, 4, 2, 1))
        add(file, f"hedgehog {form}, dims 33 and 9", 45, 12, 2, 1, key_dim=33, value_dim=9,
            hedgehog=features(33, 9, 2, 2))
        add(file, f"hedgehog {form}, one map for all heads", 47, 14, 4, 2, hedgehog=features(6, 6, 1, 1, True))
        add(file, f"hedgehog {form}, decay", 46, 16, 4, 2, hedgehog=features(6, 5, 4, 2), decay="plain")
    return file


if __name__ == "__main__":
    torch.set_num_threads(1)
    check_hedgehog()
    deliver(__doc__, {"linear.txt": linear}, VERSIONS)
