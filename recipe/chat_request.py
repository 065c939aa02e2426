"""Chat Completions requests in neutral form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepinfer.recipe.chat_settings import ChatSettings
from deepinfer.recipe.conversation import (
    Assistant,
    Content,
    Conversation,
    ConvertedRequest,
    ImageSource,
    InferenceOptions,
    Message,
    ParsingOptions,
    Piece,
    Reminder,
    ResponseFormat,
    System,
    Tool,
    ToolCall,
    ToolResult,
    User,
    joined,
    text_of,
)
from deepinfer.recipe.errors import ConversionError
from deepinfer.recipe.fields import Field, read_body
from deepinfer.recipe.formats import check_format, initial_stage
from deepinfer.recipe.image_input import DETAILS, file_id_refused, image_from_url, image_refused
from deepinfer.recipe.missing_reasoning import check_reasoning
from deepinfer.recipe.options import REJECT, ConversionOptions
from deepinfer.recipe.sampling import EFFORTS, THINKING_TYPES, effective_sampling, resolve_thinking
from deepinfer.recipe.schemas import (
    check_parameters,
    check_tool_name,
    check_unique,
    choose_tools,
    constraint_of,
    strict_tool,
)

ROLES = ("system", "user", "assistant", "tool", "latest_reminder")
FORMATS = ("json_object", "json_schema", "regex", "text")


def convert_chat(
    body: Mapping[str, Any] | str | bytes, options: ConversionOptions | None = None
) -> ConvertedRequest:
    """The neutral form of a Chat Completions body.

    Raises:
        SchemaError: the body is not such a request.
        ConversionError: it asks for something that cannot be served.
    """
    options = options or ConversionOptions()
    root = read_body(body)
    name = root.required("model").text()
    messages_field = list(root.required("messages").items())
    thinking_field = root.optional("thinking")
    thinking_type = thinking_field.word_at("type", THINKING_TYPES) if thinking_field else None
    thinking, effort = resolve_thinking(
        thinking_type, root.word_at("reasoning_effort", EFFORTS), options.default_thinking
    )
    settings = ChatSettings(root, options.max_tokens(thinking))
    parsed = [_read_message(field) for field in messages_field]
    tool_fields = _read_tools(root)
    choice, named = _read_choice(root)
    response_format = _read_format(root)

    model = options.model(name)
    settings.check()
    messages = _arrange(parsed)
    tools, tool_choice = _convert_tools(tool_fields, choice, named, thinking)
    check_format(response_format, messages, CHAT_JSON_WORD)
    prefix = isinstance(messages[-1], Assistant) and messages[-1].prefix
    if prefix and response_format.kind == "json_object":
        raise ConversionError("response_format json_object should not be used with prefix")
    if prefix and tools:
        raise ConversionError("Function call should not be used with prefix")
    if thinking and options.missing_reasoning == REJECT:
        check_reasoning(messages, "reasoning_content")

    temperature, top_p = effective_sampling(
        model, thinking, bool(tools), settings.temperature, settings.top_p
    )
    return ConvertedRequest(
        api="chat",
        model=name,
        model_version=model.version,
        dialect=model.dialect,
        conversation=Conversation(tuple(messages), thinking, effort, tools, tool_choice, response_format),
        inference=InferenceOptions(
            max_tokens=settings.max_tokens,
            temperature=temperature,
            top_p=top_p,
            logprobs=settings.logprobs,
            top_logprobs=settings.top_logprobs,
            seed=settings.seed,
            constraint=constraint_of(tools, tool_choice, response_format),
        ),
        parsing=ParsingOptions(
            parse_tool_calls=bool(tools),
            starts_in_tool_calls=tool_choice.value == "required",
            parse_json_output=response_format.kind == "json_object",
            initial_stage=initial_stage(messages, thinking),
            stop_sequences=settings.stop,
        ),
        stream=settings.stream,
        include_usage=settings.include_usage,
    )


CHAT_JSON_WORD = (
    "Prompt must contain the word 'json' in some form to use 'response_format' of type 'json_object'."
)


class _RawMessage:
    """A message with its fields read but not yet placed."""

    def __init__(self, field: Field) -> None:
        self.role = field.required("role").word(ROLES)
        content = field.optional("content")
        if content is None and self.role != "assistant":
            raise Field(None, f"{field.path}.content").wrong("a string or a list of parts")
        self.parts = None if content is None else _read_parts(content)
        self.reasoning = field.text_at("reasoning_content") if self.role == "assistant" else None
        self.prefix = self.role == "assistant" and bool(field.flag_at("prefix"))
        self.call_id = field.required("tool_call_id").text() if self.role == "tool" else ""
        self.calls: list[ToolCall] | None = None
        calls = field.optional("tool_calls") if self.role == "assistant" else None
        if calls is not None:
            self.calls = [_read_call(item) for item in calls.items()]


def _read_message(field: Field) -> _RawMessage:
    return _RawMessage(field.object())


def _read_call(field: Field) -> ToolCall:
    field.required("type").word(("function",))
    function = field.required("function")
    return ToolCall(
        field.required("id").text(), function.required("name").text(), function.required("arguments").text()
    )


def _read_parts(content: Field) -> list[str | Field]:
    """Texts as strings, images and files as the fields that name them."""
    if isinstance(content.value, str):
        return [content.text()]
    if not isinstance(content.value, list):
        raise content.wrong("a string or a list of parts")
    parts: list[str | Field] = []
    for part in content.items():
        kind = part.required("type").word(("text", "image_url", "file"))
        if kind == "text":
            parts.append(part.required("text").text())
        elif kind == "image_url":
            image = part.required("image_url")
            image.required("url").text()
            image.word_at("detail", DETAILS)
            parts.append(image)
        else:
            parts.append(part.optional("file") or part)
    return parts


def _convert_parts(parts: list[str | Field] | None, index: int) -> Content:
    path = f".messages[{index}]"
    pieces: list[Piece] = []
    for part in parts or ():
        if isinstance(part, str):
            pieces.append(part)
        elif "url" in part:
            pieces.append(image_from_url(part.required("url").text(), part.text_at("detail"), path))
        elif "file_id" in part:
            raise file_id_refused(path)
        elif "file_data" in part:
            pieces.append(image_from_url(part.required("file_data").text(), None, path))
        else:
            raise ConversionError(f"{path}: file must have file_data")
    return joined(pieces)


def _text_parts(raw: _RawMessage, index: int, role: str) -> str:
    content = _convert_parts(raw.parts, index)
    if any(isinstance(piece, ImageSource) for piece in content):
        raise image_refused(role)
    return text_of(content)


def _arrange(raws: list[_RawMessage]) -> list[Message]:
    """Messages in order, with every tool call answered at once and only once."""
    if not raws:
        raise ConversionError("Empty input messages")
    messages: list[Message] = []
    last = len(raws) - 1
    index = 0
    while index <= last:
        raw = raws[index]
        if raw.role == "system":
            messages.append(System(_convert_parts(raw.parts, index)))
        elif raw.role == "user":
            messages.append(User(_convert_parts(raw.parts, index)))
        elif raw.role == "latest_reminder":
            messages.append(Reminder(_text_parts(raw, index, raw.role)))
        elif raw.role == "tool":
            raise ConversionError(
                "Messages with role 'tool' must be a response to a preceding message with 'tool_calls'"
            )
        else:
            if raw.prefix and index != last:
                raise ConversionError(
                    "Invalid completion message: prefix set true with message which is not final message "
                    "or message role is not assistant"
                )
            if raw.parts is None and raw.calls is None:
                raise ConversionError("Invalid assistant message: content or tool_calls must be set")
            content = _text_parts(raw, index, "assistant")
            results = _answers(raws, index)
            messages.append(Assistant(content, raw.reasoning, tuple(raw.calls or ()), raw.prefix))
            messages.extend(results)
            index += len(results)
        index += 1
    return messages


def _answers(raws: list[_RawMessage], index: int) -> list[ToolResult]:
    """The tool messages that answer the calls of message `index`: one for each, directly behind it."""
    calls = raws[index].calls
    if calls is None:
        return []
    if not calls:
        raise ConversionError(
            f"Invalid 'messages[{index}].tool_calls': empty array. Expected an array with minimum length 1, "
            "but got an empty array instead."
        )
    ids: set[str] = set()
    for call in calls:
        if call.id in ids:
            raise ConversionError(f"Duplicate value for 'tool_call_id' of {call.id} in message[{index}]")
        ids.add(call.id)
    rule = (
        "An assistant message with 'tool_calls' must be followed by tool messages "
        "responding to each 'tool_call_id'"
    )
    results: list[ToolResult] = []
    answered: set[str] = set()
    for place in range(index + 1, index + 1 + len(calls)):
        if place >= len(raws) or raws[place].role != "tool":
            raise ConversionError(f"{rule}. (insufficient tool messages following tool_calls message)")
        raw = raws[place]
        if raw.call_id not in ids:
            raise ConversionError(
                f"{rule}, The following tool_call_ids did not have response messages: {raw.call_id}"
            )
        if raw.call_id in answered:
            raise ConversionError(f"Duplicate value for 'tool_call_id' of {raw.call_id} in message[{place}]")
        answered.add(raw.call_id)
        results.append(ToolResult(_convert_parts(raw.parts, place), raw.call_id))
    return results


def _read_tools(root: Field) -> list[Tool]:
    tools: list[Tool] = []
    field = root.optional("tools")
    for item in field.items() if field else ():
        item.required("type").word(("function",))
        function = item.required("function")
        tools.append(
            Tool(
                function.required("name").text(),
                function.text_at("description"),
                function.object_at("parameters") or {},
                function.flag_at("strict"),
            )
        )
    return tools


def _read_choice(root: Field) -> tuple[str | None, str | None]:
    """(mode, None) or (None, name of the one tool)."""
    field = root.optional("tool_choice")
    if field is None:
        return None, None
    if isinstance(field.value, str):
        return field.word(("none", "auto", "required")), None
    field.required("type").word(("function",))
    return None, field.required("function").required("name").text()


def _convert_tools(
    declared: list[Tool], choice: str | None, named: str | None, thinking: bool
) -> tuple[tuple[Tool, ...], Any]:
    for index, tool in enumerate(declared):
        check_tool_name(tool.name, f"tools[{index}].function.name")
    if choice != "none":
        check_unique(declared)
        for tool in declared:
            check_parameters(tool.name, tool.parameters)
    return choose_tools([strict_tool(tool) for tool in declared], choice, named, thinking)


def _read_format(root: Field) -> ResponseFormat:
    field = root.optional("response_format")
    if field is None:
        return ResponseFormat()
    kind = field.required("type").word(FORMATS)
    if kind == "json_schema":
        wrapped = field.required("json_schema")
        return ResponseFormat(kind, wrapped.required("schema").value, wrapped.flag_at("strict") or False)
    if kind == "regex":
        return ResponseFormat(kind, regex=field.required("regex").text())
    return ResponseFormat(kind)
