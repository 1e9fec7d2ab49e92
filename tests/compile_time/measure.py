#!/usr/bin/env python3
"""What including sash costs, beside what including Eigen costs, with the same compiler in the same minute.

Usage: measure.py <first program> <compiler and flags...>
Fails where <sash/sash.hpp> costs more than <Eigen/Dense>, or the first program more than four times as much. Times are
user seconds of the compiler, medians of rounds in which the three take turns, so that all see the same machine.
"""

import os
import statistics
import subprocess
import sys
import tempfile

ROUNDS = 5
HEADER_LIMIT = 1.0
PROGRAM_LIMIT = 4.0


def user_seconds(command: list[str]) -> float:
    process = subprocess.Popen(command)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        sys.exit(f"does not compile: {' '.join(command)}")
    return usage.ru_utime


def main() -> None:
    program, *compiler = sys.argv[1:]
    failures = 0
    with tempfile.TemporaryDirectory() as folder:
        sources = {"<Eigen/Dense>": f"{folder}/eigen.cpp", "<sash/sash.hpp>": f"{folder}/sash.cpp", "program": program}
        for header in ("<Eigen/Dense>", "<sash/sash.hpp>"):
            with open(sources[header], "w") as file:
                file.write(f"#include {header}\n")

        for flags in (["-O2"], ["-O2", "-march=native"]):
            times: dict[str, list[float]] = {name: [] for name in sources}
            for _ in range(ROUNDS):
                for name, source in sources.items():
                    times[name].append(user_seconds([*compiler, *flags, "-c", source, "-o", f"{folder}/object.o"]))
            median = {name: statistics.median(seconds) for name, seconds in times.items()}
            eigen = median["<Eigen/Dense>"]
            print(f"{' '.join(flags)}: <Eigen/Dense> {eigen:.2f} s")
            for name, limit in (("<sash/sash.hpp>", HEADER_LIMIT), ("program", PROGRAM_LIMIT)):
                ratio = median[name] / eigen
                verdict = "ok" if ratio <= limit else "TOO SLOW"
                failures += ratio > limit
                print(f"    {name:16} {median[name]:.2f} s, {ratio:.2f} x Eigen (limit {limit:g}) {verdict}", flush=True)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
