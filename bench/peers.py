#!/usr/bin/env python3
"""sash against PyTorch, transformers, ONNX Runtime and flash-linear-attention on this machine, one thread.

    python3 bench/peers.py                 everything, within 20 minutes; makes a virtual environment of its own
    python3 bench/peers.py --rows "decode" --json peers.json
    python3 bench/peers.py --python /path/to/python --library build/bench/libsash_peers.so

All of them run in one process, in turn, round for round; the peak of multiply-adds or the read bandwidth is measured
beside every round. Times are thread CPU time; a ratio is the median over rounds of the peer's time over ours. Results
are compared: a peer that computes something else is named, and left out.

On an AMD processor there are two columns. The MKL inside PyTorch's package takes a generic path there; told that the
processor is Intel's (a preloaded library of two lines), it takes its AVX-512 path. Both are stated, and a goal is held
against the better one. The goals' rows end with `ok`, `aim` or SHORT; the exit status is 1 where one is short.
"""
import argparse
import ctypes
import importlib.util
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

PACKAGES = ["torch", "transformers", "onnx", "onnxruntime", "flash-linear-attention", "einops"]
COLUMNS = {"as installed": {}, "MKL AVX-512": {"preload": True}}
SOURCE = Path(__file__).resolve().parent.parent

# A row: what is measured; beginnings of the names of the peers that its goal is held against (all if empty); must, aim,
# or these for each column.
GOALS = {
    "prefill f32 d128 n2048": ([], 1.3, 1.5),
    "prefill f32 d64 n2048": ([], 1.35, 1.6),
    "prefill bf16 d128 n2048": (["torch SDPA"], 1.35, 1.6),
    "prefill bf16 d64 n2048": (["torch SDPA"], 1.35, 1.6),
    "window 256 + 4 f32 d128 n2048": (["torch Flex, sinks"], 3.5, 4.5),
    "window 256 + 4 f32 d128 n8192": (["torch Flex, sinks"], 3.5, 4.5),
    "decode f32 4096 keys": ([], 2.2, 2.8),
    "decode f32 16384 keys": ([], 2.2, 2.8),
    "decode bf16 4096 keys": ([], 2.2, 2.8),
    "decode bf16 16384 keys": ([], 2.2, 2.8),
    "windowed decode f32 1024 + 4 of 16384": (["torch", "transformers"], 2.5, 3.5),
    "linear decode 32 heads 128 x 128": (["torch"], 1.7, 2.0),
    "linear decode 32 heads 128 x 128, fla": (["fla"], 6, 8),
    "linear prefill 32 heads 128 x 128 n2048": (["fla"], {"as installed": (3.5, 4.5), "MKL AVX-512": (2.5, 3.2)}),
    "gated delta prefill 32 heads 128 x 128 n2048": (["fla"], {"as installed": (4, 5), "MKL AVX-512": (3, 4)}),
}


# ------------------------------------------------------------------------------------------------------------ measuring


class Sash:
    """The library of bench/peers.cpp."""

    def __init__(self, path):
        self.library = ctypes.CDLL(str(path))
        for name in ["peak_flops", "peak_bfloat16_flops", "read_bandwidth"]:
            getattr(self.library, "sash_" + name).restype = ctypes.c_double
        integer, pointer = ctypes.c_int64, ctypes.c_void_p
        self.library.sash_layers.restype = pointer
        self.library.sash_layers.argtypes = [ctypes.c_int] + 6 * [integer]
        for make in [self.library.sash_linear_layers, self.library.sash_delta_layers]:
            make.restype, make.argtypes = pointer, 3 * [integer]
        self.library.sash_append.argtypes = [pointer, integer, pointer, pointer]
        self.library.sash_attend.argtypes = [pointer, integer] + 6 * [pointer]
        self.library.sash_read.argtypes = 3 * [pointer]
        self.library.sash_reset.argtypes = self.library.sash_free.argtypes = [pointer]

    def layers(self, *arguments, kind=""):
        """kind: "" for softmax, "linear" or "delta"."""
        make = getattr(self.library, f"sash_{kind}_layers" if kind else "sash_layers")
        return Layers(self.library, make(*arguments))


