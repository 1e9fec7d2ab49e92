#!/usr/bin/env python3
"""R31: files built with different flags do not share code that differs.

    check.py symbols <object>...
        No two objects define a weak function of the library's under one name, unless its bytes are the same; and none
        shares a name with an object whose copy holds instructions that the other may not run (std:: templates too).
    check.py orders <compiler> <main object> <object>...
        Links the objects in every order. Every program prints the same bits, and in no program can a function of the
        unit `plain` reach an instruction that plain x86-64 does not have. With qemu-x86_64 at hand the plain unit
        also runs on a processor from before AVX.
"""

import collections
import itertools
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

# VEX and EVEX instructions all begin with v, except those on mask registers and these of BMI.
NEWER = re.compile(r"^(v(?!err|erw|m)\w+|k(mov|or|and|xor|not|test|unpck|shift|add)\w*"
                   r"|andn|bextr|bls\w+|bzhi|mulx|pdep|pext|rorx|sarx|shlx|shrx)$")
FUNCTION = re.compile(r"^[0-9a-f]+ <(.+)>:$")
INSTRUCTION = re.compile(r"^\s+[0-9a-f]+:\s+(?:(?:rep\w*|lock|notrack|bnd|data16|cs)\s+)*(\S+)\s*(.*)$")
RELOCATION = re.compile(r"R_X86_64_\w+\s+([^\s+-]+)")
LABEL = re.compile(r"\s*<([^>+]+)(?:\+0x[0-9a-f]+)?>")


def output(*command: str) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def demangle(name: str) -> str:
    return output("c++filt", name).strip()


class Function:
    def __init__(self) -> None:
        self.code: list[str] = []  # without addresses
        self.newer: str | None = None  # the first instruction that plain x86-64 lacks
        self.refers_to: set[str] = set()


def functions(file: str) -> dict[str, Function]:
    found: dict[str, Function] = {}
    current = Function()
    for line in output("objdump", "-d", "-r", "--no-show-raw-insn", file).splitlines():
        if match := FUNCTION.match(line):
            current = found[match[1]] = Function()
        elif match := RELOCATION.search(line):
            current.refers_to.add(match[1])
            # Constants lie where the file put them; what they are shows in no name.
            current.code.append("constant" if match[1].startswith(".") else match[1])
        elif match := INSTRUCTION.match(line):
            current.code.append(LABEL.sub("", f"{match[1]} {match[2]}"))
            current.refers_to.update(LABEL.findall(line))
            if NEWER.match(match[1]) and current.newer is None:
                current.newer = f"{match[1]} {match[2]}"
    return found


def weak_names(file: str) -> set[str]:
    rows = (line.split() for line in output("nm", "--defined-only", file).splitlines())
    return {row[-1] for row in rows if row[-2] in "WwVu"}


def check_symbols(objects: list[str]) -> int:
    problems = 0
    seen = {file: (weak_names(file), functions(file)) for file in objects}
    for first, second in itertools.combinations(objects, 2):
        (weak, code), (other_weak, other_code) = seen[first], seen[second]
        shared = sorted(name for name in weak & other_weak if name in code and name in other_code)
        differing = [name for name in shared if code[name].code != other_code[name].code]
        for name in differing:
            a, b = code[name], other_code[name]
            if "4sash" in name or (a.newer is None) != (b.newer is None):
                problems += 1
                print(f"{short(first)} | {short(second)}: {demangle(name)} differs"
                      f" ({a.newer or 'plain'} | {b.newer or 'plain'})")
        ours = sum("4sash" in name for name in weak)
        print(f"{short(first)} | {short(second)}: {len(shared)} functions shared, {len(differing)} differ;"
              f" {ours} weak symbols of sash in the first")
    return problems


def short(file: str) -> str:
    return re.sub(r"\.dir$", "", next((part for part in pathlib.Path(file).parts if part.endswith(".dir")), file))


def newer_from_plain(program: str) -> list[str]:
    """Functions with newer instructions that the plain unit can reach by calls and by addresses it takes."""
    code = functions(program)
    way: dict[str, str] = {name: "" for name in code if "3odr5plain" in name}
    if not way:
        sys.exit(f"{program}: no function of odr::plain")
    queue = collections.deque(way)
    found = []
    while queue:
        name = queue.popleft()
        if code[name].newer is not None:
            found.append(f"{demangle(name)} [{code[name].newer}], reached from {demangle(way[name])}")
        for target in code[name].refers_to:
            if target in code and target not in way:
                way[target] = name
                queue.append(target)
    print(f"    {len(way)} functions can be reached from the plain unit")
    return found


def check_orders(compiler: str, main: str, objects: list[str]) -> int:
    problems = 0
    results: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        program = f"{folder}/program"
        disassembled = set()
        count = 0
        for order in itertools.permutations(objects):
            names = " ".join(map(short, order))
            subprocess.run([compiler, main, *order, "-fopenmp", "-o", program], check=True)
            count += 1
            run = subprocess.run([program], stdout=subprocess.PIPE, text=True)
            if run.returncode != 0:
                problems += 1
                print(f"{names}: fails with {run.returncode}: ...{run.stdout[-200:]}")
            results.setdefault(run.stdout, names)
            # The linker keeps the first copy of a name: of the orders that begin alike one is enough.
            if order[0] not in disassembled:
                disassembled.add(order[0])
                print(f"{names}:")
                for problem in newer_from_plain(program):
                    problems += 1
                    print(f"    {problem}")
                if qemu := shutil.which("qemu-x86_64"):
                    old = subprocess.run([qemu, "-cpu", "Nehalem", program, "plain"], stdout=subprocess.DEVNULL)
                    print(f"    on a Nehalem: {'ok' if old.returncode == 0 else 'FAILS'}")
                    problems += old.returncode != 0
        if len(results) != 1:
            problems += 1
            print("the order of linking changes the result: " + " | ".join(results.values()))
        print(f"{count} orders linked and run, {len(results)} result(s)")
    return problems


def main() -> None:
    kind, *rest = sys.argv[1:]
    problems = check_symbols(rest) if kind == "symbols" else check_orders(rest[0], rest[1], rest[2:])
    print(f"{problems} problem(s)")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
