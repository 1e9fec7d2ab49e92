#!/usr/bin/env python3
"""Golden values around the recurrences: gates, functions of rows, and layers from raw projections to the gated output.

Gates and rows: torch's own functions and the naive gates of fla-core. Layers: the classes of transformers (Qwen3-Next,
Kimi Linear, MiniMax, Mamba-2, Mamba) promoted to float64, their projections replaced by the raw numbers of a case, and
where no installable package holds the layer (GLA, RetNet, SUPRA, MOHAWK, RWKV-6, QRWKV6, RWKV-7, QRWKV7, DeltaNet) its
equations, a line or two each, over recurrence.py.
"""
import math
import types

import torch
from torch.nn import functional as F

from golden_file import File, Inputs, deliver, exact, expected, precise, relative, to_float32
from make_systems import alibi_slopes, l2_normalised, lightning_decays, retnet_decays, rotated
from public_code import cut_out, model, version
from recurrence import recurrent, spread

VERSIONS = ", ".join(version(p) for p in ("torch", "fla-core", "transformers"))

qwen, kimi, minimax = model("qwen3_next"), model("kimi_linear"), model("minimax")
hf_mamba2, hf_mamba = model("mamba2"), model("mamba")
gdn_gate = cut_out("ops/gated_delta_rule/gate.py", "naive_gdn_gate")
kda_gate = cut_out("ops/kda/gate.py", "naive_kda_gate")
kda_bounded_gate = cut_out("ops/kda/gate.py", "naive_kda_lowerbound_gate")


def header(what):
    return File([f"{what}; float64; inputs are float32 numbers.", f"Written by make_layers.py: {VERSIONS}."])


class Builder:
    """One case: what it reads and what it must give."""

    def __init__(self, file, name, seed, **entries):
        self.file, self.inputs = file, Inputs(seed)
        file.case(name, **entries)

    def put(self, name, x, form):
        self.file.tensor(name, x.shape, x.flatten().tolist(), form)

    def read(self, name, *shape, reach=2.0, values=None):
        """An input: random numbers, or these."""
        x = torch.tensor(self.inputs.numbers(math.prod(shape), reach), dtype=torch.float64).view(shape)
        if values is not None:
            x = torch.tensor([to_float32(v) for v in values], dtype=torch.float64).view(shape)
        self.put(name, x, exact)
        return x

    def give(self, name, x, form=expected):
        self.put(name, x.detach(), form)
        return x


# ---------------------------------------------------------------------------------------------- gates

EXTREMES = [0.0, -0.001, 0.001, -8.0, 8.0, -30.0, 30.0, -90.0, 90.0]