class Layers:
    """Some layers; each call takes the next. Tensors are [tokens, heads, dim] and contiguous."""

    def __init__(self, library, handle):
        self.library, self.handle = library, handle

    def __del__(self):
        self.library.sash_free(self.handle)

    def reset(self):
        self.library.sash_reset(self.handle)

    def append(self, k, v):
        self.library.sash_append(self.handle, k.shape[0], k.data_ptr(), v.data_ptr())

    def attending(self, q, k, v, out, decay=None, beta=None):
        """A call to be repeated; it returns `out`. What it takes is looked up here, once, as a program in C++ would."""
        tensors = [q, k, v, decay, beta, out]  # kept, so that they stay where they are
        return self.repeated(self.library.sash_attend, ctypes.c_int64(q.shape[0]), tensors)

    def reading(self, q, out):
        return self.repeated(self.library.sash_read, None, [q, out])

    def repeated(self, call, tokens, tensors):
        pointers = [ctypes.c_void_p(x.data_ptr() if x is not None else None) for x in tensors]
        arguments = [ctypes.c_void_p(self.handle)] + ([tokens] if tokens is not None else []) + pointers

        def run():
            call(*arguments)
            return tensors[-1]

        run.layers = self  # which live as long as the call
        return run


class Bench:
    """Measures rows and keeps what it found."""

    def __init__(self, options):
        self.sash = Sash(options.library)
        self.wanted, self.seconds = options.rows, options.seconds
        self.rows, self.missing = {}, {}

    def wants(self, name):
        return self.wanted in name

    def row(self, name, work, peak, ours, peers, tolerance, calls=1, before=0):
        """ours() and each of peers do the same; `work` is flops or bytes of a call, `peak` measures their rate."""
        expected = ours().clone()
        usable, results = {}, {}
        for peer, run in peers.items():
            try:
                difference = (run().reshape(expected.shape).float() - expected.float()).abs().max().item()
                if not difference <= tolerance:
                    raise ValueError(f"its result differs from ours by {difference:.2g}")
                usable[peer] = run
                results[peer] = {"difference": difference}
            except Exception as problem:  # a peer that cannot be run is named, not hidden
                self.missing[f"{peer}: {name}"] = f"{type(problem).__name__}: {str(problem).strip().splitlines()[0]}"
        times, peaks = {peer: [] for peer in ["sash", *usable]}, []
        start = time.monotonic()
        for round in range(-1, 15):
            if round >= 3 and time.monotonic() - start > self.seconds:
                break
            rate = peak()
            now = {peer: thread_seconds(run, calls, before) for peer, run in [("sash", ours), *usable.items()]}
            if round >= 0:
                peaks.append(rate)
                for peer, seconds in now.items():
                    times[peer].append(seconds)
        median = lambda peer: statistics.median(work / t / p for t, p in zip(times[peer], peaks))
        for peer in usable:
            results[peer].update(
                of_peak=median(peer), seconds=statistics.median(times[peer]),
                ratio=statistics.median(t / s for t, s in zip(times[peer], times["sash"])))
        self.rows[name] = {"of_peak": median("sash"), "seconds": statistics.median(times["sash"]),
                           "rounds": len(peaks), "peers": results}
        shown = ", ".join(f"{peer} {r['ratio']:.2f}x" for peer, r in results.items() if "ratio" in r)
        print(f"  {name}: {self.rows[name]['of_peak']:.2f} of peak; {shown}", file=sys.stderr, flush=True)


def thread_seconds(run, calls, before=0):
    """Of a call, the mean of so many; some go before, untimed."""
    for _ in range(before):
        run()
    start = time.thread_time()
    for _ in range(calls):
        run()
    return (time.thread_time() - start) / calls


# ---------------------------------------------------------------------------------------------------------------- peers


def visible_pairs(n, most):
    filling = min(n, most)
    return filling * (filling + 1) / 2 + max(n - most, 0) * most


class Tensors:
    """The same random numbers as [tokens, heads, dim] for sash and as [1, heads, tokens, dim] for the others."""

    def __init__(self, torch, queries, keys, dim, dtype, heads=32, kv_heads=8):
        make = torch.Generator().manual_seed(1)
        random = lambda n, h: torch.randn(n, h, dim, generator=make).to(dtype)
        self.q, self.k, self.v = random(queries, heads), random(keys, kv_heads), random(keys, kv_heads)
        self.out = torch.empty_like(self.q)
        self.theirs = [t.transpose(0, 1).contiguous().unsqueeze(0) for t in (self.q, self.k, self.v)]


