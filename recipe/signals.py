"""What parsing an answer yields, before any API gives it a form."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeAlias

Logprobs: TypeAlias = list[dict[str, Any]]


@dataclass
class ReasoningText:
    text: str
    logprobs: Logprobs = field(default_factory=list)


@dataclass
class ContentText:
    text: str
    logprobs: Logprobs = field(default_factory=list)


@dataclass
class CallBegan:
    index: int
    name: str


class Part(Enum):
    """Which part of the arguments a piece belongs to."""

    NAME_BEGIN = "name begin"
    NAME = "name"
    VALUE_BEGIN = "value begin"
    VALUE = "value"
    VALUE_END = "value end"
    END = "end"


@dataclass
class CallPiece:
    """A piece of a call's arguments.

    Attributes:
        json: what it adds to the arguments as JSON text.
        raw: for NAME and VALUE, the model's own characters.
    """

    index: int
    part: Part
    json: str
    raw: str = ""


Signal: TypeAlias = ReasoningText | ContentText | CallBegan | CallPiece


@dataclass(frozen=True)
class Repair:
    """One correction that repair mode made to a call of the model."""

    call: int
    kind: str
    detail: str
