#!/usr/bin/env python3
"""Every C++ block of a Markdown file compiles; those that are whole programs run.

Usage: check.py <file.md> <program that must be printed in it> <folder for the work> <compiler and flags...>

A block with `int main` is compiled and run as it stands. Any other is a fragment: definitions, or statements of a function.
Fragments go on from one another: each sees what those before it define, and may use a name again. A block whose opening
line is ```cpp ignore is passed over, and counted.
"""

import pathlib
import re
import subprocess
import sys

BLOCK = re.compile(r"^```cpp[ \t]*(?P<note>\w*)[ \t]*\n(?P<code>.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)
INCLUDE = re.compile(r"^\s*#\s*include\b.*$", re.MULTILINE)


def main() -> None:
    markdown, printed, work = map(pathlib.Path, sys.argv[1:4])
    compiler = sys.argv[4:]
    work.mkdir(parents=True, exist_ok=True)
    text = markdown.read_text()
    blocks = [(text.count("\n", 0, m.start()) + 1, m["note"], m["code"]) for m in BLOCK.finditer(text)]
    if not blocks:
        sys.exit(f"{markdown}: no C++ block")
    if printed.read_text() not in [code for _, _, code in blocks]:
        sys.exit(f"{markdown} must print {printed.name} as it stands")

    ran = compiled = ignored = 0
    definitions = "#include <sash/sash.hpp>\n#include <cmath>\n#include <vector>\n"
    statements = ""
    for line, note, code in blocks:
        source = work / f"line_{line}.cpp"
        located = f'#line {line + 1} "{markdown}"\n{code}'
        if note == "ignore":
            ignored += 1
        elif re.search(r"\bint\s+main\s*\(", code):
            program = (work / f"line_{line}").resolve()
            source.write_text(located)
            if subprocess.run([*compiler, str(source), "-o", str(program)]).returncode != 0:
                sys.exit(f"{markdown}:{line}: this program does not compile")
            if subprocess.run([str(program)], cwd=work).returncode != 0:
                sys.exit(f"{markdown}:{line}: this program fails")
            ran += 1
        else:
            check = [*compiler, "-fsyntax-only", str(source)]
            source.write_text(definitions + located)
            if subprocess.run(check, stderr=subprocess.DEVNULL).returncode == 0:
                definitions += located
            else:
                # Each fragment opens a scope of its own inside the one before.
                definitions += "".join(include + "\n" for include in INCLUDE.findall(code))
                statements += "{\n" + INCLUDE.sub("", located)
                source.write_text(f"{definitions}void fragments() {{\n{statements}{'}' * (statements.count('#line') + 1)}\n")
                if subprocess.run(check).returncode != 0:
                    sys.exit(f"{markdown}:{line}: this block does not compile")
            compiled += 1
    print(f"{markdown.name}: {ran} programs ran, {compiled} fragments compiled, {ignored} blocks passed over")


if __name__ == "__main__":
    main()
