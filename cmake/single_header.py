#!/usr/bin/env python3
"""Write headers of sash, and all that they include of sash, as one header. Other includes stay as they are."""

import argparse
import pathlib
import re
import sys

SASH_INCLUDE = re.compile(r'\s*#\s*include\s*[<"](sash/[^>"]+)[>"]')
CONDITION = re.compile(r"\s*#\s*(if|ifdef|ifndef|endif)\b")
PRAGMA_ONCE = re.compile(r"\s*#\s*pragma\s+once\b")


class Amalgam:
    def __init__(self, include: pathlib.Path):
        self.include = include
        self.done: set[str] = set()
        self.open: list[str] = []  # the chain of includes that led here
        self.lines: list[str] = []

    def add(self, name: str) -> None:
        if name in self.open:
            sys.exit("headers include each other: " + " -> ".join([*self.open, name]))
        if name in self.done:
            return
        self.open.append(name)
        depth = 0
        body: list[str] = []
        for number, line in enumerate((self.include / name).read_text().splitlines(), 1):
            if condition := CONDITION.match(line):
                depth += -1 if condition[1] == "endif" else 1
            if PRAGMA_ONCE.match(line):
                continue
            if include := SASH_INCLUDE.match(line):
                if depth:
                    # A header is written where it is first asked for: in a branch not taken it would be lost.
                    sys.exit(f"{name}:{number}: <{include[1]}> is included under a condition")
                self.lines += body
                body = []
                self.add(include[1])
            else:
                body.append(line)
        self.lines += [f"// ---- {name} ----", *body]
        self.open.pop()
        self.done.add(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--include", type=pathlib.Path, required=True, help="the directory that holds sash/")
    parser.add_argument("--output", type=pathlib.Path, required=True)
    parser.add_argument("headers", nargs="+", help="such as sash/sash.hpp")
    arguments = parser.parse_args()

    amalgam = Amalgam(arguments.include)
    for header in arguments.headers:
        amalgam.add(header)

    version_lines = (arguments.include / "sash/version.hpp").read_text()
    version = ".".join(re.findall(r"#define SASH_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)", version_lines))
    head = [
        f"// sash {version}, the whole library as one header, made from {' '.join(arguments.headers)}.",
        "// Copyright (c) the sash authors. MIT licence: see LICENSE in the source repository.",
        "#pragma once",
    ]
    text = re.sub(r"\n{3,}", "\n\n", "\n".join([*head, *amalgam.lines])) + "\n"
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(text)
    print(f"{arguments.output}: {len(amalgam.done)} headers, {text.count(chr(10))} lines")


if __name__ == "__main__":
    main()
