#!/usr/bin/env python3
"""Golden values of the recurrences of each linear system: the core between its projections and its output norm.

The naive forms of flash-linear-attention (package fla-core) and the torch forms of transformers, promoted to float64.
Every case is checked, before it is written, against recurrence.py (recurrent and quadratic) and against its own
continuation from a state.
"""
import math

import torch
from torch.nn import functional as F

from golden_file import File, Inputs, deliver, exact, expected, precise, to_float32
from public_code import cut_out, model, version
from recurrence import quadratic, recurrent, spread

VERSIONS = ", ".join(version(p) for p in ("torch", "fla-core", "transformers"))


def close(a, b, tolerance=1e-10):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


# ---------------------------------------------------------------------------------------------- the public recurrences
# Each takes what a case holds, every operand with `heads` heads already, and gives [tokens, heads, value_dim] and the
# last state or None.

def time_first(x):
    return None if x is None else x[None]  # [1, tokens, heads, dim]


def head_first(x):
    return None if x is None else x.transpose(0, 1)[None]  # [1, heads, tokens, dim]


recurrent_gla = cut_out("ops/gla/naive.py", "naive_recurrent_gla")
recurrent_simple_gla = cut_out("ops/simple_gla/naive.py", "naive_recurrent_simple_gla")
chunk_simple_gla = cut_out("ops/simple_gla/naive.py", "naive_chunk_simple_gla")
retention = cut_out("ops/retention/naive.py", "naive_retention")
recurrent_delta = cut_out("ops/delta_rule/naive.py", "delta_rule_recurrence")
recurrent_gated_delta = cut_out("ops/gated_delta_rule/naive.py", "naive_recurrent_gated_delta_rule")
chunk_gated_delta = cut_out("ops/gated_delta_rule/naive.py", "naive_chunk_gated_delta_rule")
recurrent_kda = cut_out("ops/kda/naive.py", "naive_recurrent_kda")
recurrent_rwkv6 = cut_out("ops/rwkv6/recurrent_naive.py", "naive_recurrent_rwkv6")
recurrent_dplr = cut_out("ops/generalized_delta_rule/dplr/naive.py", "dplr_recurrence")
hf_chunk_gated_delta = model("qwen3_next").torch_chunk_gated_delta_rule
hf_chunk_kda = model("kimi_linear").chunk_kimi_delta_attention
hf_chunk_mamba2 = model("mamba2").mamba2_chunk_scan


def gla(c):
    scale = c.scale * c.key.shape[-1] ** 0.5  # it multiplies by K^-1/2 itself
    out, end = recurrent_gla(time_first(c.query * scale), time_first(c.key), time_first(c.value), time_first(c.decay),
                             output_final_state=True)
    return out[0], end[0]


def simple_gla(c):
    each = c.decay[None].expand(len(c.query), -1) if c.decay.ndim == 1 else c.decay[..., 0]
    operands = [x[None] for x in (c.query, c.key, c.value, each)]
    out, end = recurrent_simple_gla(*operands, scale=c.scale)
    close(chunk_simple_gla(*operands, scale=c.scale)[0], out)
    return out[0], end[0]


def retnet(c):
    scale = c.scale * c.key.shape[-1] ** 0.5
    out = retention(head_first(c.query * scale), head_first(c.key), head_first(c.value))[0].transpose(0, 1)
    close(out, simple_gla(c)[0])
    return out, None


def mamba2(c):
    """The state-space form: B = k, C = q, A = -1, dt = -g and x = v / dt, for it multiplies by dt itself."""
    dt, A = -c.decay[..., 0], torch.full((c.key.shape[1],), -1.0, dtype=torch.float64)
    return hf_chunk_mamba2(*(x[None] for x in (c.value / dt[..., None], dt)), A,
                           *(x[None] for x in (c.key, c.query)), chunk_size=8)[0] * c.scale, None


def delta(c):
    scale = c.scale * c.key.shape[-1] ** 0.5
    out, end = recurrent_delta(head_first(c.query * scale), head_first(c.key), head_first(c.value), head_first(c.beta))
    return out[0].transpose(0, 1), end[0]


def gated_delta(c):
    q, k, v = (time_first(x) for x in (c.query, c.key, c.value))
    g, beta = c.decay[None, ..., 0], c.beta[None, ..., 0]
    out, end = recurrent_gated_delta(q, k, v, beta, g, scale=c.scale, output_final_state=True)
    chunked, _ = chunk_gated_delta(q, k, v, g, beta, chunk_size=8, scale=c.scale)
    close(chunked, out, 1e-9)
    theirs = hf_chunk_gated_delta(q * c.scale * k.shape[-1] ** 0.5, k, v, g=g, beta=beta, chunk_size=8,
                                  initial_state=None, output_final_state=False)[0]
    close(theirs, out, 1e-9)
    return out[0], end[0]


