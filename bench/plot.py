#!/usr/bin/env python3
"""Plots of decode cost against stream position, of prefill cost against length, and of windows against linear attention,
from the JSON of the benchmarks; any of them.

    build/bench/bench_stream  --benchmark_out=stream.json  --benchmark_out_format=json
    build/bench/bench_prefill --benchmark_out=prefill.json --benchmark_out_format=json
    build/bench/boundary --json boundary.json
    python3 bench/plot.py --stream stream.json --prefill prefill.json --boundary boundary.json --output bench

Writes decode.svg, prefill.svg and boundary.svg, which follow the reader's light or dark theme. It needs nothing but
Python.
"""
import argparse
import json
import math
from html import escape
from pathlib import Path

WIDTH, HEIGHT = 760, 430
LEFT, RIGHT, TOP, BOTTOM = 78, 190, 56, 58  # margins around the axes

STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #333 }
  .title { font-weight: 600; font-size: 15px }
  .axis { stroke: #666; fill: none }
  .grid { stroke: #8884; fill: none }
  .line { fill: none; stroke-width: 2.2 }
  .full { stroke: #c4532d; fill: #c4532d } .window { stroke: #1f77b4; fill: #1f77b4 }
  .linear { stroke: #3a8f4c; fill: #3a8f4c }
  .Hedgehog { stroke: #7b4fb5; fill: #7b4fb5 } .LoLCATs { stroke: #b5478a; fill: #b5478a }
  .Liger { stroke: #b8860b; fill: #b8860b } .GLA { stroke: #3a8f4c; fill: #3a8f4c }
  .Mamba-2 { stroke: #c4532d; fill: #c4532d } .gated-delta { stroke: #2a9d9d; fill: #2a9d9d }
  text[class] { stroke: none }
  @media (prefers-color-scheme: dark) {
    text { fill: #ccc } .axis { stroke: #999 }
    .full { stroke: #ff8f66; fill: #ff8f66 } .window { stroke: #6cb6ff; fill: #6cb6ff }
    .linear { stroke: #7fd694; fill: #7fd694 }
    .Hedgehog { stroke: #b794f0; fill: #b794f0 } .LoLCATs { stroke: #f08fc6; fill: #f08fc6 }
    .Liger { stroke: #e3b341; fill: #e3b341 } .GLA { stroke: #7fd694; fill: #7fd694 }
    .Mamba-2 { stroke: #ff8f66; fill: #ff8f66 } .gated-delta { stroke: #6fd6d6; fill: #6fd6d6 }
  }
"""


def series(file, names, argument, dim=None):
    """{name: [(argument, seconds)]} of the benchmarks `name/argument:…`."""
    points = {name: [] for name in names}
    for run in json.loads(Path(file).read_text())["benchmarks"]:
        parts = run["name"].split("/")
        values = dict(part.split(":") for part in parts[1:] if ":" in part)
        if parts[0] not in points or run.get("run_type") == "aggregate" or "error_occurred" in run:
            continue
        if dim is None or values.get("dim") == str(dim):
            unit = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1}[run["time_unit"]]
            points[parts[0]].append((int(values[argument]), run["real_time"] * unit))
    return {name: sorted(p) for name, p in points.items() if p}


def boundary(file, batch):
    """{name: [(keys, seconds)]}: a line for the windows, and a level for each linear method."""
    steps = [s for s in json.loads(Path(file).read_text())["decode"] if s["batch"] == batch]
    lines = {"window": sorted((s["keys"], s["seconds"]) for s in steps if s["name"] == "window")}
    ends = [keys for keys, _ in lines["window"]]
    lines.update({s["name"].replace(" ", "-"): [(keys, s["seconds"]) for keys in (ends[0], ends[-1])]
                  for s in steps if s["states"] > 0})
    return lines


def number(x):
    """1000000 -> 1M, 32768 -> 32k."""
    if x >= 1e6:
        return f"{x / 1e6:g}M"
    return f"{x / 1024:g}k" if x >= 1024 and x % 1024 == 0 else f"{x:g}"


def duration(seconds):
    for unit, name in [(1, "s"), (1e-3, "ms"), (1e-6, "µs")]:
        if seconds >= unit:
            return f"{seconds / unit:g} {name}"
    return f"{seconds * 1e9:g} ns"


class Axis:
    """A logarithmic axis from `low` to `high` onto pixels `first` to `last`."""

    def __init__(self, low, high, first, last):
        self.low, self.high, self.first, self.last = low, high, first, last

    def __call__(self, x):
        part = math.log(x / self.low) / math.log(self.high / self.low)
        return round(self.first + part * (self.last - self.first), 1)


def plot(title, labels, lines, x_label, y_label, ticks):
    xs = [x for line in lines.values() for x, _ in line]
    ys = [y for line in lines.values() for _, y in line]
    low, high = 10 ** math.floor(math.log10(min(ys))), 10 ** math.ceil(math.log10(max(ys)))
    x_axis = Axis(min(xs), max(xs), LEFT, WIDTH - RIGHT)
    y_axis = Axis(low, high, HEIGHT - BOTTOM, TOP)
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
           f"<title>{escape(title)}</title><style>{STYLE}</style>",
           f'<text class="title" x="{LEFT}" y="26">{escape(title)}</text>']
    y = low
    while y <= high * 1.001:
        at = y_axis(y)
        out.append(f'<path class="grid" d="M{LEFT} {at}H{WIDTH - RIGHT}"/>'
                   f'<text x="{LEFT - 8}" y="{at + 4}" text-anchor="end">{duration(float(f"{y:.3g}"))}</text>')
        y *= 10
    for x in ticks:
        if min(xs) <= x <= max(xs):
            at = x_axis(x)
            out.append(f'<path class="grid" d="M{at} {TOP}V{HEIGHT - BOTTOM}"/>'
                       f'<text x="{at}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{number(x)}</text>')
    out.append(f'<path class="axis" d="M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}"/>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    out.append(f'<text x="{middle}" y="{HEIGHT - 14}" text-anchor="middle">{escape(x_label)}</text>')
    out.append(f'<text x="{LEFT}" y="{TOP - 10}">{escape(y_label)}</text>')
    placed = []
    for name, line in sorted(lines.items(), key=lambda item: -item[1][-1][1]):
        path = " ".join(f"{'M' if i == 0 else 'L'}{x_axis(x)} {y_axis(y)}" for i, (x, y) in enumerate(line))
        out.append(f'<path class="line {name}" style="fill:none" d="{path}"/>')
        out += [f'<circle class="{name}" cx="{x_axis(x)}" cy="{y_axis(y)}" r="2.8"/>' for x, y in line]
        beside = y_axis(line[-1][1]) + 4
        if placed and beside - placed[-1] < 16:  # labels do not overlap
            beside = placed[-1] + 16
        placed.append(beside)
        out.append(f'<text class="{name}" x="{x_axis(line[-1][0]) + 8}" y="{beside}">{escape(labels[name])}</text>')
    return "\n".join(out + ["</svg>", ""])


def main():
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("--stream", help="JSON of bench_stream")
    parse.add_argument("--prefill", help="JSON of bench_prefill")
    parse.add_argument("--boundary", help="JSON of boundary")
    parse.add_argument("--output", type=Path, default=Path(__file__).parent, help="folder for the SVG files")
    options = parse.parse_args()
    labels = {"full": "full attention", "window": "window 1024 + 4 sinks", "linear": "linear, elu + 1"}
    if options.stream:
        (options.output / "decode.svg").write_text(plot(
            "One token of decoding, 32 / 8 heads of 128, one layer", labels,
            series(options.stream, labels, "position"), "position in the stream", "thread CPU time a token",
            [256, 1024, 4096, 16384, 65536, 262144, 1000000]))
    if options.prefill:
        (options.output / "prefill.svg").write_text(plot(
            "Prefill of a prompt, 8 / 2 heads of 128, one layer", labels,
            series(options.prefill, labels, "n", dim=128), "tokens of the prompt", "thread CPU time of the prompt",
            [256, 512, 1024, 2048, 4096, 8192]))
    if options.boundary:
        lines = boundary(options.boundary, batch=64)
        (options.output / "boundary.svg").write_text(plot(
            "A window or a state: one token of each of 64 sequences, 32 / 8 heads of 128",
            {name: name.replace("-d", " d") for name in lines}, lines, "keys that the window shows, 4 sinks among them",
            "time a token", [4 ** i for i in range(3, 9)]))


if __name__ == "__main__":
    main()
