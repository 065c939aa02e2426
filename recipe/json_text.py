"""JSON as the official serializer reads and writes it: strict when read, two fixed styles when written."""

from __future__ import annotations

import json
import math
from decimal import Decimal
from typing import Any, NoReturn

LOWEST_INTEGER = -(2**63)
HIGHEST_INTEGER = 2**64 - 1
LONGEST_INTEGER = len(str(LOWEST_INTEGER))
DEEPEST_NESTING = 127


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text.

    Integers beyond 64 bit and `-0` become floats; a later duplicate key wins in the place of the first.

    Raises:
        ValueError: not JSON, a number beyond the range of a double, a lone surrogate, more than 127 levels.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8")
    try:
        value = json.loads(text, parse_int=_integer, parse_float=_float, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("recursion limit exceeded") from None
    check_value(value)
    return value


def python_style(value: Any) -> str:
    """JSON with `, ` and `: `, non-ASCII kept, floats in Python's shortest form: the style of prompts."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def compact_style(value: Any) -> str:
    """JSON without spaces, with the float spelling of the official serializer: the style of constraints."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{quoted(key)}:{compact_style(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(compact_style, value)) + "]"
    if isinstance(value, float):
        return _shortest_float(value)
    return quoted(value) if isinstance(value, str) else json.dumps(value)


def quoted(text: str) -> str:
    """`text` as a JSON string; only what JSON demands is escaped."""
    return json.dumps(text, ensure_ascii=False)


def escaped(text: str) -> str:
    """The inside of the JSON string for `text`; escapes of a concatenation are the concatenated escapes."""
    return quoted(text)[1:-1]


def _integer(digits: str) -> int | float:
    if digits == "-0":
        return -0.0
    value = int(digits) if len(digits) <= LONGEST_INTEGER else HIGHEST_INTEGER + 1
    return value if LOWEST_INTEGER <= value <= HIGHEST_INTEGER else _float(digits)


def _float(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError("number out of range")
    return value


def _no_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")


def check_value(value: Any) -> None:
    """Refuse what Python takes for JSON and others do not.

    Raises:
        ValueError: more than 127 levels, a lone surrogate, a number that is not finite, a value of another type.
    """
    level, depth = [value], 0
    while level:
        below: list[Any] = []
        deeper = False
        for item in level:
            if isinstance(item, str):
                check_text(item)
            elif isinstance(item, dict):
                deeper = True
                for key in item:
                    check_text(key if isinstance(key, str) else _no_constant("a key that is no string"))
                below.extend(item.values())
            elif isinstance(item, list):
                deeper = True
                below.extend(item)
            elif isinstance(item, float):
                if not math.isfinite(item):
                    raise ValueError(f"{item} is not JSON")
            elif item is not None and not isinstance(item, int):
                raise ValueError(f"{type(item).__name__} is not JSON")
        depth += deeper
        if depth > DEEPEST_NESTING:
            raise ValueError("recursion limit exceeded")
        level = below


def check_text(text: str) -> None:
    """Refuse a lone surrogate, which is not text in any UTF.

    Raises:
        ValueError: naming its position.
    """
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(f"lone surrogate at character {error.start}") from None


def _shortest_float(value: float) -> str:
    """The shortest digits that read back equal: plain from 1e-5 to below 1e16, else `1.5e-7`, `1e16`."""
    if value == 0:
        return "-0.0" if math.copysign(1, value) < 0 else "0.0"
    sign, digits, exponent = Decimal(repr(value)).normalize().as_tuple()
    assert isinstance(exponent, int)
    point = len(digits) + exponent
    figures = "".join(map(str, digits))
    minus = "-" if sign else ""
    if 0 < point <= 16:
        whole = figures[:point].ljust(point, "0")
        return f"{minus}{whole}.{figures[point:] or '0'}"
    if -5 < point <= 0:
        return f"{minus}0.{'0' * -point}{figures}"
    fraction = f".{figures[1:]}" if len(figures) > 1 else ""
    return f"{minus}{figures[0]}{fraction}e{point - 1}"