def causal(window=None, sinks=0):
    if window is None:
        return lambda b, h, q, k: k <= q
    return lambda b, h, q, k: (k <= q) & ((q - k < window) | (k < sinks))


class Torch:
    """The forms of PyTorch; those that are compiled are compiled once for each shape."""

    def __init__(self):
        import torch
        from torch.nn.attention import flex_attention
        torch.set_num_threads(1)
        torch.set_grad_enabled(False)
        torch._dynamo.config.cache_size_limit = 64
        self.torch, self.flex_attention = torch, flex_attention
        self.compiled = torch.compile(flex_attention.flex_attention, dynamic=False)

    def sdpa(self, q, k, v, mask=None, is_causal=False):
        out = self.torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=is_causal, enable_gqa=True)
        return out[0].transpose(0, 1)

    def flex(self, q, k, v, blocks):
        return self.compiled(q, k, v, block_mask=blocks, enable_gqa=True)[0].transpose(0, 1)

    def block_mask(self, mask, queries, keys):
        """The queries are the last ones of the keys' positions."""
        first = keys - queries
        return self.flex_attention.create_block_mask(
            lambda b, h, q, k: mask(b, h, q + first, k), None, None, queries, keys, device="cpu")

    def grouped(self, q, k, v):
        """One query: three lines over KV heads, with the query heads of each as rows."""
        rows = q.reshape(k.shape[1], -1, q.shape[-1])
        weights = self.torch.softmax(self.torch.bmm(rows, k[0].transpose(1, 2)) / math.sqrt(q.shape[-1]), -1)
        return self.torch.bmm(weights, v[0]).reshape(1, -1, q.shape[-1])


