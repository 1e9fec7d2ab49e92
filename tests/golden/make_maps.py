#!/usr/bin/env python3
"""Golden values of the feature maps under a sum normaliser, and of the hybrids of a window and a linear part.

Everything is formed in float64 from whole matrices of weights w_ts over the history, never from a state:
    o_t = sum_s w_ts v_s / sum_s w_ts,   lse_t = log sum_s w_ts,   a row whose sum is 0 is 0.
The weights come from public code where that has them: Based and ReBased from the naive parallel forms of fla-core,
FAVOR+ row by row from performer-pytorch's kernel on the keys up to that row (its causal form takes the maximum over
keys to come), T2R from fla-core's module, Hedgehog H1 and H4, cosFormer, LoLCATs and Liger from their formulas:
    H1        [exp z, exp -z]                                  Zhang et al. 2024, the text
    H4        [exp(z - max z), exp(min z - z)], >= 1e-12       LoLCATs, `exp_dim`
    cosFormer relu(q_t).relu(k_s) cos(pi/2 (t - s) / M)        Qin et al. 2022, M fixed
    LoLCATs   a factor sigmoid(f) exp(s - max s) in the window, phi.phi outside it, one sum for both
    Liger     1/2 (softmax over the rotated window) + 1/2 (softmax_d(q), softmax_d(k), decay logsigmoid(k) / 16)
"""
import math

import torch
from einops import repeat
from torch.nn import functional as F

from golden_file import File, Inputs, deliver, exact, expected, precise, relative
from make_linear import Hedgehog
from make_systems import close, recurrent_gla, rotated
from public_code import cut_out, version
from recurrence import recurrent, spread

VERSIONS = ", ".join(version(p) for p in ("torch", "fla-core", "performer-pytorch"))

based_form = cut_out("ops/based/naive.py", "naive_parallel_based")
rebased_form = cut_out("ops/rebased/naive.py", "naive_parallel_rebased")
T2RFeatureMap = cut_out("modules/feature_map.py", "T2RFeatureMap")
favor_kernel = cut_out("performer_pytorch.py", "softmax_kernel", package="performer_pytorch", repeat=repeat)


def header(what):
    return File([f"{what}; float64; inputs are float32 numbers.", f"Written by make_maps.py: {VERSIONS}."])


def numbers(inputs, shape, reach=2.0):
    return torch.tensor(inputs.numbers(math.prod(shape), reach), dtype=torch.float64).view(shape)


def weights_of(naive, q, k, scale=None):
    """The matrix of a naive parallel form [heads, t, s]: what it gives for values that are unit vectors."""
    tokens = len(q)
    one = torch.eye(tokens, dtype=torch.float64).expand(q.shape[1], -1, -1)[None]
    return naive(q.transpose(0, 1)[None], k.transpose(0, 1)[None], one, scale=scale, use_norm=False)[0]


def causal(phi_q, phi_k):
    return torch.einsum("thf,shf->hts", phi_q, phi_k).tril()


# ---------------------------------------------------------------------------------------------- feature maps
# Each: parameters as (name, tensor), entries, weights(query, key) [heads, t, s], and, as a check, phi of one side.

