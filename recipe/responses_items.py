"""The input items of the Responses API as conversation messages."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from deepinfer.recipe.conversation import (
    BLANK_LINE,
    Assistant,
    Content,
    ImageSource,
    Message,
    Piece,
    System,
    ToolCall,
    ToolResult,
    User,
    joined,
    text_of,
)
from deepinfer.recipe.errors import ConversionError
from deepinfer.recipe.fields import Field
from deepinfer.recipe.image_input import DETAILS, file_id_refused, image_from_url, image_refused
from deepinfer.recipe.json_text import compact_style
from deepinfer.recipe.responses_tools import qualified

ROLES = ("user", "system", "developer", "assistant")
UNSUPPORTED_DOCUMENT = "[Unsupported Document]"
CALLS = ("function_call", "custom_tool_call")
OUTPUTS = ("function_call_output", "custom_tool_call_output")


@dataclass
class _Group:
    """Calls that stand together, and the outputs that have come for them."""

    calls: list[ToolCall] = field(default_factory=list)
    outputs: dict[str, Content] = field(default_factory=dict)


def convert_items(items: list[Field]) -> list[Message]:
    """The items in order; reasoning, text and calls of one assistant turn become one message.

    Raises:
        SchemaError: an item lacks what its type needs.
        ConversionError: an unanswered call, an output without a call, a repeated id, an image out of place.
    """
    if not items:
        raise ConversionError("Input items array must not be empty")
    return _Reader().read(items)


class _Reader:
    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.pending: list[str] = []
        self.resolved: set[str] = set()
        self.group = _Group()

    def read(self, items: list[Field]) -> list[Message]:
        for index, item in enumerate(items):
            kind = item.object().text_at("type") or "message"
            if kind in CALLS:
                self._call(item, index, kind)
            elif kind in OUTPUTS:
                self._output(item, index)
            elif kind == "message":
                self._close_group()
                self._message(item, index)
            elif kind == "reasoning":
                self._close_group()
                self._reasoning(item)
        self._close_group()
        return self.messages

    def _close_group(self) -> None:
        if self.pending:
            raise ConversionError(f"No tool output found for tool call {self.pending[0]}.")
        if not self.group.calls:
            return
        calls, outputs = self.group.calls, self.group.outputs
        self.group = _Group()
        turn = self._assistant()
        self.messages[-1] = replace(turn, calls=turn.calls + tuple(calls))
        self.messages.extend(ToolResult(outputs[call.id], call.id) for call in calls)

    def _assistant(self) -> Assistant:
        """The open assistant turn, which is then the last message."""
        last = self.messages[-1] if self.messages else None
        if isinstance(last, Assistant):
            return last
        turn = Assistant()
        self.messages.append(turn)
        return turn

    def _call(self, item: Field, index: int, kind: str) -> None:
        call_id = _call_id(item, index)
        if call_id in self.pending or call_id in self.resolved:
            raise ConversionError(f"Duplicate 'call_id': {call_id}.")
        name = item.required("name").text()
        if kind == "function_call":
            name = qualified(item.text_at("namespace"), name)
            arguments = item.required("arguments").text()
        else:
            arguments = compact_style({"input": item.required("input").text()})
        self.pending.append(call_id)
        self.group.calls.append(ToolCall(call_id, name, arguments))

    def _output(self, item: Field, index: int) -> None:
        call_id = _call_id(item, index)
        if call_id in self.resolved:
            raise ConversionError(f"Duplicate tool output for call_id: {call_id}.")
        if call_id not in self.pending:
            raise ConversionError(f"No tool call found for tool output with call_id {call_id}.")
        self.pending.remove(call_id)
        self.resolved.add(call_id)
        output = item.optional("output")
        self.group.outputs[call_id] = () if output is None else _content(output, f".input[{index}]")
        if not self.pending:
            self._close_group()

    def _message(self, item: Field, index: int) -> None:
        role = item.required("role").word(ROLES)
        content = _content(item.required("content"), f".input[{index}]")
        if role == "user":
            self.messages.append(User(content))
        elif role == "assistant":
            if any(isinstance(piece, ImageSource) for piece in content):
                raise image_refused(role)
            self._assistant_text(text_of(content))
        else:
            self.messages.append(System(content))

    def _assistant_text(self, text: str) -> None:
        last = self.messages[-1] if self.messages else None
        if not isinstance(last, Assistant) or last.calls:
            self.messages.append(Assistant(text))
        elif text:
            self.messages[-1] = replace(
                last, content=last.content + BLANK_LINE + text if last.content else text
            )

    def _reasoning(self, item: Field) -> None:
        parts = item.optional("content")
        text = "\n".join(part.required("text").text() for part in parts.items()) if parts else ""
        if not text:
            return
        last = self.messages[-1] if self.messages else None
        if not isinstance(last, Assistant) or last.content or last.calls:
            last = Assistant()
            self.messages.append(last)
        earlier = f"{last.reasoning}\n" if last.reasoning is not None else ""
        self.messages[-1] = replace(last, reasoning=earlier + text)


def _call_id(item: Field, index: int) -> str:
    call_id = item.required("call_id").text()
    if not call_id:
        raise ConversionError(
            f"Invalid 'input[{index}].call_id': empty string. Expected a string with minimum length 1, "
            "but got an empty string instead."
        )
    return call_id


def _content(content: Field, path: str) -> Content:
    if isinstance(content.value, str):
        return (content.text(),)
    if not isinstance(content.value, list):
        raise content.wrong("a string or a list of parts")
    pieces: list[Piece] = []
    for part in content.items():
        kind = part.required("type").text()
        if kind in ("input_text", "output_text", "text"):
            pieces.append(part.required("text").text())
        elif kind == "input_image":
            pieces.append(_image(part, path))
        elif kind == "input_file":
            pieces.append(UNSUPPORTED_DOCUMENT)
        else:
            raise ConversionError("Unsupported content block")
    return joined(pieces)


def _image(part: Field, path: str) -> ImageSource:
    url, file_id = part.text_at("image_url"), part.text_at("file_id")
    if url and file_id is not None:
        raise ConversionError(f"{path}: input_image cannot have both image_url and file_id")
    if file_id is not None:
        raise file_id_refused(path)
    if not url:
        raise ConversionError(f"{path}: input_image must have image_url or file_id")
    return image_from_url(url, part.word_at("detail", DETAILS), path)