def gates():
    file = header("Gates: raw projections to natural-log decays")

    def gate(name, seed, shape, make, extremes=EXTREMES, reach=4.0, **entries):
        """make(builder, raw) -> the decay; the first numbers of raw are the extremes."""
        b = Builder(file, name, seed, gate=name.split(",")[0].replace(" ", "_"), **entries)
        count = math.prod(shape)
        raw = b.read("raw", *shape, values=(extremes + b.inputs.numbers(count, reach))[:count])
        b.give("decay", make(b, raw), relative)

    gate("logsigmoid", 600, (5, 3, 4), lambda b, x: F.logsigmoid(x) / 16, divisor=16.0)
    gate("mamba2", 601, (12, 3), lambda b, x: mamba_gate(b, x, b.read("A_log", 3), 0.0, math.inf), least=0.0)
    gate("mamba2, clamped", 602, (12, 3), lambda b, x: mamba_gate(b, x, b.read("A_log", 3), 0.01, 0.7), least=0.01,
         most=0.7)
    gate("mamba", 603, (12, 3), lambda b, x: mamba_gate(b, x, b.read("A_log", 3, 4), 0.0, math.inf))
    gate("mohawk", 604, (12, 3), lambda b, x: -F.softplus(x))
    gate("gated deltanet", 605, (12, 3), lambda b, x: gdn_gate(x, b.read("A_log", 3), b.read("dt_bias", 3)))
    gate("kda", 606, (5, 3, 4), lambda b, x: kda_gate(x, b.read("A_log", 3), b.read("dt_bias", 12)))
    gate("kda bounded", 607, (5, 3, 4),
         lambda b, x: kda_bounded_gate(x, b.read("A_log", 3), b.read("dt_bias", 12), -5.0), lower_bound=-5.0)
    gate("kda bounded, without A", 608, (5, 3, 4),
         lambda b, x: kda_bounded_gate(x, None, b.read("dt_bias", 12), -5.0), lower_bound=-5.0)
    small = [0.0, -0.001, 0.001, -8.0, 4.0, -30.0, 1.6, 1.61, 5.0]
    gate("rwkv6", 609, (5, 3, 4), lambda b, x: -x.exp(), extremes=small, reach=3.0)
    gate("qrwkv6", 610, (5, 3, 4), lambda b, x: (-x.exp()).clamp(min=-5), extremes=small, reach=3.0)
    gate("rwkv7", 611, (5, 3, 4), lambda b, x: -math.exp(-0.5) * x.sigmoid())
    gate("qrwkv7", 612, (5, 3, 4), lambda b, x: -torch.exp(-0.5 - F.softplus(-x)))

    for name, table in (("retnet", retnet_decays(8)), ("alibi", [-s for s in alibi_slopes(8)]),
                        ("alibi", [-2.0**-(2 * (h + 1)) for h in range(4)] + [-0.5, -0.125])):
        b = Builder(file, f"table {name}, {len(table)} heads", 0, table=name, heads=len(table))
        b.give("decay", torch.tensor(table, dtype=torch.float64), relative)
    for layer in (0, 3, 7):
        b = Builder(file, f"table lightning, layer {layer} of 8", 0, table="lightning", heads=4, layer=layer, layers=8)
        theirs = minimax.MiniMaxLightningAttention.get_slope_rate(
            types.SimpleNamespace(num_attention_heads=4, layer_idx=layer, num_hidden_layers=8))
        ours = torch.tensor(lightning_decays(4, layer, 8), dtype=torch.float64)
        torch.testing.assert_close(-theirs.flatten().double(), ours, rtol=1e-6, atol=1e-9)
        b.give("decay", ours, relative)
    return file


def mamba_gate(b, raw, A_log, least, most):
    dt = b.give("dt", F.softplus(raw + b.read("dt_bias", raw.shape[-1])).clamp(least, most), relative)
    return -A_log.exp() * (dt if A_log.ndim == 1 else dt[..., None])


# ---------------------------------------------------------------------------------------------- functions of rows

def causal_conv(x, weights, bias=None, activation=None):
    """x [tokens, channels]; out[t, c] = b_c + sum_j w[c, j] x[t - (taps - 1) + j, c], then the activation."""
    padded = F.pad(x.T[None], (weights.shape[1] - 1, 0))
    y = F.conv1d(padded, weights[:, None], bias, groups=len(weights))[0].T
    return activation(y) if activation else y


def shifted(x, mu):
    """x_t + (x_(t-1) - x_t) mu; before the first token there are zeros."""
    return x + (F.pad(x, (0, 0, 1, -1)) - x) * mu


def rms(x, eps, weight=None):
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def group_norm(x, eps, weight=None, bias=None):
    """x [tokens, heads, dim]: a group is a head; weight and bias [heads, dim]."""
    flat = lambda w: None if w is None else w.flatten()
    return F.group_norm(x.flatten(1), x.shape[1], flat(weight), flat(bias), eps).view(x.shape)