def kda(c):
    q, k, v, g = (time_first(x) for x in (c.query, c.key, c.value, c.decay))
    out, end = recurrent_kda(q, k, v, g, c.beta[None, ..., 0], scale=c.scale, output_final_state=True)
    return out[0], end[0]


def rwkv6(c):
    out, end = recurrent_rwkv6(*(head_first(x) for x in (c.query, c.key, c.value, c.decay)), c.bonus, scale=c.scale,
                               output_final_state=True)
    return out[0].transpose(0, 1), end[0]


def rwkv7(c):
    scale = c.scale * c.key.shape[-1] ** 0.5
    out, end = recurrent_dplr(*(head_first(x) for x in (c.query * scale, c.key, c.value, c.removal, c.replacement,
                                                        c.decay)))
    return out[0].transpose(0, 1), end[0]


# ---------------------------------------------------------------------------------------------- maps

def l2_normalised(x):
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


MAPS = {"identity": lambda x: x, "silu": F.silu, "l2_normalised": l2_normalised,
        "silu_l2_normalised": lambda x: l2_normalised(F.silu(x))}


# ---------------------------------------------------------------------------------------------- gates

def logsigmoid_16(inputs, reach=4.0):
    return F.logsigmoid(torch.tensor(inputs.number(reach), dtype=torch.float64)).item() / 16


def decay_of(kind, inputs, h, t):
    """Head 0 of a case always remembers, so that a lost state shows."""
    if kind == "zero":
        return 0.0
    if kind == "soft":  # logsigmoid / 16: what GLA and its kin see
        return logsigmoid_16(inputs) * (0.1 if h == 0 else 1)
    u = abs(inputs.number(1.0))
    if kind == "bounded":  # (-0.6065, 0), RWKV-7
        return -0.6 * u * (0.02 if h == 0 else 1)
    if kind == "per head":  # head by head stronger: 0.01, .1, 1, 10 a step
        return -0.01 * u * 10.0**h
    if kind == "five":  # up to -5 at every step, but for head 0
        return -5.0 * u * (0.004 if h == 0 else 1)
    if kind == "sixty":
        return -60.0 * u * (0.0005 if h == 0 else 1)
    if kind == "random zeros":
        return -2.0 * u * (0.01 if h == 0 else 1) if inputs.number(1.0) > 0 else 0.0
    if kind == "wiping":  # one token in five forgets everything, the others little
        return -90.0 if t % 5 == 4 and h != 0 else -0.02 * u
    raise ValueError(kind)


def alibi_slopes(heads):
    return [2.0 ** (-8.0 * (h + 1) / heads) for h in range(heads)]


def retnet_decays(heads):
    return [math.log(1 - 2.0 ** (-5 - h)) for h in range(heads)]


def lightning_decays(heads, layer, layers):
    return [-slope * (1 - layer / (layers - 1 + 1e-5) + 1e-5) for slope in alibi_slopes(heads)]


# ---------------------------------------------------------------------------------------------- rotation

def rotated(x, frequencies, layout):
    """Row t turned by t times the frequency of each pair: interleaved (0, 1), (2, 3) ...; half_split (c, c + dim/2)."""
    angle = torch.arange(len(x), dtype=torch.float64)[:, None, None] * frequencies
    cos, sin = angle.cos(), angle.sin()
    if layout == "interleaved":
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


# ---------------------------------------------------------------------------------------------- one case

class Case:
    """What a public recurrence takes: every operand mapped, and spread over `heads`."""


