"""The content blocks of the Messages API as conversation messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deepinfer.recipe.conversation import (
    BLANK_LINE,
    Assistant,
    Content,
    ImageSource,
    Message,
    Piece,
    System,
    Tool,
    ToolCall,
    ToolResult,
    ToolsAdded,
    User,
    joined,
    text_of,
)
from deepinfer.recipe.errors import ConversionError
from deepinfer.recipe.fields import Field
from deepinfer.recipe.image_input import file_id_refused, image_from_base64, image_from_url, image_refused
from deepinfer.recipe.json_text import python_style
from deepinfer.recipe.options import REJECT

BLOCKS = (
    "text",
    "image",
    "document",
    "thinking",
    "server_tool_use",
    "tool_use",
    "tool_result",
    "web_search_tool_result",
    "tool_addition",
)
RESULT_BLOCKS = ("text", "image", "document", "tool_reference")
SERVER_BLOCKS = ("server_tool_use", "web_search_tool_result")
BILLING_HEADER = "x-anthropic-billing-header"
PAIR_RULE = "Each `tool_use` block must have a corresponding `tool_result` block in the next message."


@dataclass
class RawMessage:
    """A message whose blocks have been read but not yet placed; `blocks` is a list of (type, block)."""

    role: str
    text: str | None
    blocks: list[tuple[str, Field]]


def read_messages(root: Field) -> list[RawMessage]:
    """The `messages` of a request.

    Raises:
        SchemaError: a message or a block of an unknown form.
    """
    raws: list[RawMessage] = []
    for field in root.required("messages").items():
        role = field.required("role").word(("user", "assistant", "system"))
        content = field.required("content")
        if isinstance(content.value, str):
            raws.append(RawMessage(role, content.text(), []))
            continue
        if not isinstance(content.value, list):
            raise content.wrong("a string or a list of blocks")
        blocks = [(block.required("type").word(BLOCKS), block) for block in content.items()]
        raws.append(RawMessage(role, None, blocks))
    return raws


class MessagesReader:
    """Converts the messages of one request; holds the tool uses that wait for their results."""

    def __init__(self, tools: Sequence[Tool], web_search: str) -> None:
        self.deferred = {tool.name: tool for tool in tools if tool.deferred}
        self.web_search = web_search
        self.waiting: list[str] = []
        self.messages: list[Message] = []

    def convert(self, root: Field, raws: list[RawMessage]) -> list[Message]:
        """All messages in order.

        Raises:
            ConversionError: results without uses or the reverse, blocks in the wrong role, images out of place.
        """
        if not raws:
            raise ConversionError("messages: at least one message is required")
        system = root.optional("system")
        if system is not None:
            self.messages.append(System(_system_text(system)))
        for index, raw in enumerate(raws):
            if raw.text is not None:
                self._require_results(index)
                self.messages.append(_text_message(raw.role, raw.text))
            elif not raw.blocks:
                raise ConversionError(f"messages.{index}: all messages must have non-empty content")
            elif raw.role == "assistant":
                self._assistant(index, raw.blocks)
            elif raw.role == "user":
                self._user(index, raw.blocks)
            else:
                self._system(index, raw.blocks)
        if self.waiting:
            raise ConversionError(self._unanswered(f"messages.{len(raws) - 1}:"))
        return self.messages

    def _unanswered(self, place: str) -> str:
        ids = ", ".join(sorted(self.waiting))
        return f"{place}`tool_use` ids were found without `tool_result` blocks immediately after: {ids}. {PAIR_RULE}"

    def _require_results(self, index: int) -> None:
        if self.waiting:
            raise ConversionError(self._unanswered(f"messages.{index}: "))

    def _user(self, index: int, blocks: list[tuple[str, Field]]) -> None:
        answered: set[str] = set()
        referenced: list[str] = []
        for number, (kind, block) in enumerate(blocks):
            if kind == "tool_result":
                content = self._result(index, number, block, answered, referenced)
                self.messages.append(ToolResult(content, block.required("tool_use_id").text()))
                continue
            if kind == "thinking":
                raise ConversionError(
                    f"messages.{index}.content: thinking blocks may only be in `assistant` messages"
                )
            if kind == "tool_use" or kind in SERVER_BLOCKS:
                raise ConversionError(
                    f"messages.{index}: `{kind}` blocks can only be in `assistant` messages"
                )
            self._require_results(index)
            if kind == "tool_addition":
                referenced.append(_added_tool(block))
            else:
                path = f"messages.{index}.content[{number}]"
                self.messages.append(User((_piece(kind, block, path),)))
        if self.waiting:
            raise ConversionError(self._unanswered(f"messages.{index - 1}:"))
        self._add_tools(referenced)

    def _result(
        self, index: int, number: int, block: Field, answered: set[str], referenced: list[str]
    ) -> Content:
        use_id = block.required("tool_use_id").text()
        place = f"messages.{index}.content.{number}"
        if use_id in answered:
            raise ConversionError(
                f"{place}: each tool_use must have a single result. "
                f"Found multiple `tool_result` blocks with id: {use_id}"
            )
        if use_id not in self.waiting:
            raise ConversionError(
                f"unexpected `{place}: tool_use_id` found in `tool_result` blocks: {use_id}. Each `tool_result` block "
                "must have a corresponding `tool_use` block in the previous message."
            )
        self.waiting.remove(use_id)
        answered.add(use_id)
        content = block.optional("content")
        if content is None:
            return ()
        if isinstance(content.value, str):
            return (content.text(),)
        pieces: list[Piece] = []
        for part in content.items():
            kind = part.required("type").word(RESULT_BLOCKS)
            if kind == "tool_reference":
                referenced.append(part.required("tool_name").text())
                pieces.append(referenced[-1])
            else:
                pieces.append(_piece(kind, part, f"{place}.tool_result"))
        return joined(pieces)

    def _add_tools(self, names: list[str]) -> None:
        """Show the schemas of deferred tools that this turn makes known, each once in a conversation."""
        found = [self.deferred.pop(name) for name in names if name in self.deferred]
        if found:
            self.messages.append(ToolsAdded(tuple(found)))

    def _system(self, index: int, blocks: list[tuple[str, Field]]) -> None:
        self._require_results(index)
        pieces: list[Piece] = []
        added: list[str] = []
        for number, (kind, block) in enumerate(blocks):
            if kind == "tool_addition":
                added.append(_added_tool(block))
            elif kind in ("text", "image", "document"):
                pieces.append(_piece(kind, block, f"messages.{index}.content[{number}]"))
            else:
                raise ConversionError(f"messages.{index}: `{kind}` blocks cannot be in `system` messages")
        if pieces:
            self.messages.append(System(joined(pieces)))
        self._add_tools(added)

    def _assistant(self, index: int, blocks: list[tuple[str, Field]]) -> None:
        self._require_results(index)
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[ToolCall] = []
        for number, (kind, block) in enumerate(blocks):
            if kind == "thinking":
                thoughts.append(block.required("thinking").text())
            elif kind == "tool_use":
                calls.append(self._use(index, number, block))
            elif kind == "tool_result":
                raise ConversionError(
                    f"messages.{index}: `tool_result` blocks can only be in `user` messages"
                )
            elif kind in SERVER_BLOCKS:
                if self.web_search == REJECT:
                    raise ConversionError("Unsupported content block: server tools are not supported")
            elif kind == "tool_addition":
                raise ConversionError(f"messages.{index}: `{kind}` blocks cannot be in `assistant` messages")
            else:
                if calls:
                    raise ConversionError(self._unanswered(f"messages.{index}.{number}: "))
                piece = _piece(kind, block, f"messages.{index}.content[{number}]")
                if isinstance(piece, ImageSource):
                    raise image_refused("assistant")
                texts.append(piece)
        reasoning = BLANK_LINE.join(thoughts) if thoughts else None
        self.messages.append(Assistant(_joined_texts(texts), reasoning, tuple(calls)))

    def _use(self, index: int, number: int, block: Field) -> ToolCall:
        use_id = block.required("id").text()
        if use_id in self.waiting:
            raise ConversionError(f"messages.{index}.content.{number}: `tool_use` ids must be unique")
        self.waiting.append(use_id)
        arguments = python_style(block.required("input").value)
        return ToolCall(use_id, block.required("name").text(), arguments)


def _text_message(role: str, text: str) -> Message:
    if role == "assistant":
        return Assistant(text)
    return User((text,)) if role == "user" else System((text,))


def _joined_texts(texts: list[str]) -> str:
    """Text blocks of one turn; a blank line stands only behind text."""
    whole = ""
    for text in texts:
        whole += (BLANK_LINE if whole else "") + text
    return whole


def _system_text(system: Field) -> Content:
    """The top-level system text; a client's billing header is no instruction."""
    if isinstance(system.value, str):
        return (system.text(),)
    pieces: list[Piece] = []
    for block in system.items():
        kind = block.required("type").word(("text", "image", "document"))
        piece = _piece(kind, block, block.path)
        if not (isinstance(piece, str) and piece.startswith(BILLING_HEADER)):
            pieces.append(piece)
    if any(isinstance(piece, ImageSource) for piece in pieces):
        raise image_refused("system")
    return (text_of(joined(pieces)),)


def _piece(kind: str, block: Field, path: str) -> Piece:
    if kind == "text":
        return block.required("text").text()
    source = block.optional("source")
    if kind == "document":
        named = (source.text_at("media_type") or source.text_at("type")) if source else None
        return f"[Unsupported document type: {named or 'unknown'}]"
    source = block.required("source")
    form = source.required("type").word(("base64", "url", "file"))
    if form == "base64":
        return image_from_base64(source.required("media_type").text(), source.required("data").text(), path)
    if form == "url":
        return image_from_url(source.required("url").text(), None, path)
    raise file_id_refused(path)


def _added_tool(block: Field) -> str:
    reference = block.optional("tool") or block
    return reference.text_at("tool_name") or reference.required("name").text()
