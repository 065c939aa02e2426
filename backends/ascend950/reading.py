"""What a kernel does, read from its text: instructions, copies and products of its cores, for a number of items.

The text is our own, printed from skeletons in ``templates`` and the headers in ``include``: statements, counted loops
and branches. It is gone through with the numbers that are known; a branch whose condition is not (it hangs on data) is
taken unless all it does is to leave. Of loops of more than ``FEW`` trips the first, the second and the last are read.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from deepinfer.errors import InternalError

INCLUDES = Path(__file__).resolve().parent / "include"
Number = int | float
Names = dict[str, Any]  # numbers of variables; element types of pointers, as text

_FUNCTION = re.compile(r"(?:__simd_vf__ inline|DI_V|DI_INLINE|__aicore__ inline|__vector__|__mix__\(1, 2\))\s+"
                       r"(?:[\w*]+\s+)*?[\w*]+\s*\b(\w+)\(")
_TEMPLATE = re.compile(r"template <([^>]*)>\s*$")
_CALL = re.compile(r"\b(asc_vf_call|asc_\w+|di_\w+)\s*(?:<(?=[\w<>, ]+>\())?")
_DECLARED = re.compile(r"(?:const\s+)?(?:u?int\d+_t|bool)\s+(\w+)\s*=\s*(.*)", re.DOTALL)
_ASSIGNED = re.compile(r"(\w+)\s*([+-]?=)\s*(?!=)(.*)", re.DOTALL)
_CAST = re.compile(r"\((?:u?int\d+_t|float|bool)\)")
_LITERAL = re.compile(r"\b(0x[0-9a-fA-F]+(?![.\w]*p)|\d+)[uUlL]+\b")
_POINTER = re.compile(r"__(?:ubuf|gm|cbuf|ca|cb|cc)__\s+(\w+)\s*\*")
FEW = 8
MOST_KNOWN = 1 << 14  # texts whose parts are kept
_FREE = ("asc_create_mask", "asc_update_mask", "asc_mask_")  # masks have a unit of their own
_SYNCS = ("asc_lock", "asc_unlock", "asc_sync", "asc_mem_bar", "asc_init", "asc_set", "asc_get", "asc_dcci",
          "asc_fill_l1")
BYTES = {"uint8_t": 1, "fp8_e4m3fn_t": 1, "fp8_e8m0_t": 1, "uint16_t": 2, "bfloat16_t": 2, "float": 4, "int32_t": 4,
         "uint32_t": 4, "int64_t": 8}


# ---- text to statements --------------------------------------------------------------------------------------------
@dataclass
class Loop:
    """``for (first; test; step)``."""

    first: str
    test: str
    step: str
    body: list[Any]


@dataclass
class Branch:
    test: str
    then: list[Any]
    other: list[Any]


@dataclass
class Function:
    """``parameters``: names with the element type of pointers, "" for numbers; ``types``: those of its template;
    ``known``: what it does, by its arguments."""

    name: str
    parameters: list[tuple[str, str]]
    types: list[str]
    body: str
    parsed: list[Any] | None = None
    known: dict[Any, Counter[str]] = field(default_factory=dict)

    def statements(self) -> list[Any]:
        if self.parsed is None:
            self.parsed = _Parser(self.body).block()
        return self.parsed


def _closed(text: str, at: int, pair: str = "()") -> int:
    """Place behind the bracket that closes the one at ``at``."""
    depth = 0
    for i in range(at, len(text)):
        depth += (text[i] == pair[0]) - (text[i] == pair[1])
        if not depth:
            return i + 1
    raise InternalError(f"a bracket is open in {text[at:at + 60]!r}")


@lru_cache(maxsize=MOST_KNOWN)
def split(text: str) -> tuple[str, ...]:
    """Parts between commas outside of all brackets."""
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        depth += (c in "([{") - (c in ")]}")
        if not depth and c == ",":
            parts.append(text[start:i])
            start = i + 1
    return tuple(p.strip() for p in (*parts, text[start:]) if p.strip())


@lru_cache(maxsize=MOST_KNOWN)
def calls_in(text: str) -> tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...]:
    """Everything that an expression calls: names, types in angle brackets, arguments."""
    out, at = [], 0
    while m := _CALL.search(text, at):
        at, types = m.end(), tuple[str, ...]()
        if text[m.end() - 1] == "<":
            stop = _closed(text, m.end() - 1, "<>")
            types, at = split(text[m.end():stop - 1]), stop
        if at < len(text) and text[at] == "(":
            stop = _closed(text, at)
            out.append((m[1], types, split(text[at + 1:stop - 1])))
            at = stop if m[1] == "asc_vf_call" else at + 1  # and what stands inside of the brackets
    return tuple(out)


class _Parser:
    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def block(self) -> list[Any]:
        out: list[Any] = []
        while self._skip() and self.text[self.at] != "}":
            out += self.statement()
        self.at += 1
        return out

    def _skip(self) -> bool:
        while self.at < len(self.text) and self.text[self.at] in " \n\t;":
            self.at += 1
        return self.at < len(self.text)

    def _bracket(self) -> str:
        start = self.text.index("(", self.at)
        self.at = _closed(self.text, start)
        return self.text[start + 1:self.at - 1]

    def statement(self) -> list[Any]:
        self._skip()
        if self.text[self.at] == "{":
            self.at += 1
            return self.block()
        word = re.match(r"\w*", self.text[self.at:])
        if word and word[0] == "for":
            first, test, step = (part.strip() for part in self._bracket().split(";"))
            return [Loop(first, test, step, self.statement())]
        if word and word[0] == "if":
            test, then, other = self._bracket(), self.statement(), list[Any]()
            if re.match(r"[\s;]*else\b", self.text[self.at:]):
                self.at = self.text.index("else", self.at) + 4
                other = self.statement()
            return [Branch(test, then, other)]
        start, depth = self.at, 0
        while self.text[self.at] != ";" or depth:
            depth += (self.text[self.at] in "({") - (self.text[self.at] in ")}")
            self.at += 1
        self.at += 1
        return [self.text[start:self.at - 1].strip()]


def functions_of(text: str) -> dict[str, list[Function]]:
    """The functions of a text, by name; overloads in order."""
    text = re.sub(r"//[^\n]*|^\s*#[^\n]*", "", text, flags=re.MULTILINE)
    out: dict[str, list[Function]] = {}
    for m in _FUNCTION.finditer(text):
        stop = _closed(text, m.end() - 1)
        start = re.compile(r"\s*\{").match(text, stop)
        if not start:
            continue
        parameters = []
        for p in split(text[m.end():stop - 1]):
            pointer = _POINTER.search(p)
            parameters.append((re.findall(r"\w+", p)[-1], pointer[1] if pointer else ""))
        template = _TEMPLATE.search(text[:m.start()])
        types = [x.split()[-1] for x in split(template[1])] if template else []
        body = text[start.end():_closed(text, start.end() - 1, "{}")]
        out.setdefault(m[1], []).append(Function(m[1], parameters, types, body))
    return out


@lru_cache(maxsize=1)
def library() -> tuple[dict[str, list[Function]], dict[str, int]]:
    """Functions of the headers, and the numbers that their enumerations name."""
    texts = [p.read_text(encoding="utf-8") for p in sorted(INCLUDES.glob("*.h"))]
    known: dict[str, list[Function]] = {}
    names = {"true": 1, "false": 0, "sizeof": 0}
    for text in texts:
        for name, found in functions_of(text).items():
            known.setdefault(name, []).extend(found)
        for inside in re.findall(r"enum \w* ?\{([^}]*)\}", text):
            value = -1
            for one in split(inside):
                name, _, given = one.partition("=")
                value = int(given) if given else value + 1
                names[name.strip()] = value
    return known, names


# ---- numbers -------------------------------------------------------------------------------------------------------
@lru_cache(maxsize=MOST_KNOWN)
def _compiled(text: str) -> Any:
    """A C expression of integers as Python code; None where it is none."""
    t = _LITERAL.sub(r"\1", _CAST.sub("", text.strip()))
    for there, here in (("asc_get_block_idx()", "0"), ("asc_get_block_num()", "1"), ("asc_get_sub_block_id()", "CORE"),
                        ("&&", " and "), ("||", " or "), ("/", "//")):
        t = t.replace(there, here)
    try:
        return compile(_chosen(re.sub(r"!(?!=)", " not ", t)).strip(), "kernel", "eval")
    except (SyntaxError, ValueError):
        return None


def _chosen(text: str) -> str:
    """The same with conditional expressions of Python."""
    parts = _ternary(text)
    if parts:
        test, then, other = map(_chosen, parts)
        return f"(({then}) if ({test}) else ({other}))"
    at = text.find("(")
    if "?" not in text or at < 0:
        return text
    stop = _closed(text, at)
    return f"{text[:at]}({_chosen(text[at + 1:stop - 1])}){_chosen(text[stop:])}"


@lru_cache(maxsize=MOST_KNOWN)
def _ternary(text: str) -> tuple[str, str, str] | None:
    """Condition and both values of ``a ? b : c``."""
    depth, asked = 0, -1
    for i, c in enumerate(text):
        depth += (c in "([") - (c in ")]")
        if not depth and c == "?" and asked < 0:
            asked = i
        if not depth and c == ":" and asked >= 0:
            return text[:asked], text[asked + 1:i], text[i + 1:]
    return None


_BUILT_IN: Names = {"__builtins__": {}, "di_min64": min, "di_max64": max, "di_up64": lambda a, b: -(-a // b)}


def number(text: str, names: Names) -> Number | None:
    """The value of an expression; None where something of it is not known."""
    code = _compiled(text)
    if code is None:
        return None
    try:
        value = eval(code, _BUILT_IN, names)
    except Exception:  # anything that is no number here
        return None
    return value if isinstance(value, int | float) else None


# ---- reading -------------------------------------------------------------------------------------------------------
class _Leave(Exception):
    """``continue``, ``break`` or ``return``."""


@dataclass
class Reader:
    """Counts of ``did`` (twin/run.py) of one core that executes a kernel. ``given``: numbers of variables whatever the
    text sets them to."""

    functions: Mapping[str, list[Function]]
    given: Mapping[str, Number]
    did: Counter[str] = field(default_factory=Counter)
    in_vf: bool = False

    def run(self, function: Function, names: Names) -> None:
        with suppress(_Leave):
            self.block(function.statements(), names)

    def block(self, statements: list[Any], names: Names) -> None:
        for s in statements:
            if isinstance(s, Loop):
                self.loop(s, names)
            elif isinstance(s, Branch):
                self.branch(s, names)
            else:
                self.statement(s, names)

    def branch(self, s: Branch, names: Names) -> None:
        known = number(s.test, names)
        if known is None and s.then and all(x in ("continue", "return", "break") for x in s.then):
            known = 0
        self.block(s.then if known is None or known else s.other, names)

    def loop(self, s: Loop, names: Names) -> None:
        self.statement(s.first, names)
        variable = re.findall(r"(\w+)\s*=", s.first)[0]
        first, step = names.get(variable), 1 if "++" in s.step else number(re.split(r"\+=|\+", s.step)[-1], names)
        stops = [number(limit, names) for limit in re.findall(r"<([^&]*)", s.test.replace("<=", "< 1 +"))]
        if not isinstance(first, int | float) or not step or stops[:1] in ([], [None]):
            raise InternalError(f"how often does a loop run: for ({s.first}; {s.test}; {s.step})")
        trips = min(max(0, _up(stop - first, int(step))) for stop in stops if stop is not None)
        if trips <= FEW:
            for i in range(trips):
                self._trip(s, names, variable, int(first) + i * int(step))
            return
        self._trip(s, names, variable, int(first))
        before = Counter(self.did)
        self._trip(s, names, variable, int(first) + int(step))
        for name in self.did:
            self.did[name] += (self.did[name] - before[name]) * (trips - 3)
        self._trip(s, names, variable, int(first) + (trips - 1) * int(step))

    def _trip(self, s: Loop, names: Names, variable: str, value: int) -> None:
        names[variable] = value
        with suppress(_Leave):
            self.block(s.body, names)

    def statement(self, s: str, names: Names) -> None:
        if s in ("continue", "break", "return"):
            raise _Leave
        declared = _DECLARED.match(s)
        for part in split(f"{declared[1]} = {declared[2]}") if declared else (s,):
            assigned = _ASSIGNED.match(part)
            text = assigned[3] if assigned else part.removeprefix("return")
            chosen = _ternary(text)
            if chosen:
                known = number(chosen[0], names)
                text = text if known is None else chosen[1 if known else 2]
            self.calls(text, names)
            if assigned:
                value = number(assigned[3], names)
                old = names.get(assigned[1])
                if assigned[2] != "=":
                    sign = 1 if assigned[2] == "+=" else -1
                    value = old + sign * value if value is not None and isinstance(old, int | float) else None
                names[assigned[1]] = self.given.get(assigned[1], value)
        for name in re.findall(r"(\w+)\+\+|\+\+(\w+)", s):
            v = name[0] or name[1]
            if isinstance(names.get(v), int | float):
                names[v] += 1
        if s.startswith("return"):
            raise _Leave

    # ---- calls -----------------------------------------------------------------------------------------------------
    def calls(self, text: str, names: Names) -> None:
        for name, types, arguments in calls_in(text):
            if name == "asc_vf_call":
                self._vector_function(types, arguments, names)
            else:
                self._call(name, types, arguments, names)

    def _vector_function(self, types: tuple[str, ...], arguments: tuple[str, ...], names: Names) -> None:
        self.did["functions"] += 1
        name, _, inside = types[0].partition("<")
        self.in_vf = True
        self._into(name, split(inside.removesuffix(">")), arguments, names)
        self.in_vf = False

    def _call(self, name: str, types: tuple[str, ...], arguments: tuple[str, ...], names: Names) -> None:
        if name.startswith("di_"):
            if name in self.functions:
                self._into(name, types, arguments, names)
            return
        if name.startswith((*_FREE, *_SYNCS)):
            return
        if self.in_vf:
            self.did["instructions"] += 2 if name == "asc_loadalign_deintlv" else 1
            return
        make = COPIES.get(name)
        if make is None:
            raise InternalError(f"nobody says what {name} costs")
        numbers = [number(a, names) or 0 for a in arguments]
        what, amount = make(numbers, BYTES.get(self._type(arguments[1], names), 1))
        self.did["copies"] += what != "products"
        self.did[what] += int(amount)

    def _type(self, argument: str, names: Names) -> str:
        """Element type of a pointer."""
        cast = re.match(r"\(" + _POINTER.pattern + r"\)", argument) or re.match(r"DI_\w+\((\w+),", argument)
        if cast:
            found = cast[1]
        else:
            found = next((names[x] for x in re.findall(r"\w+", argument)[:1] if isinstance(names.get(x), str)), "")
        return str(names.get(found, found))

    def _into(self, name: str, types: tuple[str, ...], arguments: tuple[str, ...], names: Names) -> None:
        found = self.functions.get(name)
        if not found:
            raise InternalError(f"there is no function {name}")
        kinds = [self._type(a, names) for a in arguments]
        fits = [f for f in found if len(f.parameters) == len(arguments) and all(
            not want or want in f.types or not have or want == have
            for (_, want), have in zip(f.parameters, kinds, strict=True))] or found[:1]
        f = fits[0]
        inner: Names = dict(library()[1]) | {t: names.get(x, x) for t, x in zip(f.types, types, strict=False)}
        for (p, want), argument, have in zip(f.parameters, arguments, kinds, strict=False):
            if want:
                inner[p] = have or inner.get(want, want)
                if want in f.types and have:
                    inner.setdefault(want, have)
            else:
                inner[p] = number(argument, names)
        key = (self.in_vf, *(inner.get(x) for x in (*(p for p, _ in f.parameters), *f.types)))
        if key not in f.known:
            alone = Reader(self.functions, {}, in_vf=self.in_vf)
            alone.run(f, inner)
            f.known[key] = alone.did
        self.did.update(f.known[key])


def _up(n: Number, by: int) -> int:
    return int(-(-n // by))


# What a call outside of vector functions moves, from its arguments and the bytes of an element of its source.
COPIES: dict[str, Callable[[list[Number], int], tuple[str, Number]]] = {
    "asc_copy_gm2ub_align": lambda a, _: ("bytes_in", a[2] * a[3]),
    "asc_copy_ub2gm_align": lambda a, _: ("bytes_out", a[2] * a[3]),
    "asc_copy_ub2l1": lambda a, _: ("bytes_to_l1", a[2] * a[3] * 32),
    "asc_copy_gm2l1_nd2nz": lambda a, size: ("bytes_in", a[4] * a[5] * size),
    "asc_copy_l12l0a": lambda a, _: ("bytes_to_l0", a[4] * a[5] * 512),
    "asc_copy_l12l0b": lambda a, _: ("bytes_to_l0", a[4] * a[5] * 512),
    "asc_copy_l12l0a_mx": lambda a, _: ("bytes_to_l0", a[4] * a[5] * 32),
    "asc_copy_l12l0b_mx": lambda a, _: ("bytes_to_l0", a[4] * a[5] * 32),
    "asc_copy_l0c2ub": lambda a, _: ("bytes_of_results", a[2] * a[3] * 4),
    "asc_mmad": lambda a, size: ("products", _up(a[3], 16) * _up(a[4], 32 // size) * _up(a[5], 16)),
    "asc_mmad_mx": lambda a, size: ("products", _up(a[3], 16) * _up(a[4], 32 // size) * _up(a[5], 16)),
}


class Kernel:
    """The text of a kernel. Raises InternalError where it is not one of the texts that can be read."""

    def __init__(self, text: str, function: str) -> None:
        own = functions_of(text)
        self.functions, self.main = {**library()[0], **own}, own[function][0]

    def did(self, core: int, given: Mapping[str, Number]) -> Counter[str]:
        """What a core does in a launch of one block: ``core`` 0 is the first vector core, 1 the second, -1 the cube
        core. ``given``: numbers that the text loads from memory."""
        reader = Reader(self.functions, given)
        names: Names = dict(library()[1]) | {"ASC_IS_AIC": int(core < 0), "ASC_IS_AIV": int(core >= 0), "CORE": core}
        names |= {p: kind for p, kind in self.main.parameters if kind} | dict(given)
        reader.run(self.main, names)
        return reader.did