def add(file, name, seed, system, oracle, update, tokens=15, heads=4, kv_heads=None, query_heads=None, value_heads=None,
        gate_heads=None, beta_heads=None, key_dim=6, value_dim=4, map="identity", decay=None, channels=False,
        table=None, scale=None, reach=1.0, beta_reach=1.0, frequencies=None, layout=None):
    """decay: a kind of decay_of, of every channel if `channels`; table: constant decays of the heads."""
    inputs = Inputs(seed)
    kv_heads = kv_heads or heads

    def tensor(rows, count, dim, reach=reach):
        return torch.tensor(inputs.numbers(rows * count * dim, reach), dtype=torch.float64).view(rows, count, dim)

    data = {"query": tensor(tokens, query_heads or heads, key_dim),
            "key": tensor(tokens, kv_heads, key_dim),
            "value": tensor(tokens, value_heads or kv_heads, value_dim, 2.0)}
    gates = gate_heads or value_heads or kv_heads
    if table is not None:
        data["decay"] = torch.tensor(table, dtype=torch.float64)
    elif decay:
        rows = [to_float32(round(decay_of(decay, inputs, h, t), 4)) + 0.0
                for t in range(tokens) for h in range(gates) for _ in range(key_dim if channels else 1)]
        data["decay"] = torch.tensor(rows, dtype=torch.float64).view(tokens, gates, -1)
    if update == "delta":
        betas = tensor(tokens, beta_heads or gates, 1, 0.5 * beta_reach)
        data["beta"] = torch.tensor([to_float32(round(x + 0.5 * beta_reach, 3)) for x in betas.flatten().tolist()],
                                    dtype=torch.float64).view_as(betas)
        data["beta"][tokens // 2] = 0  # a token that writes nothing
        data["beta"][tokens // 3] = beta_reach  # and one that replaces
    if update == "exclusive_bonus":
        data["bonus"] = tensor(heads, 1, key_dim)[:, 0]
    if update == "diagonal_plus_low_rank":
        data["removal"], data["replacement"] = (tensor(tokens, gates, key_dim, 0.4) for _ in range(2))
    scale = key_dim**-0.5 if scale is None else scale

    c, phi = Case(), MAPS[map]
    turn = (lambda x: rotated(x, frequencies, layout)) if frequencies is not None else lambda x: x
    c.scale = scale
    for part in ("query", "key", "value", "decay", "beta", "removal", "replacement"):
        x = data.get(part)
        setattr(c, part, x if x is None or x.ndim == 1 else spread(x, heads))
    c.query, c.key, c.bonus = turn(phi(c.query)), turn(phi(c.key)), data.get("bonus")
    operands = {part: getattr(c, part) for part in ("query", "key", "value", "decay", "beta", "removal", "replacement")}
    output, end = oracle(c)

    go = lambda first, last, state=None: recurrent(
        update, heads, scale, bonus=c.bonus, state=state,
        **{p: x if x is None or x.ndim == 1 else x[first:last] for p, x in operands.items()})
    ours, last = go(0, tokens)
    close(output, ours, 1e-9)
    if end is not None:
        close(end, last, 1e-9)
    close(quadratic(update, heads, scale, bonus=c.bonus, **operands), output, 1e-8)
    cut = tokens // 3 + 1 if tokens > 1 else 1
    if cut < tokens:
        close(go(cut, tokens, go(0, cut)[1])[0], output[cut:])

    kind = "none" if "decay" not in data else "per_head" if table is not None else \
        "per_channel_and_token" if channels else "per_head_and_token"
    file.case(name, system=system, update=update, map=map, normaliser="none", decay_kind=kind, heads=heads, cut=cut,
              scale=float(scale))
    if frequencies is not None:
        file.case_entries(layout=layout, dims=key_dim)
        file.tensor("frequencies", frequencies.shape, frequencies.tolist(), precise)
    for part, x in data.items():
        file.tensor(part, x.shape, x.flatten().tolist(), precise if part == "decay" and table is not None else exact)
    file.tensor("output", output.shape, output.flatten().tolist(), expected)
    file.tensor("state_at_end", last.shape, last.flatten().tolist(), expected)


# ---------------------------------------------------------------------------------------------- the files

def header(what):
    return File([f"{what}; float64; inputs are float32 numbers.", f"Written by make_systems.py: {VERSIONS}."])


def additive():
    file = header("Additive linear systems: decays of a head, a token, a channel")

    def case(name, seed, system, oracle, **more):
        add(file, name, seed, system, oracle, "additive", **more)

    channel = dict(channels=True)
    case("gla", 100, "gla", gla, decay="soft", **channel)
    case("gla, one token", 101, "gla", gla, tokens=1, heads=2, decay="soft", **channel)
    case("gla, grouped 4 over 2", 102, "gla", gla, kv_heads=2, decay="soft", **channel)
    case("gla, gates of every query head", 103, "gla", gla, kv_heads=2, gate_heads=4, decay="soft", **channel)
    case("gla, one key head", 104, "gla", gla, heads=3, kv_heads=1, decay="soft", **channel)
    case("gla, -5 a step", 105, "gla", gla, decay="five", **channel)
    case("gla, -60 a step", 106, "gla", gla, decay="sixty", **channel)
    case("gla, zero gates", 107, "gla", gla, heads=2, decay="zero", **channel)
    case("gla, random zero gates", 108, "gla", gla, heads=2, decay="random zeros", **channel)
    case("gla, wiping", 109, "gla", gla, heads=2, tokens=21, decay="wiping", **channel)
    case("gla, dims 17 and 3", 110, "gla", gla, heads=2, kv_heads=1, tokens=11, key_dim=17, value_dim=3, decay="soft",
         **channel)
    case("gla, 133 tokens", 111, "gla", gla, heads=2, tokens=133, key_dim=3, value_dim=2, decay="soft", **channel)
    case("gla, 133 tokens, -5 a step", 112, "gla", gla, heads=2, tokens=133, key_dim=3, value_dim=2, decay="five",
         **channel)

    case("simple gla", 120, "simple_gla", simple_gla, decay="soft")
    case("simple gla, head by head stronger", 121, "simple_gla", simple_gla, kv_heads=2, gate_heads=4, decay="per head")
    case("simple gla, -5 a step", 122, "simple_gla", simple_gla, kv_heads=2, decay="five")
    case("simple gla, -60 a step", 123, "simple_gla", simple_gla, kv_heads=2, decay="sixty")
    case("simple gla, zero gates", 124, "simple_gla", simple_gla, heads=2, decay="zero")
    case("simple gla, wiping, 133 tokens", 125, "simple_gla", simple_gla, heads=2, tokens=133, key_dim=3, value_dim=2,
         decay="wiping")

    # RetNet turns queries and keys by 10000^(-j / (d/2 - 1)), in interleaved pairs (torchscale); the naive form of fla
    # sees them turned.
    angles = 10000.0 ** -torch.linspace(0, 1, 3, dtype=torch.float64)
    case("retnet", 130, "retnet", retnet, table=retnet_decays(4))
    case("retnet, rotated", 131, "retnet", retnet, table=retnet_decays(4), frequencies=angles, layout="interleaved")
    case("retnet, grouped 8 over 2", 132, "retnet", retnet, heads=8, kv_heads=2, tokens=13, table=retnet_decays(8))
    case("retnet, 133 tokens", 133, "retnet", retnet, heads=2, tokens=133, key_dim=3, value_dim=2,
         table=retnet_decays(2))

    case("lightning, layer 0 of 4", 140, "lightning", simple_gla, table=lightning_decays(4, 0, 4), scale=1)
    case("lightning, silu of query and key", 141, "lightning", simple_gla, map="silu", table=lightning_decays(4, 2, 4),
         scale=1)
    case("lightning, the last layer", 142, "lightning", simple_gla, table=lightning_decays(4, 3, 4), scale=1)

    # SUPRA turns phi of queries and keys in half-split pairs; its dense map mixes heads and stays outside.
    usual = 10000.0 ** (-torch.arange(0, 6, 2, dtype=torch.float64) / 6)
    slopes = [-s for s in alibi_slopes(4)]
    case("supra", 150, "supra", simple_gla, table=slopes, frequencies=usual, layout="half_split")
    case("supra, grouped 4 over 2, not rotated", 151, "supra", simple_gla, kv_heads=2, table=slopes)

    case("mamba2, one group", 160, "mamba2", mamba2, query_heads=1, kv_heads=1, value_heads=4, gate_heads=4,
         decay="per head", scale=1)
    case("mamba2, two groups", 161, "mamba2", mamba2, query_heads=2, kv_heads=2, value_heads=4, gate_heads=4,
         decay="five", scale=1)
    case("mohawk", 170, "mohawk", simple_gla, decay="random zeros", scale=1)
    case("qrwkv6", 180, "qrwkv6", gla, kv_heads=2, gate_heads=4, decay="five", **channel)
    case("qrwkv6, random zero gates", 181, "qrwkv6", gla, kv_heads=2, gate_heads=4, decay="random zeros", **channel)
    # Mamba: a head a channel of x, each with a state of N numbers; B and C are everybody's.
    case("mamba", 190, "mamba", gla, heads=6, query_heads=1, kv_heads=1, value_heads=6, gate_heads=6, key_dim=4,
         value_dim=1, decay="five", scale=1, **channel)
    return file


def delta_rule():
    file = header("Delta rule: no decay, decays of a token, of a channel")

    def case(name, seed, system, oracle, **more):
        add(file, name, seed, system, oracle, "delta", **{"map": "l2_normalised", **more})

    case("deltanet", 200, "deltanet", delta)
    case("deltanet, one token", 201, "deltanet", delta, tokens=1, heads=2)
    case("deltanet, silu", 202, "deltanet", delta, map="silu_l2_normalised")
    case("deltanet, short keys as they are", 203, "deltanet", delta, map="identity", reach=0.6)
    case("deltanet, grouped 4 over 2", 204, "deltanet", delta, kv_heads=2)
    case("deltanet, beta up to 2", 205, "deltanet", delta, heads=2, beta_reach=2.0)
    case("deltanet, 133 tokens", 206, "deltanet", delta, heads=2, tokens=133, key_dim=3, value_dim=2)
    case("deltanet, dims 17 and 3", 207, "deltanet", delta, heads=2, kv_heads=1, tokens=11, key_dim=17, value_dim=3)

    case("gated deltanet", 210, "gated_deltanet", gated_delta, decay="per head")
    more_values = dict(heads=4, query_heads=2, kv_heads=2, value_heads=4)
    case("gated deltanet, more value heads", 211, "gated_deltanet", gated_delta, decay="per head", **more_values)
    case("gated deltanet, more value heads, silu", 212, "gated_deltanet", gated_delta, decay="soft",
         map="silu_l2_normalised", **more_values)
    case("gated deltanet, zero gates", 213, "gated_deltanet", gated_delta, heads=2, decay="zero")
    case("gated deltanet, random zero gates", 214, "gated_deltanet", gated_delta, heads=2, decay="random zeros")
    case("gated deltanet, -5 a step", 215, "gated_deltanet", gated_delta, decay="five", **more_values)
    case("gated deltanet, -60 a step", 216, "gated_deltanet", gated_delta, decay="sixty", **more_values)
    case("gated deltanet, wiping, 133 tokens", 217, "gated_deltanet", gated_delta, heads=2, tokens=133, key_dim=3,
         value_dim=2, decay="wiping")

    channel = dict(channels=True)
    case("kda", 220, "kda", kda, decay="soft", **channel)
    case("kda, more value heads", 221, "kda", kda, decay="bounded", **more_values, **channel)
    case("kda, -5 a step", 222, "kda", kda, decay="five", **channel)
    case("kda, -60 a step", 223, "kda", kda, heads=2, decay="sixty", **channel)
    case("kda, zero gates", 224, "kda", kda, heads=2, decay="zero", **channel)
    case("kda, random zero gates", 225, "kda", kda, heads=2, decay="random zeros", **channel)
    case("kda, silu, 133 tokens", 226, "kda", kda, heads=2, tokens=133, key_dim=3, value_dim=2, decay="five",
         map="silu_l2_normalised", **channel)
    return file


def bonus_and_low_rank():
    file = header("Exclusive read with a bonus; diagonal plus low rank")

    def case(name, seed, system, oracle, **more):
        add(file, name, seed, system, oracle, channels=True, **more)

    bonus = dict(update="exclusive_bonus", scale=1)
    case("rwkv6", 300, "rwkv6", rwkv6, decay="soft", **bonus)
    case("rwkv6, one token", 301, "rwkv6", rwkv6, tokens=1, heads=2, decay="soft", **bonus)
    case("rwkv6, -5 a step", 302, "rwkv6", rwkv6, decay="five", **bonus)
    case("rwkv6, -60 a step", 303, "rwkv6", rwkv6, heads=2, decay="sixty", **bonus)
    case("rwkv6, zero gates", 304, "rwkv6", rwkv6, heads=2, decay="zero", **bonus)
    case("rwkv6, wiping, 133 tokens", 305, "rwkv6", rwkv6, heads=2, tokens=133, key_dim=3, value_dim=2, decay="wiping",
         **bonus)
    case("rwkv6, grouped 4 over 2", 306, "rwkv6", rwkv6, kv_heads=2, decay="soft", **bonus)

    low_rank = dict(update="diagonal_plus_low_rank", scale=1)
    case("rwkv7", 310, "rwkv7", rwkv7, decay="bounded", **low_rank)
    case("rwkv7, one token", 311, "rwkv7", rwkv7, tokens=1, heads=2, decay="bounded", **low_rank)
    case("rwkv7, -5 a step", 312, "rwkv7", rwkv7, decay="five", **low_rank)
    case("rwkv7, -60 a step", 313, "rwkv7", rwkv7, heads=2, decay="sixty", **low_rank)
    case("rwkv7, zero gates", 314, "rwkv7", rwkv7, heads=2, decay="zero", **low_rank)
    case("rwkv7, 133 tokens", 315, "rwkv7", rwkv7, heads=2, tokens=133, key_dim=3, value_dim=2, decay="bounded",
         **low_rank)
    case("qrwkv7, values and keys of fewer heads", 316, "qrwkv7", rwkv7, kv_heads=2, gate_heads=4, decay="bounded",
         **low_rank)
    return file


if __name__ == "__main__":
    torch.set_num_threads(1)
    deliver(__doc__, {"additive.txt": additive, "delta.txt": delta_rule, "bonus_and_low_rank.txt": bonus_and_low_rank},
            VERSIONS)
