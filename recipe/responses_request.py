"""Responses requests in neutral form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepinfer.recipe.conversation import (
    Conversation,
    ConvertedRequest,
    InferenceOptions,
    Message,
    ParsingOptions,
    ResponseFormat,
    System,
    ToolChoice,
    User,
)
from deepinfer.recipe.errors import ConversionError
from deepinfer.recipe.fields import Field, read_body
from deepinfer.recipe.formats import check_format, initial_stage
from deepinfer.recipe.missing_reasoning import check_reasoning
from deepinfer.recipe.options import REJECT, ConversionOptions
from deepinfer.recipe.responses_items import convert_items
from deepinfer.recipe.responses_tools import qualified, read_tools
from deepinfer.recipe.sampling import (
    EFFORTS,
    MOST_TOP_LOGPROBS,
    check_length,
    check_sampling,
    effective_sampling,
    resolve_thinking,
)
from deepinfer.recipe.schemas import choose_tools, constraint_of

FORMATS = ("text", "json_object", "json_schema", "regex")
JSON_WORD = "Response input messages must contain the word 'json' to use text.format of type json_object"


def convert_responses(
    body: Mapping[str, Any] | str | bytes, options: ConversionOptions | None = None
) -> ConvertedRequest:
    """The neutral form of a Responses body.

    Raises:
        SchemaError: the body is not such a request.
        ConversionError: it asks for something that cannot be served.
    """
    options = options or ConversionOptions()
    root = read_body(body)
    name = root.required("model").text()
    reasoning = root.optional("reasoning")
    effort_word = reasoning.word_at("effort", EFFORTS) if reasoning else None
    thinking, effort = resolve_thinking(None, effort_word, options.default_thinking)
    temperature, top_p = root.number_at("temperature"), root.number_at("top_p")
    max_tokens = root.integer_at("max_output_tokens", 32)
    top_logprobs = root.integer_at("top_logprobs", 8)
    stream = root.flag_at("stream") or False
    declared = read_tools(root)
    choice, named = _read_choice(root)
    response_format = _read_format(root)
    echo = _echo(root, declared.echo)

    model = options.model(name)
    check_length("max_output_tokens", max_tokens, options.max_tokens(thinking))
    check_sampling(temperature, top_p)
    if top_logprobs is not None and top_logprobs > MOST_TOP_LOGPROBS:
        raise ConversionError(
            f"Invalid top_logprobs value, the valid range of top_logprobs is [0, {MOST_TOP_LOGPROBS}]."
        )
    available = declared.converted(options.responses_web_search)
    messages = _messages(root)
    tools, tool_choice = choose_tools(available, choice, named, thinking)
    check_format(response_format, messages, JSON_WORD)
    if thinking and options.missing_reasoning == REJECT:
        check_reasoning(messages, "reasoning_text")

    used_temperature, used_top_p = effective_sampling(model, thinking, bool(tools), temperature, top_p)
    return ConvertedRequest(
        api="responses",
        model=name,
        model_version=model.version,
        dialect=model.dialect,
        conversation=Conversation(tuple(messages), thinking, effort, tools, tool_choice, response_format),
        inference=InferenceOptions(
            max_tokens=max_tokens,
            temperature=used_temperature,
            top_p=used_top_p,
            logprobs=top_logprobs is not None,
            top_logprobs=top_logprobs,
            constraint=constraint_of(tools, tool_choice, response_format),
        ),
        parsing=ParsingOptions(
            parse_tool_calls=bool(tools),
            starts_in_tool_calls=tool_choice is ToolChoice.REQUIRED,
            parse_json_output=response_format.kind == "json_object",
            initial_stage=initial_stage(messages, thinking),
        ),
        stream=stream,
        echo=echo,
        custom_tools=frozenset(declared.custom),
    )


def _messages(root: Field) -> list[Message]:
    messages: list[Message] = []
    instructions = root.text_at("instructions")
    if instructions:
        messages.append(System((instructions,)))
    given = root.optional("input")
    if given is None:
        if not messages:
            raise ConversionError("Either input or instructions must be provided")
    elif isinstance(given.value, str):
        messages.append(User((given.text(),)))
    elif isinstance(given.value, list):
        # a turn never merges into the instructions, so the items stand on their own
        messages.extend(convert_items(list(given.items())))
    else:
        raise given.wrong("a string or a list of items")
    return messages


def _read_choice(root: Field) -> tuple[str | None, str | None]:
    """(mode, None) or (None, name of the one tool); a choice of a hosted tool falls back to auto."""
    field = root.optional("tool_choice")
    if field is None:
        return None, None
    if isinstance(field.value, str):
        return field.word(("none", "auto", "required")), None
    if field.required("type").text() in ("function", "custom"):
        return None, qualified(field.text_at("namespace"), field.required("name").text())
    return None, None


def _read_format(root: Field) -> ResponseFormat:
    text = root.optional("text")
    field = text.optional("format") if text else None
    if field is None:
        return ResponseFormat()
    kind = field.required("type").word(FORMATS)
    if kind == "json_schema":
        return ResponseFormat(kind, field.required("schema").value, field.flag_at("strict") or False)
    if kind == "regex":
        return ResponseFormat(kind, regex=field.required("regex").text())
    return ResponseFormat(kind)


def _echo(root: Field, tools: list[dict[str, Any]]) -> dict[str, Any]:
    """The settings that the response object repeats; the rest of that object is fixed."""
    reasoning, text = root.optional("reasoning"), root.optional("text")
    shown_format: dict[str, Any] = {"type": "text"}
    asked = text.object_at("format") if text else None
    if asked is not None:
        shown_format = (
            {"description": None, "strict": None, **asked} if asked["type"] == "json_schema" else asked
        )
    choice = root.optional("tool_choice")
    temperature, top_p = root.number_at("temperature"), root.number_at("top_p")
    return {
        "instructions": root.text_at("instructions"),
        "max_output_tokens": root.integer_at("max_output_tokens", 32),
        "reasoning": {
            "effort": reasoning.text_at("effort") if reasoning else None,
            "summary": reasoning.text_at("summary") if reasoning else None,
        },
        "temperature": 1.0 if temperature is None else temperature,
        "text": {"format": shown_format, "verbosity": text.text_at("verbosity") if text else None},
        "tool_choice": "auto" if choice is None else choice.value,
        "tools": tools,
        "top_logprobs": root.integer_at("top_logprobs", 8) or 0,
        "top_p": 1.0 if top_p is None else top_p,
        "user": root.text_at("user"),
    }
