"""What a request may ask of the form of its answer, with vLLM's names."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from deepinfer.errors import RequestError

WHERE = "structured_outputs"
KINDS = ("json", "regex", "choice", "grammar", "json_object")
LONGEST_TEXT = 1 << 20  # bytes of a schema, pattern or grammar


@dataclass(frozen=True, kw_only=True)
class StructuredOutputs:
    """The form of an answer; exactly one of the first five is given.

    Args:
        json: a JSON schema, as text or as what it parses to.
        regex: a regular expression (Rust's syntax, no look-around) that the whole answer matches.
        choice: texts, of which the answer is one.
        grammar: a context-free grammar, in Lark's syntax or in GBNF, the EBNF of llama.cpp.
        json_object: True: any JSON object.
        start_after: token ids; the form begins behind the first of these that is generated, for instance behind the
            end of the reasoning. Empty: with the first token.
    """

    json: str | bool | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Iterable[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    start_after: Iterable[int] = ()

    def __post_init__(self) -> None:
        if self.json_object is not None and not isinstance(self.json_object, bool):
            raise RequestError("True or False is needed", where=f"{WHERE}.json_object", found=repr(self.json_object))
        given = [kind for kind in KINDS if getattr(self, kind) is not None and not self._is_off(kind)]
        if len(given) != 1:
            raise RequestError("exactly one form of the answer is needed", where=WHERE, found=given, allowed=KINDS)
        for name in ("regex", "grammar"):
            if getattr(self, name) is not None:
                _require_text(getattr(self, name), f"{WHERE}.{name}")
        if self.choice is not None:
            object.__setattr__(self, "choice", _texts(self.choice))
        object.__setattr__(self, "start_after", _ids(self.start_after))
        where = f"{WHERE}.{self.kind}"
        try:
            size = len(self.text.encode())
        except UnicodeEncodeError:
            raise RequestError("the text holds a lone surrogate", where=where,
                               next_step="decode the text as UTF-8") from None
        if size > LONGEST_TEXT:
            raise RequestError("the description of the answer is too long", where=where, found=f"{size} bytes",
                               allowed=f"at most {LONGEST_TEXT} bytes")

    def _is_off(self, kind: str) -> bool:
        return kind == "json_object" and self.json_object is False

    @property
    def kind(self) -> str:
        """Which of `KINDS` is given."""
        return next(kind for kind in KINDS if getattr(self, kind) is not None and not self._is_off(kind))

    @property
    def text(self) -> str:
        """The description as one text; equal descriptions have equal texts."""
        if self.kind == "json":
            return self.json if isinstance(self.json, str) else _json_text(self.json)
        if self.kind == "choice":
            return _json_text(list(self.choice or ()))
        return (self.regex or self.grammar or "") if self.kind != "json_object" else '{"type":"object"}'


def structured_outputs(value: Any) -> StructuredOutputs | None:
    """A value of ``SamplingParams.structured_outputs``: None, the object, or a mapping with its fields."""
    if value is None or isinstance(value, StructuredOutputs):
        return value
    if not isinstance(value, Mapping):
        raise RequestError("a mapping is needed", where=WHERE, found=type(value).__name__, allowed=KINDS)
    known = [f.name for f in fields(StructuredOutputs)]
    unknown = [name for name in value if name not in known]
    if unknown:
        raise RequestError("unknown field", where=WHERE, found=unknown[0], allowed=known)
    given = {name: item for name, item in value.items() if item is not None}
    return StructuredOutputs(**given)


def _require_text(value: Any, where: str) -> None:
    if not isinstance(value, str) or not value:
        raise RequestError("a text with at least one character is needed", where=where, found=repr(value))


def _texts(value: Any) -> tuple[str, ...]:
    where = f"{WHERE}.choice"
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise RequestError("a list of texts is needed", where=where, found=repr(value))
    texts = tuple(value)
    if not texts:
        raise RequestError("there is nothing to choose from", where=where, next_step="list at least one text")
    for place, text in enumerate(texts):
        _require_text(text, f"{where}[{place}]")
    return texts


def _ids(value: Any) -> tuple[int, ...]:
    where = f"{WHERE}.start_after"
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise RequestError("a list of token ids is needed", where=where, found=repr(value))
    ids = tuple(value)
    wrong = [i for i in ids if isinstance(i, bool) or not isinstance(i, int) or i < 0]
    if wrong:
        raise RequestError("token ids are whole numbers from 0 on", where=where, found=repr(wrong[0]))
    return ids


def _json_text(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError("the schema is no JSON", where=f"{WHERE}.json", found=str(error)) from None