def rows():
    file = header("Functions of rows around a recurrence: norms, gates, convolution, shift")
    T, H, V = 7, 3, 5

    def row(name, seed, eps=None):
        more = {} if eps is None else {"eps": eps}
        return Builder(file, name, seed, row=name.split(",")[0].replace(" ", "_"), **more)

    b = row("rms norm", 620, 1e-6)
    b.give("output", rms(b.read("input", T, H, V), 1e-6))
    b = row("rms norm, affine", 621, 1e-5)
    b.give("output", rms(b.read("input", T, H, V), 1e-5, b.read("weight", V)))
    b = row("rms norm, small numbers", 622, 1e-5)
    b.give("output", rms(b.read("input", T, H, V, reach=0.01), 1e-5))
    b = row("rms norm, all heads", 623, 1e-6)
    x, weight = b.read("input", T, H, V), b.read("weight", H, V)
    b.give("output", rms(x.flatten(1), 1e-6, weight.flatten()).view(x.shape))
    b = row("group norm", 624, 1e-5)
    b.give("output", group_norm(b.read("input", T, H, V), 1e-5))
    b = row("group norm, affine", 625, 64e-5)
    b.give("output", group_norm(b.read("input", T, H, V), 64e-5, b.read("weight", H, V), b.read("bias", H, V)))
    b = row("group norm, far from 0", 626, 1e-5)
    offset = [100 + v for v in b.inputs.numbers(T * H * V)]
    b.give("output", group_norm(b.read("input", T, H, V, values=offset), 1e-5))
    b = row("l2 norm", 627, 1e-6)
    b.give("output", qwen.l2norm(b.read("input", T, H, V), eps=1e-6))
    b = row("l2 norm, of nothing", 628, 1e-6)
    b.give("output", qwen.l2norm(b.read("input", T, H, V, values=[0.0] * (T * H * V)), eps=1e-6))
    b = row("l2 norm, guarded", 629, 1e-12)  # x / max(|x|, eps)
    b.give("output", F.normalize(b.read("input", T, H, V), dim=-1))

    b = row("norm then silu gate", 630, 1e-6)
    norm = qwen.Qwen3NextRMSNormGated(V, eps=1e-6)
    x, gate, norm.weight.data = b.read("input", T, H, V), b.read("gate", T, H, V, reach=6.0), b.read("weight", V)
    b.give("output", norm(x, gate))
    b = row("norm then sigmoid gate", 631, 1e-5)
    norm = kimi.KimiLinearRMSNormGated(V, eps=1e-5)
    x, gate, norm.weight.data = b.read("input", T, H, V), b.read("gate", T, H, V, reach=6.0), b.read("weight", V)
    b.give("output", norm(x, gate))
    b = row("silu gate then norm", 632, 1e-5)  # two groups of the concatenated heads
    norm = hf_mamba2.MambaRMSNormGated(4 * V, group_size=2 * V, eps=1e-5)
    x, gate, norm.weight.data = b.read("input", T, 4, V), b.read("gate", T, 4, V, reach=6.0), b.read("weight", 4 * V)
    b.file.case_entries(groups=2)
    b.give("output", norm(x.flatten(1), gate.flatten(1)).view(x.shape))

    for name, seed, bias, activation, taps, tokens in (
            ("convolution", 640, False, None, 4, 11), ("convolution, silu", 641, False, F.silu, 4, 11),
            ("convolution, biased, silu", 642, True, F.silu, 4, 11), ("convolution, biased", 643, True, None, 4, 11),
            ("convolution, two tokens", 644, False, F.silu, 4, 2), ("convolution, two taps", 645, False, None, 2, 9)):
        b = row(name, seed)
        b.file.case_entries(activation="silu" if activation else "none", cut=tokens // 3 + 1)
        x, weights = b.read("input", tokens, 6), b.read("weights", 6, taps, reach=1.0)
        offset = b.read("bias", 6, reach=1.0) if bias else None
        y = b.give("output", causal_conv(x, weights, offset, activation))
        theirs = qwen.causal_conv1d_fn(x.T[None], weights, offset, "silu" if activation else None)[0].T
        torch.testing.assert_close(theirs, y)
    b = row("token shift", 650)
    b.file.case_entries(cut=4)
    b.give("output", shifted(b.read("input", 9, 6), b.read("mu", 6, reach=1.0)))
    return file


# ---------------------------------------------------------------------------------------------- layers of transformers

def replace(module, name, made):
    """The projection `name` of the module gives these raw numbers [tokens, width], whatever it is asked."""
    del module._modules[name]
    setattr(module, name, lambda _: made[None])


def listened(module, name, heard):
    """The module's function `name`, which leaves its arguments and results in `heard`."""
    public = getattr(module, name)

    def listening(*arguments, **named):
        result = public(*arguments, **named)
        heard.update(named, arguments=arguments, result=result)
        return result
    setattr(module, name, listening)
    return public


def config(**entries):
    return types.SimpleNamespace(layer_types=["linear_attention"] * 8, **entries)


def set_to(parameter, values):
    parameter.data = values.reshape(parameter.shape)


def qwen3_next_layer(file, name, seed, tokens=15, key_heads=2, value_heads=4, K=4, V=3):
    """conv 4 + silu on [q|k|v], l2, g = -exp(A_log) softplus(a + dt_bias), delta rule, RMS, silu(z)."""
    b = Builder(file, name, seed, layer="gated_deltanet", heads=value_heads, cut=tokens // 3 + 1, eps=1e-6)
    layer = qwen.Qwen3NextGatedDeltaNet(config(
        hidden_size=1, linear_num_value_heads=value_heads, linear_num_key_heads=key_heads, linear_key_head_dim=K,
        linear_value_head_dim=V, linear_conv_kernel_dim=4, hidden_act="silu", rms_norm_eps=1e-6), 0).double()
    q, k = b.read("query", tokens, key_heads, K), b.read("key", tokens, key_heads, K)
    v, z = b.read("value", tokens, value_heads, V), b.read("gate", tokens, value_heads, V)
    beta, a = b.read("beta_raw", tokens, value_heads), b.read("decay_raw", tokens, value_heads)
    set_to(layer.conv1d.weight, b.read("conv_weights", 2 * key_heads * K + value_heads * V, 4, reach=1.0))
    set_to(layer.A_log, b.read("A_log", value_heads))
    set_to(layer.dt_bias, b.read("dt_bias", value_heads))
    set_to(layer.norm.weight, b.read("norm_weight", V))
    grouped = lambda x: x.reshape(tokens, key_heads, -1)  # their projection interleaves by key head
    replace(layer, "in_proj_qkvz", torch.cat([grouped(x) for x in (q, k, v, z)], -1).flatten(1))
    replace(layer, "in_proj_ba", torch.cat([grouped(beta), grouped(a)], -1).flatten(1))
    layer.out_proj = torch.nn.Identity()
    heard = {}
    public = listened(qwen, "torch_chunk_gated_delta_rule", heard)
    output = layer(torch.zeros(1, tokens, 1, dtype=torch.float64))[0].view(tokens, value_heads, V)
    qwen.torch_chunk_gated_delta_rule = public
    mixed = causal_conv(torch.cat([x.flatten(1) for x in (q, k, v)], -1), layer.conv1d.weight[:, 0], None, F.silu)
    q, k, v = split_heads(mixed, (key_heads, K), (key_heads, K), (value_heads, V))
    g = gdn_gate(a, layer.A_log, layer.dt_bias)[..., None]
    agree(heard["g"][0][..., None], g)
    core, _ = recurrent("delta", value_heads, K**-0.5, l2_normalised(q), l2_normalised(k), v, g,
                        beta.sigmoid()[..., None])
    agree(heard["result"][0][0], core)
    agree(output, rms(core, 1e-6, layer.norm.weight) * F.silu(z))
    finish(b, heard["g"][0][..., None], heard["result"][0][0], output, beta=heard["beta"][0][..., None])


def agree(theirs, ours):
    """Would also show a float32 left in their code."""
    torch.testing.assert_close(theirs, ours, rtol=1e-10, atol=1e-11)


def split_heads(x, *shapes):
    """[tokens, channels] -> one [tokens, heads, dim] for each (heads, dim), in order"""
    return [y.reshape(len(x), *s) for y, s in zip(x.split([math.prod(s) for s in shapes], -1), shapes)]


def finish(b, decay, core, output, **more):
    for name, x in more.items():
        b.give(name, x, relative)
    if decay is not None:
        b.give("decay", decay, relative)
    b.give("core_output", core)
    b.give("output", output)


def kimi_layer(file, name, seed, tokens=15, heads=3, D=4):
    """conv 4 + silu on [q|k|v], l2, decay of every channel, delta rule, RMS, sigmoid gate."""
    b = Builder(file, name, seed, layer="kda", heads=heads, cut=tokens // 3 + 1, eps=1e-5)
    layer = kimi.KimiLinearDeltaAttention(config(
        hidden_size=1, linear_num_heads=heads, linear_head_dim=D, linear_conv_kernel_dim=4, hidden_act="silu",
        rms_norm_eps=1e-5), 0).double()
    q, k, v, gate, raw = (b.read(part, tokens, heads, D) for part in ("query", "key", "value", "gate", "decay_raw"))
    beta = b.read("beta_raw", tokens, heads)
    for part, projection in ((q, "q_proj"), (k, "k_proj"), (v, "v_proj"), (gate, "g_b_proj"), (beta, "b_proj")):
        replace(layer, projection, part.flatten(1))
    replace(layer.forget_gate, "f_b_proj", raw.flatten(1))
    set_to(layer.conv1d.weight, b.read("conv_weights", 3 * heads * D, 4, reach=1.0))
    set_to(layer.forget_gate.A_log, b.read("A_log", heads))
    set_to(layer.forget_gate.dt_bias, b.read("dt_bias", heads * D))
    set_to(layer.o_norm.weight, b.read("norm_weight", D))
    layer.o_proj = torch.nn.Identity()
    heard = {}
    public = listened(kimi, "chunk_kimi_delta_attention", heard)
    output = layer(torch.zeros(1, tokens, 1, dtype=torch.float64))[0].view(tokens, heads, D)
    kimi.chunk_kimi_delta_attention = public
    mixed = causal_conv(torch.cat([x.flatten(1) for x in (q, k, v)], -1), layer.conv1d.weight[:, 0], None, F.silu)
    q, k, v = split_heads(mixed, *[(heads, D)] * 3)
    g = kda_gate(raw, layer.forget_gate.A_log.flatten(), layer.forget_gate.dt_bias, torch.float64)
    agree(heard["g"][0], g)
    core, _ = recurrent("delta", heads, D**-0.5, l2_normalised(q), l2_normalised(k), v, g, beta.sigmoid()[..., None])
    agree(heard["result"][0][0], core)
    agree(output, rms(core, 1e-5, layer.o_norm.weight) * gate.sigmoid())
    finish(b, heard["g"][0], heard["result"][0][0], output, beta=heard["beta"][0][..., None])


def minimax_layer(file, name, seed, layer_index, tokens=15, heads=4, D=4):
    """silu on q, k, v, decays of the heads, no scale, RMS over all heads, sigmoid gate."""
    b = Builder(file, name, seed, layer="lightning", heads=heads, cut=tokens // 3 + 1, eps=1e-6,
                layer_index=layer_index, layers=8)
    layer = minimax.MiniMaxLightningAttention(config(
        hidden_size=heads * D, head_dim=D, num_attention_heads=heads, num_hidden_layers=8, block_size=4,
        hidden_act="silu"), layer_index).double()
    q, k, v = (b.read(part, tokens, heads, D) for part in ("query", "key", "value"))
    replace(layer, "qkv_proj", torch.cat((q, k, v), -1).flatten(1))
    gate = b.read("gate", tokens, heads, D)
    replace(layer, "output_gate", gate.flatten(1))
    set_to(layer.norm.weight, b.read("norm_weight", heads, D))
    decays = torch.tensor(lightning_decays(heads, layer_index, 8), dtype=torch.float64)
    layer.slope_rate = -decays[:, None, None]  # theirs are formed in float32
    layer.query_decay, layer.key_decay, layer.diagonal_decay = layer.decay_factors(layer.slope_rate)
    layer.out_proj = torch.nn.Identity()
    heard = []
    layer.norm.register_forward_pre_hook(lambda module, arguments: heard.append(arguments[0]))
    output = layer(torch.zeros(1, tokens, 1, dtype=torch.float64), None, None)[0][0].view(tokens, heads, D)
    core, _ = recurrent("additive", heads, 1.0, F.silu(q), F.silu(k), F.silu(v), decays)
    agree(heard[0][0].view(core.shape), core)
    agree(output, rms(core.flatten(1), 1e-6, layer.norm.weight).view(core.shape) * gate.sigmoid())
    finish(b, decays, core, output)


def mamba2_layer(file, name, seed, groups, limit=(0.0, math.inf), tokens=15, heads=4, P=3, N=4):
    """conv 4 with bias + silu on [x|B|C], dt = softplus(dt + bias), v = dt x, D x, (y silu(z)) then RMS by groups."""
    entries = {} if limit[0] == 0 else {"least": limit[0], "most": limit[1]}
    b = Builder(file, name, seed, layer="mamba2", heads=heads, groups=groups, cut=tokens // 3 + 1, eps=1e-5, **entries)
    layer = hf_mamba2.Mamba2Mixer(config(
        num_heads=heads, hidden_size=heads * P, state_size=N, conv_kernel=4, expand=1, time_step_rank=1,
        use_conv_bias=True, hidden_act="silu", layer_norm_epsilon=1e-5, n_groups=groups, head_dim=P, chunk_size=4,
        time_step_limit=limit, time_step_min=0.1, time_step_max=0.2, time_step_floor=0.1, use_bias=False), 0).double()
    x, B, C = (b.read(part, tokens, n, d) for part, n, d in (("x", heads, P), ("B", groups, N), ("C", groups, N)))
    gate, dt = b.read("gate", tokens, heads, P), b.read("decay_raw", tokens, heads)
    replace(layer, "in_proj", torch.cat([y.flatten(1) for y in (gate, x, B, C, dt)], -1))
    channels = heads * P + 2 * groups * N
    set_to(layer.conv1d.weight, b.read("conv_weights", channels, 4, reach=1.0))
    set_to(layer.conv1d.bias, b.read("conv_bias", channels, reach=1.0))
    set_to(layer.A_log, b.read("A_log", heads))
    set_to(layer.dt_bias, b.read("dt_bias", heads))
    set_to(layer.D, b.read("D", heads))
    set_to(layer.norm.weight, b.read("norm_weight", heads, P))
    layer.out_proj = torch.nn.Identity()
    layer.eval()
    heard = {}
    public = listened(hf_mamba2, "mamba2_chunk_scan", heard)
    output = layer(torch.zeros(1, tokens, 1, dtype=torch.float64))[0].view(tokens, heads, P)
    hf_mamba2.mamba2_chunk_scan = public
    mixed = causal_conv(torch.cat([y.flatten(1) for y in (x, B, C)], -1), layer.conv1d.weight[:, 0], layer.conv1d.bias,
                        F.silu)
    x, B, C = split_heads(mixed, (heads, P), (groups, N), (groups, N))
    step = F.softplus(dt + layer.dt_bias).clamp(*limit)
    g = (-layer.A_log.exp() * step)[..., None]
    core, _ = recurrent("additive", heads, 1.0, C, B, x * step[..., None], g)
    agree(heard["result"][0], core + layer.D[:, None] * x)
    gated = ((core + layer.D[:, None] * x) * F.silu(gate)).view(tokens, groups, -1)
    agree(output, rms(gated, 1e-5).view(core.shape) * layer.norm.weight.view(heads, P))
    finish(b, g, core, output, dt=step)


def mamba_layer(file, name, seed, tokens=15, channels=6, N=4):
    """conv 4 with bias + silu on x, dt = softplus(dt + bias), h' = exp(dt A) h + dt B x, y = (C h' + D x) silu(z)."""
    b = Builder(file, name, seed, layer="mamba", heads=channels, cut=tokens // 3 + 1)
    layer = hf_mamba.MambaMixer(config(
        hidden_size=channels, state_size=N, conv_kernel=4, intermediate_size=channels, time_step_rank=channels,
        use_conv_bias=True, hidden_act="silu", use_mambapy=False, use_associative_scan=False, use_bias=False,
        time_step_scale=1.0, time_step_init_scheme="random", time_step_min=0.1, time_step_max=0.2,
        time_step_floor=0.1), 0).double()
    x, gate = b.read("x", tokens, channels), b.read("gate", tokens, channels)
    dt, B, C = b.read("decay_raw", tokens, channels), b.read("B", tokens, N), b.read("C", tokens, N)
    replace(layer, "in_proj", torch.cat((x, gate), -1))
    replace(layer, "x_proj", torch.cat((dt, B, C), -1))
    set_to(layer.dt_proj.weight, torch.eye(channels, dtype=torch.float64))
    set_to(layer.dt_proj.bias, b.read("dt_bias", channels))
    set_to(layer.conv1d.weight, b.read("conv_weights", channels, 4, reach=1.0))
    set_to(layer.conv1d.bias, b.read("conv_bias", channels, reach=1.0))
    set_to(layer.A_log, b.read("A_log", channels, N))
    set_to(layer.D, b.read("D", channels))
    layer.out_proj = torch.nn.Identity()
    layer.eval()
    output = layer(torch.zeros(1, tokens, 1, dtype=torch.float64))[0]
    step = F.softplus(dt + layer.dt_proj.bias)
    g = -layer.A_log.exp() * step[..., None]
    x = causal_conv(x, layer.conv1d.weight[:, 0], layer.conv1d.bias, F.silu)
    core, _ = recurrent("additive", channels, 1.0, C[:, None], B[:, None], (x * step)[..., None], g)
    agree(output, (core[..., 0] + layer.D * x) * F.silu(gate))
    finish(b, g, core, output, dt=step)


# ---------------------------------------------------------------------------------------------- layers from equations

def parts(b, tokens, heads, K, V, kv_heads=None):
    kv_heads = kv_heads or heads
    return (b.read("query", tokens, heads, K), b.read("key", tokens, kv_heads, K), b.read("value", tokens, kv_heads, V))


def gla_layer(file, T=15, H=4, K=4, V=3):
    b = Builder(file, "gla", 710, layer="gla", heads=H, cut=6, eps=1e-5)
    q, k, v = parts(b, T, H, K, V)
    raw, gate, weight = b.read("decay_raw", T, H, K, reach=8.0), b.read("gate", T, H, V), b.read("norm_weight", V)
    g = F.logsigmoid(raw) / 16
    o, _ = recurrent("additive", H, K**-0.5, q, k, v, g)
    finish(b, g, o, rms(o, 1e-5, weight) * F.silu(gate))


def retnet_layer(file, T=15, H=4, K=4, V=8):
    b = Builder(file, "retnet", 711, layer="retnet", heads=H, cut=6, eps=1e-6, layout="interleaved", dims=K)
    q, k, v = parts(b, T, H, K, V)
    gate = b.read("gate", T, H, V)
    angles = 10000.0 ** -torch.linspace(0, 1, K // 2, dtype=torch.float64)
    b.give("frequencies", angles, precise)
    g = torch.tensor(retnet_decays(H), dtype=torch.float64)
    o, _ = recurrent("additive", H, K**-0.5, rotated(q, angles, "interleaved"), rotated(k, angles, "interleaved"), v, g)
    finish(b, g, o, rms(o, 1e-6) * F.silu(gate))


def supra_layer(file, T=15, H=4, K=4, V=5):
    b = Builder(file, "supra", 712, layer="supra", heads=H, cut=6, eps=1e-5, layout="half_split", dims=K)
    q, k, v = parts(b, T, H, K, V)
    angles = 10000.0 ** (-torch.arange(0, K, 2, dtype=torch.float64) / K)
    b.give("frequencies", angles, precise)
    g = -torch.tensor(alibi_slopes(H), dtype=torch.float64)
    phi = lambda x: rotated(F.relu(x), angles, "half_split")  # of what the dense map made
    o, _ = recurrent("additive", H, K**-0.5, phi(q), phi(k), v, g)
    finish(b, g, o, group_norm(o, 1e-5))


def mohawk_layer(file, T=15, H=3, N=4, P=3):
    b = Builder(file, "mohawk", 713, layer="mohawk", heads=H, cut=6)
    x, B, C = (b.read(part, T, H, d) for part, d in (("x", P), ("B", N), ("C", N)))
    raw, gate, D = b.read("decay_raw", T, H), b.read("gate", T, H, P), b.read("D", H)
    channels = H * (P + 2 * N)
    weights, bias = b.read("conv_weights", channels, 4, reach=1.0), b.read("conv_bias", channels, reach=1.0)
    gate_bias = b.read("gate_bias", H, P)
    mixed = causal_conv(torch.cat([y.flatten(1) for y in (x, B, C)], -1), weights, bias)  # no activation
    x, B, C = split_heads(mixed, (H, P), (H, N), (H, N))
    g = -F.softplus(raw)[..., None]
    o, _ = recurrent("additive", H, 1.0, C, B, x, g)
    finish(b, g, o, (o + D[:, None] * x) * F.silu(gate + gate_bias))


def rwkv6_layer(file, T=15, H=3, D=4):
    b = Builder(file, "rwkv6", 714, layer="rwkv6", heads=H, cut=6, eps=64e-5)
    r, k, v = parts(b, T, H, D, D)
    raw, gate, u = b.read("decay_raw", T, H, D), b.read("gate", T, H, D), b.read("bonus", H, D)
    weight, bias = b.read("norm_weight", H, D), b.read("norm_bias", H, D)
    g = -raw.exp()
    o, _ = recurrent("exclusive_bonus", H, 1.0, r, k, v, g, bonus=u)
    finish(b, g, o, group_norm(o, 64e-5, weight, bias) * F.silu(gate))


def qrwkv6_layer(file, T=15, H=4, KV=2, D=4):
    b = Builder(file, "qrwkv6", 715, layer="qrwkv6", heads=H, cut=6)
    q, k, v = parts(b, T, H, D, D, KV)
    raw, gate = b.read("decay_raw", T, H, D), b.read("gate", T, H, D)
    g = (-raw.exp()).clamp(min=-5)
    key = b.give("written_key", spread(k, H) * (1 - g.exp()))
    o, _ = recurrent("additive", H, D**-0.5, q, key, v, g)
    finish(b, g, o, o * gate.sigmoid())


def rwkv7_layer(file, T=15, H=3, D=4):
    """a = sigmoid(a), kk = k k_k at unit length, k (1 + (a - 1) k_a), v towards v_first; removes -kk, returns kk a."""
    b = Builder(file, "rwkv7", 716, layer="rwkv7", heads=H, cut=6, eps=64e-5)
    r, k, v = parts(b, T, H, D, D)
    raw, a = b.read("decay_raw", T, H, D), b.read("rate_raw", T, H, D).sigmoid()
    first, mix = b.read("first_value", T, H, D), b.read("mix_raw", T, H, D).sigmoid()
    k_k, k_a, r_k = (b.read(part, H, D, reach=1.0) for part in ("k_k", "k_a", "r_k"))
    weight, bias, gate = b.read("norm_weight", H, D), b.read("norm_bias", H, D), b.read("gate", T, H, D)
    g = -math.exp(-0.5) * raw.sigmoid()
    kk = F.normalize(k * k_k, dim=-1)
    k, v = k * (1 + (a - 1) * k_a), v + (first - v) * mix
    o, _ = recurrent("diagonal_plus_low_rank", H, 1.0, r, k, v, g, removal=-kk, replacement=kk * a)
    y = (group_norm(o, 64e-5, weight, bias) + (r * k * r_k).sum(-1, keepdim=True) * v) * gate
    finish(b, g, o, y, removal=-kk, replacement=kk * a, written_key=k, written_value=v)


def qrwkv7_layer(file, T=15, H=4, KV=2, D=4):
    """rotated r and k, k and v of fewer heads, the rate overwritten by 1 + (a - 1) k_a before it is used, no bonus."""
    b = Builder(file, "qrwkv7", 717, layer="qrwkv7", heads=H, cut=6, eps=64e-5, layout="half_split", dims=D)
    r, k, v = parts(b, T, H, D, D, KV)
    angles = 10000.0 ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
    b.give("frequencies", angles, precise)
    raw, a = b.read("decay_raw", T, H, D), b.read("rate_raw", T, H, D).sigmoid()
    k_k, k_a = (b.read(part, H, D, reach=1.0) for part in ("k_k", "k_a"))
    weight, bias, gate = b.read("norm_weight", H, D), b.read("norm_bias", H, D), b.read("gate", T, H, D)
    g = -torch.exp(-0.5 - F.softplus(-raw))
    r, k, v = rotated(r, angles, "half_split"), spread(rotated(k, angles, "half_split"), H), spread(v, H)
    kk = F.normalize(k * k_k, dim=-1)
    a = 1 + (a - 1) * k_a
    k = k * a
    o, _ = recurrent("diagonal_plus_low_rank", H, 1.0, r, k, v, g, removal=-kk, replacement=kk * a)
    y = group_norm(o, 64e-5, weight, bias) * gate
    finish(b, g, o, y, removal=-kk, replacement=kk * a, written_key=k, turned_query=r)


def deltanet_layer(file, T=15, H=3, K=4, V=3):
    b = Builder(file, "deltanet", 718, layer="deltanet", heads=H, cut=6, eps=1e-5)
    q, k, v = parts(b, T, H, K, V)
    weights, raw = b.read("conv_weights", H * (2 * K + V), 4, reach=1.0), b.read("beta_raw", T, H)
    weight = b.read("norm_weight", V)
    mixed = causal_conv(torch.cat([y.flatten(1) for y in (q, k, v)], -1), weights, None, F.silu)
    q, k, v = split_heads(mixed, (H, K), (H, K), (H, V))
    beta = raw.sigmoid()[..., None]
    o, _ = recurrent("delta", H, K**-0.5, l2_normalised(q), l2_normalised(k), v, beta=beta)
    finish(b, None, o, rms(o, 1e-5, weight), beta=beta)


def layers():
    file = header("Layers: raw projections to the normed and gated output, before the output projection")
    qwen3_next_layer(file, "gated deltanet", 700)
    kimi_layer(file, "kda", 701)
    minimax_layer(file, "lightning, layer 0", 702, 0)
    minimax_layer(file, "lightning, layer 5", 703, 5)
    mamba2_layer(file, "mamba2, one group", 704, 1)
    mamba2_layer(file, "mamba2, two groups, dt clamped", 705, 2, (0.01, 0.7))
    mamba_layer(file, "mamba", 706)
    for made in (gla_layer, retnet_layer, supra_layer, mohawk_layer, rwkv6_layer, qrwkv6_layer, rwkv7_layer,
                 qrwkv7_layer, deltanet_layer):
        made(file)
    return file


if __name__ == "__main__":
    torch.set_num_threads(1)
    with torch.no_grad():
        deliver(__doc__, {"gates.txt": gates, "rows.txt": rows, "layers.txt": layers}, VERSIONS)
