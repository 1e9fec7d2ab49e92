"""The golden files' text format, and the inputs that fill them. Pure Python: no library's random numbers show.

A file is comments (#), then cases. A case is lines up to the next `case`:

    case NAME
    like OTHER                      starts from everything an earlier case of the same file says
    int NAME VALUE                  64-bit
    real NAME VALUE                 double
    text NAME WORD
    tensor NAME RANK D0 D1 ...      followed by the values, row-major, any number a line
"""
import argparse
import math
import pathlib
import struct
import sys

MASK = (1 << 64) - 1


def to_float32(x):
    """The nearest float32, as a Python float."""
    return struct.unpack("f", struct.pack("f", x))[0]


class Inputs:
    """splitmix64 -> uniform numbers in (-reach, reach) of three decimals, as float32: short text, exact values."""

    def __init__(self, seed):
        self.state = seed

    def number(self, reach=2.0):
        self.state = (self.state + 0x9E3779B97F4A7C15) & MASK
        z = self.state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        z ^= z >> 31
        return to_float32(round(((z >> 11) * 2.0**-52 - 1) * reach, 3))

    def numbers(self, count, reach=2.0):
        return [self.number(reach) for _ in range(count)]


def short(text):
    """-0.50 -> -.5"""
    if "." in text and "e" not in text:
        text = text.rstrip("0").rstrip(".")
    if float(text) == 0:
        return "0"
    return text.replace("0.", ".", 1) if text.lstrip("-").startswith("0.") else text


def exact(x):
    """The shortest decimal that reads back as this float32."""
    for digits in range(1, 10):
        text = f"{x:.{digits}g}"
        if to_float32(float(text)) == x:
            return short(text)
    raise ValueError(f"{x!r} is no float32")


def expected(x):
    """Eight decimals: a hundredth of the tightest tolerance, yet coarse enough that no machine's last bit shows."""
    if x == -math.inf:  # the log-sum-exp of a row that sees nothing
        return "-inf"
    if not math.isfinite(x):
        raise ValueError(f"an expected value is {x}")
    return short(f"{x:.8f}")


def relative(x):
    """Nine significant digits: for expected values that must be right whatever their size."""
    if not math.isfinite(x):
        raise ValueError(f"an expected value is {x}")
    return short(f"{x:.9g}")


def precise(x):
    """Fourteen significant digits, for tables that are formed in double."""
    return f"{x:.14g}"


class File:
    def __init__(self, header):
        self.lines = [f"# {line}" for line in header]

    def case(self, name, like=None, **entries):
        """int, float and str entries become scalars; use tensor() for the rest."""
        self.lines += ["", f"case {name}"]
        if like:
            self.lines.append(f"like {like}")
        self.case_entries(**entries)

    def case_entries(self, **entries):
        """More of them, for the case begun last."""
        for key, value in entries.items():
            kind = {int: "int", float: "real", str: "text"}[type(value)]
            self.lines.append(f"{kind} {key} {precise(value) if kind == 'real' else value}")

    def tensor(self, name, shape, values, form):
        """values: flat, row-major; form: exact, expected, relative or precise."""
        if math.prod(shape) != len(values):
            raise ValueError(f"tensor {name}: {shape} does not hold {len(values)} values")
        self.lines.append(f"tensor {name} {len(shape)} {' '.join(map(str, shape))}")
        line = ""
        for value in values:
            word = form(value)
            if len(line) + len(word) >= 120:
                self.lines.append(line)
                line = ""
            line += (" " if line else "") + word
        if line:
            self.lines.append(line)

    def text(self):
        return "\n".join(self.lines) + "\n"


def deliver(description, files, versions):
    """Command line of the two scripts: write the files, or compare with those that are there."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--directory", type=pathlib.Path, default=pathlib.Path(__file__).resolve().parent,
                        help="where the files go (default: beside this script)")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file would change")
    arguments = parser.parse_args()
    print(versions)
    changed = []
    for name, make in files.items():
        text = make().text()
        path = arguments.directory / name
        if arguments.check:
            same = path.exists() and path.read_text() == text
            changed += [] if same else [name]
            print(f"{name}: {'unchanged' if same else 'DIFFERENT'}")
        else:
            path.write_text(text)
            print(f"{name}: {len(text):,} bytes, {text.count(chr(10) + 'case ')} cases")
    sys.exit(f"differs: {', '.join(changed)}" if changed else 0)
