#!/usr/bin/env python3
"""The tables of README.md, as Markdown, from what `goals --json`, `peers.py --json` and `boundary --json` wrote.

    python3 bench/report.py --goals goals.json --peers peers.json --boundary boundary.json
"""
import argparse
import json
from pathlib import Path


def figure(x):
    return f"{x:.3f}" if x < 10 else f"{x:.1f}"


def goals_table(found):
    lines = ["| goal | measured | must | aim | |", "|---|---|---|---|---|"]
    for row in found["goals"]:
        sign = "≥" if row["better"] == "higher" else "≤"
        limits = [f"{sign} {row['must']:g}", f"{sign} {row['aim']:g}"] if "must" in row else ["", ""]
        if "measured" not in row:
            verdict = row["note"] if row["ok"] else f"failed: {row['note']}"
        elif "must" not in row:
            verdict = row["note"]
        else:
            word = "aim" if row["reaches aim"] else "ok" if row["ok"] else "**short**"
            verdict = "; ".join(filter(None, [word, row["note"]]))
        measured = figure(row["measured"]) if "measured" in row else "–"
        lines.append(f"| {row['goal']} | {measured} | {limits[0]} | {limits[1]} | {verdict} |")
    return lines


def peers_table(found):
    names = list(found["columns"])
    columns = list(found["columns"].values())
    lines = ["| | " + " | ".join(names) + " | goal |", "|---|" + "---|" * (len(names) + 1)]
    for row in dict.fromkeys(r for column in columns for r in column["rows"]):
        cells = [column["rows"].get(row) for column in columns]
        goal = found["goals"].get(row)
        verdict = ""
        if goal and goal["measured"]:
            word = "**short**" if not goal["ok"] else "aim" if goal["reaches aim"] else "ok"
            verdict = f"{goal['measured']:.2f} × (must {goal['must']:g}, aim {goal['aim']:g}): {word}"
        ours = [f"{cell['of_peak']:.2f} of peak" if cell else "" for cell in cells]
        lines.append(f"| **{row}**, sash | " + " | ".join(ours) + f" | {verdict} |")
        for peer in dict.fromkeys(p for cell in cells if cell for p in cell["peers"]):
            theirs = [(cell or {"peers": {}})["peers"].get(peer, {}) for cell in cells]
            shown = [f"{t['ratio']:.2f} × ({t['of_peak']:.2f})" if "ratio" in t else "–" for t in theirs]
            lines.append(f"| {peer} | " + " | ".join(shown) + " | |")
    return lines


def boundary_tables(found):
    mib = lambda bytes: f"{bytes / 2**20:.2f}"
    lines = ["| | states | MiB a sequence | MiB moved a token | tokens/s | of the read bandwidth |", "|---|---|---|---|---|---|"]
    for row in found["equal memory"]:
        name = f"{row['name']}, {row['keys']} keys" if row["keys"] else row["name"]
        lines.append(f"| {name} | {row['states'] or ''} | {mib(row['held'])} | {mib(row['moved'])} | "
                     f"{1 / row['seconds']:,.0f} | {row['moved'] / row['seconds'] / found['bytes read']:.2f} |")
    batches = [key for key in found["crossings"][0] if key.startswith("faster, batch")]
    names = ["smaller", "smaller, measured", "faster", *batches, "faster in prompts"]
    lines += ["", "| | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    keys = lambda x: "none" if x is None else x or "all"
    for row in found["crossings"]:
        lines.append(f"| {row['name']} | " + " | ".join(str(keys(row[name])) for name in names) + " |")
    positions = sorted({row["position"] for row in found["stream"]})
    lines += ["", "| µs a token at position | " + " | ".join(f"{p:,}" for p in positions) + " |",
              "|---|" + "---|" * len(positions)]
    costs = {}
    for row in found["stream"]:
        name = f"{row['name']}, {row['keys']} keys" if row["keys"] else row["name"]
        costs.setdefault(name, []).append(f"{row['seconds'] * 1e6:.1f}")
    return lines + [f"| {name} | " + " | ".join(cells) + " |" for name, cells in costs.items()]


def main():
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("--goals", type=Path)
    parse.add_argument("--peers", type=Path)
    parse.add_argument("--boundary", type=Path)
    options = parse.parse_args()
    for file, table in [(options.goals, goals_table), (options.peers, peers_table),
                        (options.boundary, boundary_tables)]:
        if file:
            print("\n".join(table(json.loads(file.read_text()))), end="\n\n")


if __name__ == "__main__":
    main()
