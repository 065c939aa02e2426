"""The neutral form between the three APIs and the two prompt dialects."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias

BLANK_LINE = "\n\n"


@dataclass(frozen=True)
class ImageSource:
    """An image as the request names it; exactly one of `url` and `data_url` is set.

    `path` is the place in the request, in the spelling of the API.
    """

    path: str
    detail: str = "high"
    url: str | None = None
    data_url: str | None = None

    @property
    def kind(self) -> str:
        return "url" if self.url is not None else "data_url"


Piece: TypeAlias = str | ImageSource
Content: TypeAlias = tuple[Piece, ...]


def joined(pieces: Iterable[Piece]) -> Content:
    """Parts with a blank line between each two."""
    content: list[Piece] = []
    for number, piece in enumerate(pieces):
        if number:
            content.append(BLANK_LINE)
        content.append(piece)
    return tuple(content)


def text_of(content: Content) -> str:
    """The text of a content, images left out."""
    return "".join(piece for piece in content if isinstance(piece, str))


def is_empty(content: Content) -> bool:
    """Whether there is neither a character nor an image."""
    return not any(isinstance(piece, ImageSource) or piece for piece in content)


@dataclass(frozen=True)
class ToolCall:
    """A call in the history; `arguments` is the JSON text that the client sent."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class System:
    content: Content


@dataclass(frozen=True)
class User:
    content: Content


@dataclass(frozen=True)
class Assistant:
    """An assistant turn; `reasoning` None means that the client sent none, `prefix` that the turn goes on."""

    content: str = ""
    reasoning: str | None = None
    calls: tuple[ToolCall, ...] = ()
    prefix: bool = False


@dataclass(frozen=True)
class ToolResult:
    content: Content
    call_id: str


@dataclass(frozen=True)
class Reminder:
    text: str


@dataclass(frozen=True)
class ToolsAdded:
    """Tools whose schemas become known at this place of the conversation."""

    tools: tuple[Tool, ...]


@dataclass(frozen=True)
class Tool:
    """A declared tool.

    Attributes:
        parameters: the JSON schema that the prompt shows.
        deferred: not shown until the conversation refers to it.
    """

    name: str
    description: str | None
    parameters: dict[str, Any]
    strict: bool | None = None
    deferred: bool = False


Message: TypeAlias = System | User | Assistant | ToolResult | Reminder | ToolsAdded


class ToolChoice(StrEnum):
    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"


class Effort(StrEnum):
    LOW = "low"
    HIGH = "high"
    XHIGH = "xhigh"
    MAX = "max"


@dataclass(frozen=True)
class ResponseFormat:
    """`kind` is text, json_object, json_schema or regex; `schema` and `regex` belong to the last two."""

    kind: str = "text"
    schema: Any = None
    strict: bool = False
    regex: str | None = None


@dataclass(frozen=True)
class Conversation:
    """Everything that decides the prompt."""

    messages: tuple[Message, ...]
    thinking: bool
    effort: Effort | None = None
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice.AUTO
    response_format: ResponseFormat = field(default_factory=ResponseFormat)


@dataclass(frozen=True)
class Constraint:
    """What the sampler has to enforce; the recipe only names it.

    `kind` is json, regex, tool_call or tool_call_required; `schema` is compact JSON, a pattern, or empty for
    any JSON.
    """

    kind: str
    schema: str


@dataclass(frozen=True)
class InferenceOptions:
    """Sampling as it will be done, not as it was asked for; `max_tokens` None is the default of the mode."""

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    logprobs: bool = False
    top_logprobs: int | None = None
    seed: int | None = None
    constraint: Constraint | None = None


class InitialStage(StrEnum):
    """Where parsing of a thinking-mode answer starts; continuations keep leading newlines."""

    REASONING_START = "ReasoningStart"
    REASONING_CONTINUATION = "ReasoningContinuation"
    CONTENT_CONTINUATION = "ContentContinuation"


@dataclass(frozen=True)
class ParsingOptions:
    """How the output of this request has to be read."""

    parse_tool_calls: bool = False
    starts_in_tool_calls: bool = False
    parse_json_output: bool = False
    initial_stage: InitialStage | None = None
    stop_sequences: tuple[str, ...] = ()


@dataclass(frozen=True)
class ConvertedRequest:
    """A request of any API in neutral form.

    Attributes:
        api: chat, responses or messages.
        dialect: name of the prompt dialect of the requested model, `v4` or `v4.1`.
        include_usage: chat only: every chunk carries a `usage` key.
        echo: responses only: the settings that the response object repeats.
        custom_tools: responses only: tools whose calls go out as bare text.
    """

    api: str
    model: str
    model_version: str
    dialect: str
    conversation: Conversation
    inference: InferenceOptions
    parsing: ParsingOptions
    stream: bool = False
    include_usage: bool = False
    echo: dict[str, Any] = field(default_factory=dict)
    custom_tools: frozenset[str] = frozenset()

    @property
    def image_sources(self) -> tuple[ImageSource, ...]:
        """The images in message order: their order in the prompt unless tool results are sorted anew."""
        return tuple(
            piece
            for message in self.conversation.messages
            if isinstance(message, System | User | ToolResult)
            for piece in message.content
            if isinstance(piece, ImageSource)
        )