class Learned:
    """relu(W_h x + b_h); W [heads, dim, features]."""

    def __init__(self, inputs, dim, features, query_heads, key_heads, biased):
        self.entries = {"map": "relu_affine", "features": features}
        self.parameters = {"query_weights": numbers(inputs, (query_heads, dim, features), 1.0),
                           "key_weights": numbers(inputs, (key_heads, dim, features), 1.0)}
        if biased:
            self.parameters |= {"query_biases": numbers(inputs, (query_heads, features), 1.0),
                                "key_biases": numbers(inputs, (key_heads, features), 1.0)}

    def phi(self, x, side):
        tables, biases = self.parameters[f"{side}_weights"], self.parameters.get(f"{side}_biases")
        heads = max(len(tables), x.shape[1])
        rows = []
        for h in range(heads):
            at = h // (heads // len(tables))
            theirs = T2RFeatureMap(x.shape[-1], tables.shape[-1], biases is not None).double()
            theirs.layer.weight.data = tables[at].T
            if biases is not None:
                theirs.layer.bias.data = biases[at]
            rows.append(theirs(x[:, h // (heads // x.shape[1])]).detach())
        return torch.stack(rows, 1)

    def weights(self, q, k, heads):
        return causal(spread(self.phi(q, "query"), heads), spread(self.phi(k, "key"), heads))


class Hedgehogs:
    def __init__(self, inputs, form, dim, features, query_heads, key_heads):
        self.map = Hedgehog(form, inputs, dim, features, query_heads, key_heads)
        self.map.activation = {
            "h1": lambda z: torch.cat((z.exp(), (-z).exp()), -1),
            "h4": lambda z: torch.cat(((z - z.amax(-1, keepdim=True)).exp(), (z.amin(-1, keepdim=True) - z).exp()),
                                      -1).clamp(min=1e-12)}[form]
        self.entries = {"map": "hedgehog", "form": form, "features": features}
        self.parameters = {"query_weights": self.map.query_weights, "key_weights": self.map.key_weights}

    def phi(self, x, side):
        return self.map.query(x) if side == "query" else self.map.key(x)

    def weights(self, q, k, heads):
        return causal(spread(self.phi(q, "query"), heads), spread(self.phi(k, "key"), heads))


class Favor:
    """FAVOR+: row t as the kernel gives it for the keys up to t; the maximum of the keys is of their projections."""

    def __init__(self, inputs, dim, features, epsilon):
        self.entries = {"map": "favor", "features": features, "epsilon": epsilon}
        self.parameters = {"projection": numbers(inputs, (features, dim), 1.7)}
        self.kernel = lambda x, is_query: favor_kernel(
            x.transpose(0, 1)[None], projection_matrix=self.parameters["projection"], is_query=is_query,
            eps=epsilon)[0].transpose(0, 1)

    def weights(self, q, k, heads):
        made = torch.zeros(heads, len(q), len(q), dtype=torch.float64)
        phi_q = spread(self.kernel(q, True), heads)
        for t in range(len(q)):
            phi_k = spread(self.kernel(k[:t + 1], False), heads)
            made[:, t, :t + 1] = torch.einsum("hf,shf->hs", phi_q[t], phi_k)
        return made


class CosFormer:
    def __init__(self, period):
        self.entries, self.parameters, self.period = {"map": "cosformer", "period": period}, {}, period

    def phi(self, x, side):  # tokens count from 1; only differences show
        angle = math.pi / 2 * torch.arange(1, len(x) + 1, dtype=torch.float64)[:, None, None] / self.period
        return torch.cat((F.relu(x) * angle.sin(), F.relu(x) * angle.cos()), -1)

    def weights(self, q, k, heads):
        t = torch.arange(len(q), dtype=torch.float64)
        fade = (math.pi / 2 * (t[:, None] - t) / self.period).cos()
        return causal(F.relu(spread(q, heads)), F.relu(spread(k, heads))) * fade


class Taylor:
    entries, parameters = {"map": "taylor_2"}, {}

    def phi(self, x, side):
        d, (a, b) = x.shape[-1], torch.triu_indices(x.shape[-1], x.shape[-1], 1)
        pairs = x[..., a] * x[..., b] / d**0.5
        return torch.cat((torch.ones_like(x[..., :1]), x / d**0.25, x * x / (2 * d)**0.5, pairs), -1)

    def weights(self, q, k, heads):
        return weights_of(based_form, spread(q, heads), spread(k, heads))


class Rebased:
    def __init__(self, inputs, dim):
        self.entries = {"map": "rebased"}
        self.parameters = {"norm_gamma": (1 + numbers(inputs, (dim,), 0.5)).float().double(),
                           "norm_beta": numbers(inputs, (dim,), 0.3)}

    def normed(self, x):
        return F.layer_norm(x, x.shape[-1:], self.parameters["norm_gamma"], self.parameters["norm_beta"], eps=1e-5)

    def phi(self, x, side):
        x, d, (a, b) = self.normed(x), x.shape[-1], torch.triu_indices(x.shape[-1], x.shape[-1], 1)
        return torch.cat((x * x / d**0.5, x[..., a] * x[..., b] * (2 / d)**0.5), -1)

    def weights(self, q, k, heads):
        return weights_of(rebased_form, spread(self.normed(q), heads), spread(self.normed(k), heads))


# ---------------------------------------------------------------------------------------------- one case of a map

def add_map(file, name, seed, system, make, tokens=15, heads=4, kv_heads=None, key_dim=5, value_dim=4, reach=2.0,
            rising=1.0, dead=()):
    """make(inputs) -> the map; rising: the last key is so many times as long as the first; dead: tokens whose every
    number is negative (relu maps them to nothing)."""
    inputs = Inputs(seed)
    kv_heads = kv_heads or heads
    query = numbers(inputs, (tokens, heads, key_dim), reach)
    key = numbers(inputs, (tokens, kv_heads, key_dim), reach)
    value = numbers(inputs, (tokens, kv_heads, value_dim))
    if rising != 1:
        key = ((key * torch.linspace(1, rising, tokens)[:, None, None]).round(decimals=3)).float().double()
    for side, t in dead:
        x = {"query": query, "key": key}[side]
        x[t] = -x[t].abs()
    feature_map = make(inputs)
    weights = feature_map.weights(query, key, heads)
    sums = weights.sum(-1).T[..., None]
    rows = torch.einsum("hts,shv->thv", weights, spread(value, heads))
    output = torch.where(sums > 0, rows / sums, 0.0)
    if hasattr(feature_map, "phi"):  # the same from a state
        phi_q, phi_k = feature_map.phi(query, "query"), feature_map.phi(key, "key")
        ones = torch.cat((value, torch.ones_like(value[..., :1])), -1)
        both, _ = recurrent("additive", heads, 1.0, phi_q, phi_k, ones)
        close(both[..., :-1], rows)
        close(both[..., -1:], sums)
        without_signs, _ = recurrent("additive", heads, 1.0, phi_q.abs(), phi_k.abs(), torch.ones_like(value[..., :1]))
        if (without_signs > 30 * sums).any():
            raise ValueError(f"{name}: a row is ill conditioned, choose another seed")

    entries = dict(feature_map.entries)
    file.case(name, system=system, normaliser="sum", heads=heads, cut=tokens // 3 + 1, **entries)
    for part, x in feature_map.parameters.items():
        file.tensor(part, x.shape, x.flatten().tolist(), exact)
    for part, x in (("query", query), ("key", key), ("value", value)):
        file.tensor(part, x.shape, x.flatten().tolist(), exact)
    file.tensor("output", output.shape, output.flatten().tolist(), expected)
    if system != "performer":  # its sum is known up to a factor for each query
        file.tensor("lse", sums.shape[:2], sums.log().flatten().tolist(), expected)


def maps():
    file = header("Linear attention with a sum normaliser: further feature maps")

    def case(name, seed, system, make, **more):
        add_map(file, name, seed, system, make, **more)

    case("t2r", 400, "t2r", lambda i: Learned(i, 5, 7, 4, 4, False), dead=[("key", 0)])
    case("t2r, biased", 401, "t2r", lambda i: Learned(i, 5, 7, 4, 4, True), dead=[("key", 0)])
    case("t2r, rows that see nothing", 402, "t2r", lambda i: Learned(i, 5, 3, 1, 1, False), dead=[("query", 0)])
    case("t2r, keys mapped for every query head", 403, "t2r", lambda i: Learned(i, 5, 7, 4, 4, False), kv_heads=2,
         dead=[("key", 0)])
    for form in ("h1", "h4"):
        case(f"hedgehog {form}", 410, "hedgehog", lambda i: Hedgehogs(i, form, 5, 5, 4, 4), reach=1.0)
        case(f"hedgehog {form}, grouped 4 over 2", 411, "hedgehog", lambda i: Hedgehogs(i, form, 5, 3, 4, 2),
             kv_heads=2)
        case(f"hedgehog {form}, keys mapped for every query head", 412, "hedgehog",
             lambda i: Hedgehogs(i, form, 5, 3, 4, 4), kv_heads=2)
    case("performer", 420, "performer", lambda i: Favor(i, 5, 8, 1e-4), reach=1.0)
    case("performer, epsilon 1e-6", 421, "performer", lambda i: Favor(i, 5, 8, 1e-6), reach=1.0)
    case("performer, the maximum rises", 422, "performer", lambda i: Favor(i, 5, 8, 1e-4), reach=1.0, rising=5.0)
    case("performer, grouped 4 over 2", 423, "performer", lambda i: Favor(i, 5, 11, 1e-4), reach=1.0, kv_heads=2)
    case("performer, 133 tokens", 424, "performer", lambda i: Favor(i, 3, 4, 1e-4), tokens=133, heads=2, key_dim=3,
         value_dim=2, rising=2.0)
    case("cosformer, period 15", 430, "cosformer", lambda i: CosFormer(15), dead=[("key", 3), ("query", 7)])
    case("cosformer, period 64, grouped 4 over 2", 431, "cosformer", lambda i: CosFormer(64), kv_heads=2,
         dead=[("key", 3)])
    case("cosformer, 133 tokens", 432, "cosformer", lambda i: CosFormer(150), tokens=133, heads=2, key_dim=3,
         value_dim=2, dead=[("key", 3)])
    case("based", 440, "based", lambda i: Taylor())
    case("based, dim 8, grouped 4 over 2", 441, "based", lambda i: Taylor(), key_dim=8, kv_heads=2)
    case("based, 133 tokens", 442, "based", lambda i: Taylor(), tokens=133, heads=2, key_dim=3, value_dim=2)
    case("rebased", 451, "rebased", lambda i: Rebased(i, 5))
    case("rebased, dim 8, grouped 4 over 2", 461, "rebased", lambda i: Rebased(i, 8), key_dim=8, kv_heads=2)
    return file


# ---------------------------------------------------------------------------------------------- hybrids

def window_mask(tokens, kind, window, sinks):
    """[t, s]: is s in the softmax part of t. standard: the last `window` tokens, t with them. terraced: blocks of
    `window` from the first token; t's block and the one before it. Sinks never leave."""
    t, s = torch.arange(tokens)[:, None], torch.arange(tokens)[None]
    if kind == "standard":
        near = t - s < window
    else:
        near = t // window - s // window < 2
    return (near | (s < sinks)) & (s <= t), s <= t


def lolcats(file, name, seed, kind, window, tokens=17, heads=4, kv_heads=None, sinks=0, affine=False, dim=6, features=4,
            value_dim=4, reach=2.0, key_map_heads=None):
    inputs = Inputs(seed)
    kv_heads = kv_heads or heads
    query = numbers(inputs, (tokens, heads, dim), reach)
    key, value = numbers(inputs, (tokens, kv_heads, dim), reach), numbers(inputs, (tokens, kv_heads, value_dim))
    feature_map = Hedgehog("h3", inputs, dim, features, heads, key_map_heads or heads)
    factors = numbers(inputs, (heads,), 3.0)

    near, seen = window_mask(tokens, kind, window, sinks)
    scores = torch.einsum("thd,shd->hts", query, spread(key, heads)) * dim**-0.5
    scores = scores.masked_fill(~near, -math.inf)
    in_window = factors.sigmoid()[:, None, None] * (scores - scores.amax(-1, keepdim=True)).exp()
    outside = torch.einsum("thf,shf->hts", feature_map.query(query), spread(feature_map.key(key), heads))
    outside = outside.masked_fill(near | ~seen, 0.0)  # not scaled by exp(-max): the maximum is part of the model
    if affine:
        outside = outside * (1 - factors.sigmoid())[:, None, None]
    weights = in_window + outside
    output = torch.einsum("hts,shv->thv", weights / weights.sum(-1, keepdim=True), spread(value, heads))

    file.case(name, system="lolcats", window_kind=kind, window=window, sinks=sinks, heads=heads, cut=tokens // 3 + 1,
              features=features, linear_factor="affine" if affine else "one")
    put = lambda part, x, form=exact: file.tensor(part, x.shape, x.flatten().tolist(), form)
    put("query_weights", feature_map.query_weights)
    put("key_weights", feature_map.key_weights)
    put("window_factors", factors)  # before the sigmoid
    for part, x in (("query", query), ("key", key), ("value", value)):
        put(part, x)
    put("output", output, expected)


def liger(file, name, seed, window, tokens=17, heads=4, kv_heads=2, dim=6, value_dim=4, reach=2.0):
    """window: keys a query sees, itself with them; FlashAttention's pair (64, 64) is 65."""
    inputs = Inputs(seed)
    query = numbers(inputs, (tokens, heads, dim), reach)
    key, value = numbers(inputs, (tokens, kv_heads, dim), reach), numbers(inputs, (tokens, kv_heads, value_dim))
    decay = F.logsigmoid(key) / 16
    frequencies = 10000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)

    q, k, v, g = (spread(x, heads)[None] for x in (query.softmax(-1) * dim**0.5, key.softmax(-1), value, decay))
    linear = recurrent_gla(q, k, v, g)[0][0]  # it multiplies by dim^-1/2; Liger does not scale
    near, _ = window_mask(tokens, "standard", window, 0)
    q, k = (spread(rotated(x, frequencies, "half_split"), heads).transpose(0, 1) for x in (query, key))
    softmax = F.scaled_dot_product_attention(q, k, spread(value, heads).transpose(0, 1), attn_mask=near)
    softmax = softmax.transpose(0, 1)

    file.case(name, system="liger_gla", window=window, heads=heads, cut=tokens // 3 + 1, layout="half_split", dims=dim)
    put = lambda part, x, form=exact: file.tensor(part, x.shape, x.flatten().tolist(), form)
    put("frequencies", frequencies, precise)
    for part, x in (("query", query), ("key", key), ("value", value)):  # not rotated
        put(part, x)
    put("decay", decay, relative)  # what the gate makes of the key
    put("window_output", softmax, expected)
    put("linear_output", linear, expected)
    put("output", 0.5 * softmax + 0.5 * linear, expected)


def hybrids():
    file = header("Hybrids of a softmax window and a linear part")
    lolcats(file, "lolcats, standard", 500, "standard", 4)
    lolcats(file, "lolcats, standard, grouped 4 over 2", 501, "standard", 4, kv_heads=2)
    lolcats(file, "lolcats, standard, window of one", 502, "standard", 1, heads=2)
    lolcats(file, "lolcats, standard, all in the window", 503, "standard", 32, heads=2)
    lolcats(file, "lolcats, standard, large scores", 504, "standard", 4, heads=2, reach=6.0)
    lolcats(file, "lolcats, standard, affine factors", 505, "standard", 4, heads=2, affine=True)
    lolcats(file, "lolcats, standard, two sinks", 506, "standard", 4, heads=2, sinks=2)
    lolcats(file, "lolcats, terraced", 510, "terraced", 4)
    lolcats(file, "lolcats, terraced, grouped 4 over 2", 511, "terraced", 4, kv_heads=2)
    lolcats(file, "lolcats, terraced, 16 tokens", 512, "terraced", 4, heads=2, tokens=16)
    lolcats(file, "lolcats, terraced, window 3, 19 tokens", 513, "terraced", 3, heads=2, tokens=19)
    lolcats(file, "lolcats, terraced, two sinks", 514, "terraced", 3, heads=2, sinks=2)
    lolcats(file, "lolcats, standard, 133 tokens", 520, "standard", 16, heads=2, kv_heads=1, tokens=133, dim=3,
            features=2, value_dim=2)
    lolcats(file, "lolcats, terraced, 133 tokens", 521, "terraced", 16, heads=2, kv_heads=1, tokens=133, dim=3,
            features=2, value_dim=2)
    liger(file, "liger, 4 keys", 530, 4)
    liger(file, "liger, one key more", 530, 5)
    liger(file, "liger, all in the window", 532, 64)
    liger(file, "liger, raw keys of tens", 533, 4, reach=20.0)
    liger(file, "liger, 133 tokens", 534, 16, tokens=133, heads=2, kv_heads=1, dim=4, value_dim=2)
    return file


if __name__ == "__main__":
    torch.set_num_threads(1)
    deliver(__doc__, {"maps.txt": maps, "hybrids.txt": hybrids}, VERSIONS)
