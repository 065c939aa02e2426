"""Where in a JSON schema the part stands that cannot be compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "allOf", "oneOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")
_SHARED = ("$defs", "definitions")
_MOST_ATTEMPTS = 100


def faulty_place(schema: Any, error_of: Callable[[Any], str | None]) -> tuple[str, str | None]:
    """The deepest part of a schema that fails by itself, as a path such as ``.properties.name``, and its error.

    ``error_of``: compiles a schema; None where it can be. After some attempts the place found so far is taken.
    """
    shared = {name: schema[name] for name in _SHARED if isinstance(schema, dict) and name in schema}
    path, message, here, attempts = "", None, schema, 0
    while True:
        for step, part in _parts(here):
            attempts += 1
            if attempts > _MOST_ATTEMPTS:
                return path, message
            inner = error_of({**shared, **part} if isinstance(part, dict) else part)
            if inner is not None:
                path, message, here = path + step, inner, part
                break
        else:
            return path, message


def _parts(schema: Any) -> Iterator[tuple[str, Any]]:
    """The schemas directly inside a schema, with their steps."""
    if not isinstance(schema, dict):
        return
    for key in _SHARED + tuple(k for k in _MAPS if k not in _SHARED):
        if isinstance(schema.get(key), dict):
            yield from ((f".{key}.{name}", part) for name, part in schema[key].items())
    for key in _LISTS:
        if isinstance(schema.get(key), list):
            yield from ((f".{key}[{place}]", part) for place, part in enumerate(schema[key]))
    for key in _SINGLE:
        if isinstance(schema.get(key), dict):
            yield f".{key}", schema[key]