class Onnx:
    """GroupQueryAttention of ONNX Runtime: keys and values in buffers that are past and present at once."""

    def __init__(self, torch):
        import onnx
        import onnxruntime
        self.torch, self.onnx, self.runtime = torch, onnx, onnxruntime
        self.sessions = {}

    def session(self, dim, heads, kv_heads, window):
        if (dim, window) not in self.sessions:
            make, real = self.onnx.helper, self.onnx.TensorProto.FLOAT
            whole = self.onnx.TensorProto.INT32
            node = make.make_node(
                "GroupQueryAttention",
                ["query", "key", "value", "past_key", "past_value", "seqlens_k", "total_sequence_length"],
                ["output", "present_key", "present_value"], domain="com.microsoft",
                num_heads=heads, kv_num_heads=kv_heads, local_window_size=window)
            row = lambda name, h: make.make_tensor_value_info(name, real, [1, "n", h * dim])
            buffer = lambda name: make.make_tensor_value_info(name, real, [1, kv_heads, "room", dim])
            graph = make.make_graph(
                [node], "layer",
                [row("query", heads), row("key", kv_heads), row("value", kv_heads), buffer("past_key"),
                 buffer("past_value"), make.make_tensor_value_info("seqlens_k", whole, [1]),
                 make.make_tensor_value_info("total_sequence_length", whole, [])],
                [row("output", heads), buffer("present_key"), buffer("present_value")])
            model = make.make_model(graph, ir_version=8, opset_imports=[
                make.make_opsetid("", 17), make.make_opsetid("com.microsoft", 1)])
            options = self.runtime.SessionOptions()
            options.intra_op_num_threads = options.inter_op_num_threads = 1
            self.sessions[dim, window] = self.runtime.InferenceSession(
                model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return self.sessions[dim, window]

    def call(self, t, k_buffer, v_buffer, length, window=-1):
        """A call of one layer whose buffers hold `length` tokens, those of t, the last ones, included."""
        torch, (n, heads, dim), kv_heads = self.torch, t.q.shape, t.k.shape[1]
        session = self.session(dim, heads, kv_heads, window)
        binding = session.io_binding()
        out = torch.empty(1, n, heads * dim)
        last = lambda x, h: x[-n:].reshape(1, n, h * dim).contiguous()
        held = [last(t.q, heads), last(t.k, kv_heads), last(t.v, kv_heads), k_buffer, v_buffer,
                torch.tensor([length - 1], dtype=torch.int32), torch.tensor(length, dtype=torch.int32)]
        value = lambda x: self.runtime.OrtValue.ortvalue_from_numpy(x.numpy())
        names = ["query", "key", "value", "past_key", "past_value", "seqlens_k", "total_sequence_length"]
        values = [value(x) for x in held]
        for name, bound in zip(names, values):
            binding.bind_ortvalue_input(name, bound)
        values.append(value(out))
        for name, bound in [("output", values[-1]), ("present_key", values[3]), ("present_value", values[4])]:
            binding.bind_ortvalue_output(name, bound)

        def run():
            session.run_with_iobinding(binding)
            return values[-1]

        return lambda: torch.from_numpy(run().numpy()).reshape(n, heads, dim)


# ----------------------------------------------------------------------------------------------------------------- rows


def prefill_rows(bench, torch_peer, onnx):
    torch = torch_peer.torch
    for dtype, element in [(torch.float32, "f32"), (torch.bfloat16, "bf16")]:
        for dim in [128, 64]:
            for n in [512, 2048, 4096]:
                name = f"prefill {element} d{dim} n{n}"
                if not bench.wants(name):
                    continue
                is_narrow = dtype == torch.bfloat16
                t = Tensors(torch, n, n, dim, dtype)
                layers = bench.sash.layers(int(is_narrow), 1, 0, 0, 32, 8, dim)
                blocks = torch_peer.block_mask(causal(), n, n)
                peers = {"torch SDPA": lambda: torch_peer.sdpa(*t.theirs, is_causal=True),
                         "torch Flex": lambda: torch_peer.flex(*t.theirs, blocks)}
                if onnx and not is_narrow:
                    buffers = [torch.empty(1, 8, n, dim) for _ in range(2)]
                    peers["ONNX Runtime"] = onnx.call(t, *buffers, n)
                bench.row(name, 4 * dim * 32 * visible_pairs(n, n), peak_of(bench, is_narrow),
                          attending_all(layers, t.q, t.k, t.v, t.out), peers, 0.05 if is_narrow else 1e-4)


def window_rows(bench, torch_peer, onnx):
    torch, dim, sinks = torch_peer.torch, 128, 4
    for n in [2048, 8192]:
        for window in [1024, 256]:
            name = f"window {window} + 4 f32 d128 n{n}"
            if not bench.wants(name):
                continue
            t = Tensors(torch, n, n, dim, torch.float32)
            layers = bench.sash.layers(0, 1, window, sinks, 32, 8, dim)
            blocks = torch_peer.block_mask(causal(window, sinks), n, n)
            peers = {"torch Flex, sinks": lambda: torch_peer.flex(*t.theirs, blocks)}
            if n == 2048:
                positions = torch.arange(n)
                mask = causal(window, sinks)(0, 0, positions[:, None], positions[None, :])
                peers["torch SDPA, mask"] = lambda: torch_peer.sdpa(*t.theirs, mask=mask)
            work = 4 * dim * 32 * visible_pairs(n, window + sinks)
            bench.row(name, work, peak_of(bench, False), attending_all(layers, t.q, t.k, t.v, t.out), peers, 1e-4)

            # Without sinks, for the peers that have none.
            plain = bench.sash.layers(0, 1, window, 0, 32, 8, dim)
            plain_blocks = torch_peer.block_mask(causal(window), n, n)
            peers = {"torch Flex": lambda: torch_peer.flex(*t.theirs, plain_blocks)}
            if onnx:
                buffers = [torch.empty(1, 8, n, dim) for _ in range(2)]
                peers["ONNX Runtime, window"] = onnx.call(t, *buffers, n, window)
            bench.row(name.replace(" + 4", ""), 4 * dim * 32 * visible_pairs(n, window), peak_of(bench, False),
                      attending_all(plain, t.q, t.k, t.v, t.out), peers, 1e-4)


def attending_all(layers, *tensors):
    """A prompt from its beginning, again and again."""
    attend = layers.attending(*tensors)

    def run():
        layers.reset()
        return attend()

    return run


def peak_of(bench, is_narrow):
    narrow = bench.sash.library.sash_peak_bfloat16_flops
    return narrow if is_narrow and narrow() > 0 else bench.sash.library.sash_peak_flops


COLD = 540 << 20  # bytes in rotation: every layer comes from memory


class Turn:
    """Things in turn."""

    def __init__(self, things):
        self.things, self.next = things, 0

    def __call__(self):
        self.next = (self.next + 1) % len(self.things)
        return self.things[self.next]


def copies(tensor, count):
    return [tensor.clone() for _ in range(count)]


def decode_rows(bench, torch_peer, onnx):
    torch, dim = torch_peer.torch, 128
    for dtype, element in [(torch.float32, "f32"), (torch.bfloat16, "bf16")]:
        for keys in [1024, 4096, 16384]:
            name = f"decode {element} {keys} keys"
            if not bench.wants(name):
                continue
            is_narrow = dtype == torch.bfloat16
            t = Tensors(torch, 1, keys, dim, dtype)
            q, k, v = t.theirs
            bytes = 2 * k.numel() * k.element_size()
            count = math.ceil(COLD / bytes)
            layers = bench.sash.layers(int(is_narrow), count, 0, 0, 32, 8, dim)
            layers.append(t.k, t.v)
            pairs = Turn(list(zip(copies(k, count), copies(v, count))))
            blocks = torch_peer.block_mask(causal(), 1, keys)
            peers = {"torch SDPA": lambda: torch_peer.sdpa(q, *pairs()),
                     "torch grouped bmm": lambda: torch_peer.grouped(q, *pairs()),
                     "torch Flex": lambda: torch_peer.flex(q, *pairs(), blocks)}
            if onnx and not is_narrow:
                calls = Turn([onnx.call(t, a, b, keys) for a, b in zip(copies(k, count), copies(v, count))])
                peers["ONNX Runtime"] = lambda: calls()()
            bench.row(name, bytes, bench.sash.library.sash_read_bandwidth, layers.reading(t.q, t.out), peers,
                      0.02 if is_narrow else 1e-4, calls=max(1, round(1e8 / bytes)))


def windowed_decode_rows(bench, torch_peer, onnx):
    """One token appended to a window of 1024 + 4 keys and read, 64 layers in turn. A peer without sinks gets a window
    of as many keys; results are not compared with ours, since the keys are others."""
    torch, dim, window, sinks, stream = torch_peer.torch, 128, 1024, 4, 16384
    name = "windowed decode f32 1024 + 4 of 16384"
    if not bench.wants(name):
        return
    keys = window + sinks
    t = Tensors(torch, 1, 2048, dim, torch.float32)
    bytes, count = 2 * keys * 8 * dim * 4, 64
    layers = bench.sash.layers(0, count, window, sinks, 32, 8, dim)
    for _ in range(stream // 2048):
        layers.append(t.k, t.v)
    q, k, v = t.theirs
    token = [k[:, :, -1:].contiguous(), v[:, :, -1:].contiguous()]

    ours = layers.attending(t.q, t.k[-1:], t.v[-1:], t.out)

    def ring_of(keys_of_layer):
        rings = Turn([[x[:, :, :keys_of_layer].contiguous() for x in (k, v)] for _ in range(count)])
        place = [0]

        def run(read):
            ring = rings()
            place[0] = (place[0] + 1) % (keys_of_layer - sinks)
            for x, new in zip(ring, token):
                x[:, :, sinks + place[0]] = new[:, :, 0]
            return read(*ring)

        return run

    ring = ring_of(keys)
    peers = {"torch ring + SDPA": lambda: ring(lambda a, b: torch_peer.sdpa(q, a, b)),
             "torch ring + grouped bmm": lambda: ring(lambda a, b: torch_peer.grouped(q, a, b))}
    try:
        from transformers import cache_utils
        for kind, make in [
                ("dynamic", lambda: cache_utils.DynamicSlidingWindowLayer(sliding_window=keys)),
                ("static", lambda: cache_utils.StaticSlidingWindowLayer(max_cache_len=stream, sliding_window=keys))]:
            filled = []
            for _ in range(count):
                filled.append(make())
                filled[-1].update(k[:, :, :keys].contiguous(), v[:, :, :keys].contiguous())
            turn = Turn(filled)
            peers["transformers " + kind] = lambda turn=turn: torch_peer.sdpa(q, *turn().update(*token))
    except ImportError as problem:
        bench.missing["transformers"] = str(problem)

    long = [torch.randn(1, 8, stream, dim) for _ in range(2)]
    caches = Turn([[x.clone() for x in long] for _ in range(4)])
    blocks = torch_peer.block_mask(causal(window, sinks), 1, stream)

    def flex():
        cache = caches()
        for x, new in zip(cache, token):
            x[:, :, -1] = new[:, :, 0]
        return torch_peer.flex(q, *cache, blocks)

    peers["torch Flex, sinks, 16k cache"] = flex
    if onnx:
        calls = Turn([onnx.call(t, *[x.clone() for x in long], stream, keys) for _ in range(4)])
        peers["ONNX Runtime, window"] = lambda: calls()()
    bench.row(name, bytes, bench.sash.library.sash_read_bandwidth, ours, peers, math.inf, calls=16)


def linear_decode_rows(bench, torch_peer):
    torch, heads, dim, count = torch_peer.torch, 32, 128, 64
    name = "linear decode 32 heads 128 x 128"
    t = Tensors(torch, 1, 1, dim, torch.float32, heads, heads)
    decay = -torch.rand(1, heads, 1)
    factor = decay.exp().reshape(heads, 1, 1)
    layers = bench.sash.layers(count, heads, dim, kind="linear")
    bytes = 2 * heads * dim * dim * 4
    q, k, v = [x[0] for x in t.theirs]  # [heads, 1, dim]
    scale = dim ** -0.5
    before = 32  # 64 MB, more than a last cache: what they wrote is written back meanwhile, as in a long run

    ours = layers.attending(t.q, t.k, t.v, t.out, decay)
    states = lambda: Turn([torch.zeros(heads, dim, dim) for _ in range(count)])
    baddbmm_states, addcmul_states = states(), states()

    def baddbmm():
        s = baddbmm_states().mul_(factor).baddbmm_(k.transpose(1, 2), v)
        return torch.bmm(q * scale, s)

    def addcmul():
        s = addcmul_states().mul_(factor).addcmul_(k.transpose(1, 2), v)
        return torch.bmm(q * scale, s)

    if bench.wants(name):
        bench.row(name, bytes, bench.sash.library.sash_read_bandwidth, ours,
                  {"torch in place, baddbmm": baddbmm, "torch in place, addcmul": addcmul}, 1e-4, calls=count,
                  before=before)
    if not bench.wants(name + ", fla"):
        return
    try:
        from fla.ops.gla.naive import naive_recurrent_gla
        from fla.ops.simple_gla.naive import naive_recurrent_simple_gla
    except Exception as problem:
        bench.missing["flash-linear-attention"] = f"{type(problem).__name__}: {problem}"
        return
    rows = [x.reshape(1, 1, heads, dim) for x in (t.q, t.k, t.v)]
    per_channel = decay.reshape(1, 1, heads, 1).expand(1, 1, heads, dim).contiguous()

    def fla(form, gate):
        held = [torch.zeros(1, heads, dim, dim) for _ in range(count)]
        place = [-1]

        def run():
            place[0] = (place[0] + 1) % count
            out, held[place[0]] = form(*rows, gate, initial_state=held[place[0]], output_final_state=True)
            return out[0]

        return run

    layers = bench.sash.layers(count, heads, dim, kind="linear")  # at the same token as theirs again
    ours = layers.attending(t.q, t.k, t.v, t.out, decay)
    bench.row(name + ", fla", bytes, bench.sash.library.sash_read_bandwidth, ours,
              {"fla naive simple_gla": fla(naive_recurrent_simple_gla, decay.reshape(1, 1, heads)),
               "fla naive gla": fla(naive_recurrent_gla, per_channel)}, 1e-4, calls=8,
              before=before)


def linear_prefill_rows(bench, torch_peer):
    """A prompt of 2048 tokens, with a decay by head and token, against the chunked forms of flash-linear-attention. The
    work is that of a state's update and its read: 4 · 128 · 128 a token and head."""
    torch, heads, dim, n = torch_peer.torch, 32, 128, 2048
    names = [f"{kind} prefill {heads} heads {dim} x {dim} n{n}" for kind in ["linear", "gated delta"]]
    if not any(map(bench.wants, names)):
        return
    try:
        from fla.ops.gated_delta_rule.naive import naive_chunk_gated_delta_rule
        from fla.ops.simple_gla.naive import naive_chunk_simple_gla
    except Exception as problem:
        bench.missing["flash-linear-attention, chunked"] = f"{type(problem).__name__}: {problem}"
        return
    t = Tensors(torch, n, n, dim, torch.float32, heads, heads)
    unit = torch.nn.functional.normalize
    t.q, t.k = unit(t.q, dim=-1), unit(t.k, dim=-1)
    make = torch.Generator().manual_seed(2)
    decay, beta = -0.1 * torch.rand(n, heads, generator=make), torch.rand(n, heads, generator=make)
    rows = [x.unsqueeze(0) for x in (t.q, t.k, t.v, decay)]
    work = 4 * dim * dim * heads * n
    for name, kind, gates, theirs in [
            (names[0], "linear", [], lambda: naive_chunk_simple_gla(*rows)),
            (names[1], "delta", [beta], lambda: naive_chunk_gated_delta_rule(*rows, beta.unsqueeze(0)))]:
        if not bench.wants(name):
            continue
        layers = bench.sash.layers(1, heads, dim, kind=kind)
        ours = attending_all(layers, t.q, t.k, t.v, t.out, decay, *gates)
        bench.row(name, work, peak_of(bench, False), ours, {"fla naive chunk": lambda: theirs()[0][0]}, 1e-4)


def measure(options):
    """One column, in this process; the result goes to a file."""
    bench = Bench(options)
    torch_peer = Torch()
    try:
        onnx = Onnx(torch_peer.torch)
    except ImportError as problem:
        onnx = None
        bench.missing["ONNX Runtime"] = str(problem)
    linear_decode_rows(bench, torch_peer)
    linear_prefill_rows(bench, torch_peer)
    windowed_decode_rows(bench, torch_peer, onnx)
    decode_rows(bench, torch_peer, onnx)
    prefill_rows(bench, torch_peer, onnx)
    window_rows(bench, torch_peer, onnx)
    version = lambda name: sys.modules[name].__version__ if name in sys.modules else None
    Path(options.column).write_text(json.dumps({
        "versions": {name: version(name) for name in ["torch", "transformers", "onnxruntime", "fla"]},
        "rows": bench.rows, "missing": bench.missing}))


# ---------------------------------------------------------------------------------------------------- columns and table


def processor():
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def prepare_python(options):
    """An interpreter that has the packages: the one given, or that of a virtual environment."""
    if options.python:
        return options.python
    python = options.venv / "bin" / "python"
    if not python.exists():
        print(f"Making {options.venv} with {', '.join(PACKAGES)}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", options.venv], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
    return str(python)


def prepare_library(options):
    if options.library:
        return str(Path(options.library).resolve())
    subprocess.run(["cmake", "-S", SOURCE, "-B", options.build, "-DCMAKE_BUILD_TYPE=Release", "-DSASH_TESTS=OFF",
                    "-DSASH_EXAMPLES=OFF"], check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["cmake", "--build", options.build, "--target", "sash_peers"], check=True, stdout=subprocess.DEVNULL)
    return str(options.build / "bench" / "libsash_peers.so")


def preload_library(folder):
    """Answers for MKL that the processor is Intel's."""
    source, library = folder / "mkl_avx512.c", folder / "libmkl_avx512.so"
    source.write_text("int mkl_serv_intel_cpu_true(void) { return 1; }\n"
                      "int mkl_serv_intel_cpu(void) { return 1; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", source, "-o", library], check=True)
    return str(library)


def run_column(options, python, library, name, settings):
    print(name, file=sys.stderr, flush=True)
    result = options.build / f"column {name}.json"
    result.unlink(missing_ok=True)
    environment = dict(os.environ, OMP_NUM_THREADS="1", MKL_NUM_THREADS="1",
                       TORCHINDUCTOR_CACHE_DIR=str(options.build / "inductor"))
    if settings.get("preload"):
        environment["LD_PRELOAD"] = preload_library(options.build)
    subprocess.run([python, __file__, "--column", str(result), "--library", library, "--rows", options.rows,
                    "--seconds", str(options.seconds)], check=True, env=environment)
    return json.loads(result.read_text())


def judge(name, columns):
    """The goal of a row, held against the peer and column that come closest to it."""
    if name not in GOALS:
        return None
    against, *limits = GOALS[name]

    def limits_in(column):
        if isinstance(limits[0], dict):  # where there is one column MKL needs no help to take its AVX-512 path
            return limits[0][column if len(columns) > 1 else "MKL AVX-512"]
        return limits

    ratios = {(f"{peer}, {column}", limits_in(column)[0], limits_in(column)[1]): r["ratio"]
              for column, result in columns.items()
              for peer, r in result["rows"].get(name, {"peers": {}})["peers"].items()
              if "ratio" in r and peer.startswith(tuple(against) or "")}
    if not ratios:
        must, aim = limits_in(next(iter(columns)))
        return {"must": must, "aim": aim, "measured": None, "ok": False, "best peer": "none could be run"}
    best, must, aim = closest = min(ratios, key=lambda at: ratios[at] / at[1])
    return {"must": must, "aim": aim, "measured": ratios[closest], "best peer": best, "ok": ratios[closest] >= must,
            "reaches aim": ratios[closest] >= aim}


def print_table(columns, judgements):
    names = list(columns)
    print(f"\nPeers' time over ours, one thread; each of peak or bandwidth in brackets\n")
    print(f"{'':46}" + "".join(f"{name:>20}" for name in names))
    rows = list(dict.fromkeys(row for result in columns.values() for row in result["rows"]))
    for row in rows:
        found = [result["rows"].get(row) for result in columns.values()]
        print(f"{row:46}" + "".join(f"{'[%.2f]' % f['of_peak'] if f else '':>20}" for f in found))
        for peer in dict.fromkeys(p for f in found if f for p in f["peers"]):
            cells = [f["peers"].get(peer, {}) if f else {} for f in found]
            print(f"    {peer:42}" + "".join(
                f"{'%.2f x [%.2f]' % (c['ratio'], c['of_peak']) if 'ratio' in c else '-':>20}" for c in cells))
        verdict = judgements.get(row)
        if verdict:
            shown = f"{verdict['measured']:.2f}" if verdict["measured"] else "-"
            word = "SHORT" if not verdict["ok"] else "aim" if verdict["reaches aim"] else "ok"
            print(f"    goal: {shown} (must {verdict['must']}, aim {verdict['aim']}) {word} · {verdict['best peer']}")
    for name, result in columns.items():
        for what, why in result["missing"].items():
            print(f"not run, {name}: {what}: {why}")


def main():
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("--rows", default="", help="only rows whose name contains this text")
    parse.add_argument("--json", type=Path, help="write everything there")
    parse.add_argument("--seconds", type=float, default=2, help="time a row, after three rounds")
    parse.add_argument("--build", type=Path, default=SOURCE / "build" / "peers", help="folder to build in")
    parse.add_argument("--venv", type=Path, help="virtual environment to make or use; default: in --build")
    parse.add_argument("--python", help="an interpreter that has the packages: no environment is made")
    parse.add_argument("--library", help="libsash_peers.so, already built")
    parse.add_argument("--column", help=argparse.SUPPRESS)
    options = parse.parse_args()
    if options.column:
        return measure(options)

    options.build = options.build.resolve()
    options.build.mkdir(parents=True, exist_ok=True)
    options.venv = options.venv or options.build / "venv"
    python, library = prepare_python(options), prepare_library(options)
    is_amd = "AMD" in processor()
    start = time.monotonic()
    columns = {name: run_column(options, python, library, name, settings)
               for name, settings in COLUMNS.items() if is_amd or not settings}
    judgements = {row: judge(row, columns) for row in GOALS
                  if any(row in result["rows"] for result in columns.values())}
    print_table(columns, judgements)
    print(f"{processor()}; {time.monotonic() - start:.0f} s; {next(iter(columns.values()))['versions']}")
    if options.json:
        found = {"processor": processor(), "columns": columns, "goals": judgements}
        options.json.write_text(json.dumps(found, indent=1))
    return int(any(not verdict["ok"] for verdict in judgements.values()))


if __name__ == "__main__":
    sys.exit(main())
