"""Messages requests (Anthropic style) in neutral form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepinfer.recipe.conversation import (
    Conversation,
    ConvertedRequest,
    InferenceOptions,
    ParsingOptions,
    ResponseFormat,
    Tool,
    ToolChoice,
)
from deepinfer.recipe.errors import ConversionError
from deepinfer.recipe.fields import Field, read_body
from deepinfer.recipe.formats import initial_stage
from deepinfer.recipe.messages_blocks import MessagesReader, read_messages
from deepinfer.recipe.missing_reasoning import check_reasoning
from deepinfer.recipe.options import DROP, REJECT, ConversionOptions
from deepinfer.recipe.sampling import (
    EFFORTS,
    THINKING_TYPES,
    check_length,
    check_sampling,
    check_stop,
    effective_sampling,
    resolve_thinking,
)
from deepinfer.recipe.schemas import (
    check_parameters,
    check_tool_name,
    check_unique,
    choose_tools,
    constraint_of,
)


def convert_messages(
    body: Mapping[str, Any] | str | bytes, options: ConversionOptions | None = None
) -> ConvertedRequest:
    """The neutral form of a Messages body.

    Raises:
        SchemaError: the body is not such a request.
        ConversionError: it asks for something that cannot be served.
    """
    options = options or ConversionOptions()
    root = read_body(body)
    name = root.required("model").text()
    thinking_field, output = root.optional("thinking"), root.optional("output_config")
    thinking, effort = resolve_thinking(
        thinking_field.word_at("type", THINKING_TYPES) if thinking_field else None,
        output.word_at("effort", EFFORTS) if output else None,
        options.default_thinking,
    )
    temperature, top_p = root.number_at("temperature"), root.number_at("top_p")
    max_tokens = root.integer_at("max_tokens", 32)
    stops = root.optional("stop_sequences")
    stop = [item.text() for item in stops.items()] if stops else []
    stream = root.flag_at("stream") or False
    choice_field = root.optional("tool_choice")
    raws = read_messages(root)
    tool_fields = list(declared.items()) if (declared := root.optional("tools")) else []

    model = options.model(name)
    bound = options.max_tokens(thinking)
    if max_tokens is not None:
        check_length("max_tokens", min(max_tokens, bound), bound)
        max_tokens = min(max_tokens, bound)
    check_sampling(temperature, top_p)
    check_stop(stop)
    available, dropped = _convert_tools(tool_fields, options.messages_web_search)
    messages = MessagesReader(available, options.messages_web_search).convert(root, raws)
    tools, tool_choice = _choose(available, dropped, choice_field, thinking)
    if thinking and options.missing_reasoning == REJECT:
        check_reasoning(messages, "content[].thinking")

    used_temperature, used_top_p = effective_sampling(model, thinking, bool(tools), temperature, top_p)
    conversation = Conversation(tuple(messages), thinking, effort, tools, tool_choice, _read_format(output))
    return ConvertedRequest(
        api="messages",
        model=name,
        model_version=model.version,
        dialect=model.dialect,
        conversation=conversation,
        inference=InferenceOptions(
            max_tokens=max_tokens,
            temperature=used_temperature,
            top_p=used_top_p,
            constraint=constraint_of(tools, tool_choice, conversation.response_format),
        ),
        parsing=ParsingOptions(
            parse_tool_calls=bool(tools),
            starts_in_tool_calls=tool_choice is ToolChoice.REQUIRED,
            initial_stage=initial_stage(messages, thinking),
            stop_sequences=tuple(stop),
        ),
        stream=stream,
    )


def _read_format(output: Field | None) -> ResponseFormat:
    """`output_config.format`, which the official service does not have: read as Chat Completions' json_schema."""
    field = output.optional("format") if output else None
    if field is None:
        return ResponseFormat()
    kind = field.required("type").word(("json_schema",))
    return ResponseFormat(kind, field.required("schema").object().value)


def _convert_tools(fields: list[Field], web_search: str) -> tuple[list[Tool], set[str]]:
    """(client tools, names of the server tools that were dropped)."""
    tools: list[Tool] = []
    dropped: set[str] = set()
    for index, field in enumerate(fields):
        kind = field.object().text_at("type")
        name = field.required("name").text()
        if kind is not None:
            if kind.startswith("web_search") and web_search == DROP:
                dropped.add(name)
                continue
            raise ConversionError(f"tools.{index}: server tools are not supported")
        check_tool_name(name, f"tools[{index}].name")
        schema = field.object_at("input_schema")
        if schema is None:
            raise ConversionError(f"tools.{index}: missing input_schema")
        parameters = check_parameters(name, schema)
        deferred = field.flag_at("defer_loading") or False
        tools.append(Tool(name, field.text_at("description"), parameters, field.flag_at("strict"), deferred))
    check_unique(tools)
    if tools and all(tool.deferred for tool in tools):
        raise ConversionError(
            "tools: at least one tool must have defer_loading=false. All tools cannot be deferred."
        )
    return tools, dropped


def _choose(
    tools: list[Tool], dropped: set[str], field: Field | None, thinking: bool
) -> tuple[tuple[Tool, ...], ToolChoice]:
    """`any` does not force a call in the prompt; a dropped server tool takes its choice along."""
    kind = field.required("type").word(("auto", "any", "tool", "none")) if field else "auto"
    if field is not None and kind == "tool":
        named = field.required("name").text()
        if named not in dropped:
            if not tools:
                raise ConversionError(
                    f"Invalid value for 'tool_call': no function named '{named}' was specified "
                    "in the 'tools' parameter."
                )
            return choose_tools(tools, None, named, thinking)
    return choose_tools(tools, "none" if kind == "none" else "auto", None, thinking)
