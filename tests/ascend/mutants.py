"""Mistakes made on purpose in a generated kernel: a sync left out, a buffer beside its place, a copy too short, two
buffers exchanged. Each is one change of the text; the twin, or the numbers, have to show every one of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

# Statements that order something; a dropped one is a mutant.
_SYNC = re.compile(r"^\s*(?:if \([^()]*\) )?((?:asc_sync_\w+|asc_mem_bar|di_tell_vectors|di_hear_vectors|"
                   r"di_\w+_to_(?:scalar|vector|copies)|di_begin|di_end)\([^;]*\));\s*$")
_LOCK = re.compile(r"^\s*asc_lock\((.*)\);\s*$")
_PLACE = re.compile(r"DI_(UB|L1|L0A|L0B|L0C)\(([^(),]+), ((?:[^()]|\([^()]*\))+)\)")
# Distance that keeps the alignment of a memory.
_SHIFT = {"UB": 32, "L1": 32, "L0A": 512, "L0B": 512, "L0C": 1024}
# Which argument of a copy says how long it is.
_LENGTH = {"di_in": 2, "di_out": 2, "di_in_rows": 3, "di_out_rows": 3, "di_rows_to_l1": 6, "asc_copy_gm2ub_align": 3,
           "asc_copy_ub2gm_align": 3, "asc_copy_l12l0a": 4, "asc_copy_l12l0b": 4, "di_results": 3, "di_to_l1": 3}
_CALL = re.compile(r"^\s*(?:asc_vf_call<.*>|(\w+))\((.*)\);\s*$")


@dataclass(frozen=True)
class Mutant:
    """``kind``: drop, unlock (a pair of locks), shift, shrink or swap; ``line``: of the unchanged text, from 1."""

    kind: str
    line: int
    what: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind} line {self.line}: {self.what}"


def _split(arguments: str) -> list[str]:
    """Arguments at the outermost level."""
    out, depth, start = [], 0, 0
    for i, c in enumerate(arguments):
        depth += (c in "([{<") - (c in ")]}>" and arguments[i - 1] != "-")
        if c == "," and depth == 0:
            out.append(arguments[start:i].strip())
            start = i + 1
    return [*out, arguments[start:].strip()]


def mutants(text: str) -> Iterator[Mutant]:
    """All of a generated file."""
    lines = text.split("\n")
    begin = next(i for i, x in enumerate(lines) if x.startswith("#include"))

    def changed(edits: dict[int, str]) -> str:
        return "\n".join(edits.get(i, x) for i, x in enumerate(lines))

    for i, x in enumerate(lines[begin:], begin):
        if "DI_BUFFER" in x or x.startswith("//"):
            continue
        if m := _SYNC.match(x):
            yield Mutant("drop", i + 1, m[1], changed({i: ""}))
        if m := _LOCK.match(x):
            close = re.compile(rf"^\s*asc_unlock\({re.escape(m[1])}\);\s*$")
            j = next((k for k in range(i + 1, len(lines)) if close.match(lines[k])), None)
            if j is not None:
                yield Mutant("unlock", i + 1, m[1], changed({i: "", j: ""}))
        for m in _PLACE.finditer(x):
            moved = f"DI_{m[1]}({m[2]}, {m[3]} + {_SHIFT[m[1]]})"
            yield Mutant("shift", i + 1, m[0], changed({i: x[: m.start()] + moved + x[m.end():]}))
        call = _CALL.match(x)
        if call is None:
            continue
        if call[1] in _LENGTH:
            arguments = _split(call[2])
            at = _LENGTH[call[1]]
            short = [*arguments[:at], f"({arguments[at]}) / 2", *arguments[at + 1:]]
            yield Mutant("shrink", i + 1, f"{call[1]}: {arguments[at]}",
                         changed({i: x[: call.start(2)] + ", ".join(short) + x[call.end(2):]}))
        places = list(_PLACE.finditer(x))
        for a, b in pairwise(places):
            if a[1] == b[1] and a[3] != b[3]:
                one, two = f"DI_{a[1]}({a[2]}, {b[3]})", f"DI_{b[1]}({b[2]}, {a[3]})"
                yield Mutant("swap", i + 1, f"{a[0]} and {b[0]}",
                             changed({i: x[: a.start()] + one + x[a.end(): b.start()] + two + x[b.end():]}))
