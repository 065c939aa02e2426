"""The first place where two JSON values differ."""

from __future__ import annotations

from typing import Any

_AROUND = 60


def first_difference(found: Any, wanted: Any, path: str = "") -> str | None:
    """A sentence that names the place and both values; None where the values are equal."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        for key in [*wanted, *(key for key in found if key not in wanted)]:
            where = f"{path}.{key}" if path else str(key)
            if key not in found:
                return f"{where}: missing; expected {_short(wanted[key])}"
            if key not in wanted:
                return f"{where}: unexpected {_short(found[key])}"
            difference = first_difference(found[key], wanted[key], where)
            if difference:
                return difference
        return None
    if isinstance(found, list) and isinstance(wanted, list):
        for place, (left, right) in enumerate(zip(found, wanted, strict=False)):
            difference = first_difference(left, right, f"{path}[{place}]")
            if difference:
                return difference
        if len(found) != len(wanted):
            longer, what = (found, "unexpected") if len(found) > len(wanted) else (wanted, "missing")
            rest = longer[min(len(found), len(wanted))]
            return f"{path}: {len(found)} elements, expected {len(wanted)}; {what} {_short(rest)}"
        return None
    if isinstance(found, str) and isinstance(wanted, str) and found != wanted:
        shorter = min(len(found), len(wanted))
        place = next((at for at in range(shorter) if found[at] != wanted[at]), shorter)
        start = max(0, place - _AROUND // 2)
        return (
            f"{path}: from character {place}: {found[start : start + _AROUND]!r}, "
            f"expected {wanted[start : start + _AROUND]!r}"
        )
    same_kind = isinstance(found, bool) == isinstance(wanted, bool)
    return None if same_kind and found == wanted else f"{path}: {_short(found)}, expected {_short(wanted)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 2 * _AROUND else text[: 2 * _AROUND] + "..."
