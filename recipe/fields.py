"""Reading the fields of a request body; every mistake names its place, what was found and what is allowed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from deepinfer.recipe.errors import SchemaError
from deepinfer.recipe.json_text import check_text, check_value, parse_json


class Field:
    """One value of the body with its path, such as `messages[1].content`."""

    def __init__(self, value: Any, path: str = "") -> None:
        self.value = value
        self.path = path

    def wrong(self, allowed: str) -> SchemaError:
        """The error for a value that is not `allowed`."""
        where = f"{self.path}: " if self.path else ""
        return SchemaError(f"invalid request body: {where}found {_shown(self.value)}, expected {allowed}")

    def __contains__(self, key: str) -> bool:
        return isinstance(self.value, dict) and self.value.get(key) is not None

    def object(self) -> Field:
        """This field, checked to be an object."""
        if not isinstance(self.value, dict):
            raise self.wrong("an object")
        return self

    def optional(self, key: str) -> Field | None:
        """A member; None where it is missing or null."""
        value = self.object().value.get(key)
        return None if value is None else Field(value, f"{self.path}.{key}" if self.path else key)

    def required(self, key: str) -> Field:
        """A member that must be there."""
        found = self.optional(key)
        if found is None:
            where = f"{self.path}: " if self.path else ""
            raise SchemaError(f"invalid request body: {where}missing field `{key}`")
        return found

    def items(self) -> Iterator[Field]:
        """The elements of a list."""
        if not isinstance(self.value, list):
            raise self.wrong("a list")
        return (Field(item, f"{self.path}[{index}]") for index, item in enumerate(self.value))

    def text(self) -> str:
        """A string without lone surrogates."""
        if not isinstance(self.value, str):
            raise self.wrong("a string")
        try:
            check_text(self.value)
        except ValueError as error:
            raise SchemaError(f"invalid request body: {self.path}: {error}") from None
        return self.value

    def boolean(self) -> bool:
        if not isinstance(self.value, bool):
            raise self.wrong("true or false")
        return self.value

    def number(self) -> float:
        if isinstance(self.value, bool) or not isinstance(self.value, int | float):
            raise self.wrong("a number")
        return float(self.value)

    def integer(self, bits: int) -> int:
        """A whole number from 0 to below 2**bits."""
        if isinstance(self.value, bool) or not isinstance(self.value, int) or not 0 <= self.value < 2**bits:
            raise self.wrong(f"a whole number in [0, 2^{bits})")
        return self.value

    def word(self, allowed: Iterable[str]) -> str:
        """One of a closed set of words."""
        found = self.text()
        choices = list(allowed)
        if found not in choices:
            listed = ", ".join(f"`{choice}`" for choice in choices)
            raise SchemaError(
                f"invalid request body: {self.path}: unknown variant `{found}`, expected one of {listed}"
            )
        return found

    # shorthands for optional members

    def text_at(self, key: str) -> str | None:
        found = self.optional(key)
        return None if found is None else found.text()

    def flag_at(self, key: str) -> bool | None:
        found = self.optional(key)
        return None if found is None else found.boolean()

    def number_at(self, key: str) -> float | None:
        found = self.optional(key)
        return None if found is None else found.number()

    def integer_at(self, key: str, bits: int) -> int | None:
        found = self.optional(key)
        return None if found is None else found.integer(bits)

    def word_at(self, key: str, allowed: Iterable[str]) -> str | None:
        found = self.optional(key)
        return None if found is None else found.word(allowed)

    def object_at(self, key: str) -> dict[str, Any] | None:
        found = self.optional(key)
        return None if found is None else dict(found.object().value)


def read_body(body: Mapping[str, Any] | str | bytes) -> Field:
    """The body of a request as a field.

    Raises:
        SchemaError: it is not a JSON object.
    """
    try:
        if isinstance(body, Mapping):
            check_value(dict(body))
            return Field(dict(body))
        value = parse_json(body)
    except (ValueError, UnicodeDecodeError) as error:
        raise SchemaError(f"invalid request body: not JSON: {error}") from None
    return Field(value).object()


def _shown(value: Any) -> str:
    """A value for a message: short, and without the user's text beyond its first characters."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = type(value).__name__
    return text if len(text) <= 40 else text[:40] + "..."
