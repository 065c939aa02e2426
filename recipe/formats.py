"""What the shape of the answer means for its request and for its reading."""

from __future__ import annotations

from deepinfer.recipe.conversation import (
    Assistant,
    InitialStage,
    Message,
    Reminder,
    ResponseFormat,
    System,
    ToolResult,
    User,
    text_of,
)
from deepinfer.recipe.errors import ConversionError


def check_format(response_format: ResponseFormat, messages: list[Message], refusal: str) -> None:
    """Refuse json_object where no message has the word json."""
    if response_format.kind == "json_object" and not any("json" in _words(each).lower() for each in messages):
        raise ConversionError(refusal)


def initial_stage(messages: list[Message], thinking: bool) -> InitialStage | None:
    """Where the answer's parsing starts: None for chat mode, a continuation after a prefix."""
    if not thinking:
        return None
    last = messages[-1] if messages else None
    if isinstance(last, Assistant) and last.prefix:
        return InitialStage.CONTENT_CONTINUATION if last.content else InitialStage.REASONING_CONTINUATION
    return InitialStage.REASONING_START


def _words(message: Message) -> str:
    if isinstance(message, Assistant):
        return message.content
    if isinstance(message, Reminder):
        return message.text
    return text_of(message.content) if isinstance(message, System | User | ToolResult) else ""
