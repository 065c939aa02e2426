"""A conversation as the prompt that the model was trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from deepinfer.recipe.conversation import (
    BLANK_LINE,
    Assistant,
    Content,
    Conversation,
    Message,
    Reminder,
    System,
    Tool,
    ToolCall,
    ToolChoice,
    ToolResult,
    ToolsAdded,
    User,
    is_empty,
)
from deepinfer.recipe.dialect import DSML, THINK, THINK_END, ControlTokens, Dialect
from deepinfer.recipe.json_text import parse_json, python_style
from deepinfer.recipe.prompt import Prompt, PromptBuilder
from deepinfer.recipe.prompt_texts import PROMPT_TEXTS

ADDED_TOOLS_HEADING = "\n\n### Updated Tool Schemas\n\n"


def render(conversation: Conversation, dialect: Dialect, *, image_token: str | None = None) -> Prompt:
    """The prompt of a conversation.

    Args:
        image_token: spelling of the image token, where a tokenizer has another one than the dialect.
    """
    tokens = dialect.tokens if image_token is None else replace(dialect.tokens, image=image_token)
    return _Renderer(conversation, dialect, tokens).render()


def render_fim(prompt: str, suffix: str | None, dialect: Dialect) -> Prompt:
    """A completion prompt: with a suffix the model fills the hole between the two, without one it goes on."""
    tokens = dialect.tokens
    out = PromptBuilder(tokens.image)
    out.special(tokens.begin)
    if suffix is None:
        out.plain(prompt)
    else:
        out.special(tokens.fim_begin)
        out.plain(prompt)
        out.special(tokens.fim_hole)
        out.plain(suffix)
        out.special(tokens.fim_end)
    return out.build()


def arrange(conversation: Conversation, dialect: Dialect) -> list[Message]:
    """The messages in the dialect's order: systems placed, users merged, results in the order of their calls."""
    messages = _place_system(conversation.messages, dialect)
    return _sort_results(_merge_users(messages, dialect))


def _place_system(messages: Sequence[Message], dialect: Dialect) -> list[Message]:
    filled = [each for each in messages if not (isinstance(each, System) and is_empty(each.content))]
    if not dialect.hoists_system:
        return filled
    content: Content = ()
    for message in filled:
        if isinstance(message, System):
            content = (*content, BLANK_LINE, *message.content) if content else message.content
    rest: list[Message] = [each for each in filled if not isinstance(each, System | ToolsAdded)]
    return [System(content), *rest] if content else rest


def _merge_users(messages: Sequence[Message], dialect: Dialect) -> list[Message]:
    merged: list[Message] = []
    for message in messages:
        last = merged[-1] if merged else None
        if not isinstance(message, User) or not isinstance(last, User):
            merged.append(message)
        elif dialect.keeps_empty_user or not (is_empty(message.content) or is_empty(last.content)):
            merged[-1] = User((*last.content, BLANK_LINE, *message.content))
        else:
            merged[-1] = User((*last.content, *message.content))
    return merged


def _sort_results(messages: Sequence[Message]) -> list[Message]:
    """Within each user-side run the tool results take the order of the last calls; unknown ids come first."""
    arranged = list(messages)
    order: dict[str, int] = {}
    start = 0
    while start < len(arranged):
        message = arranged[start]
        if isinstance(message, Assistant) and message.calls:
            order = {call.id: place for place, call in enumerate(message.calls)}
        if not isinstance(message, ToolResult):
            start += 1
            continue
        end = start
        while end < len(arranged) and isinstance(arranged[end], ToolResult | User):
            end += 1
        places = [place for place in range(start, end) if isinstance(arranged[place], ToolResult)]
        results = [message for message in arranged[start:end] if isinstance(message, ToolResult)]
        results.sort(key=lambda result: order.get(result.call_id, 0))
        for place, result in zip(places, results, strict=True):
            arranged[place] = result
        start = end
    return arranged


class _Renderer:
    def __init__(self, conversation: Conversation, dialect: Dialect, tokens: ControlTokens) -> None:
        self.conversation = conversation
        self.dialect = dialect
        self.tokens = tokens
        self.out = PromptBuilder(tokens.image)
        self.keeps_reasoning = conversation.thinking and bool(conversation.tools)
        self.shown_tools = [tool for tool in conversation.tools if not tool.deferred]

    def render(self) -> Prompt:
        messages = arrange(self.conversation, self.dialect)
        self.out.special(self.tokens.begin)
        effort = self.conversation.effort
        effort_text = self.dialect.efforts[effort] if self.conversation.thinking and effort else ""
        has_section = bool(self.shown_tools) or self._format_section() is not None
        first = messages[0] if messages else None
        if isinstance(first, System) or has_section or effort_text:
            self._system_token()
            self.out.plain(effort_text)
            if isinstance(first, System):
                self.out.content(first.content)
                messages = messages[1:]
            self._sections()
        for before, message in pairwise([None, *messages]):
            assert message is not None
            self._message(message, after_user=isinstance(before, User | ToolResult))
        if not (messages and isinstance(messages[-1], Assistant) and messages[-1].prefix):
            self._open_turn()
        return self.out.build()

    def _system_token(self) -> None:
        if self.tokens.system is not None:
            self.out.special(self.tokens.system)

    def _format_section(self) -> str | None:
        wanted = self.conversation.response_format
        if wanted.kind == "json_object":
            shown = PROMPT_TEXTS.response_format + python_style({"type": "json_object"})
            return shown if self.dialect.json_object is None else self.dialect.json_object
        if wanted.kind == "json_schema":
            return PROMPT_TEXTS.response_format + python_style(wanted.schema)
        return None

    def _sections(self) -> None:
        if self.shown_tools:
            self.out.plain(BLANK_LINE)
            self.out.template(self.dialect.tools_heading, (THINK, THINK_END, DSML))
            self.out.plain(_schema_lines(self.shown_tools))
            self.out.plain(PROMPT_TEXTS.tools_tail)
        section = self._format_section()
        if section is not None:
            self.out.plain(BLANK_LINE + section)

    def _message(self, message: Message, *, after_user: bool) -> None:
        out = self.out
        if isinstance(message, Assistant):
            self._assistant(message)
        elif isinstance(message, System):
            self._system_token()
            out.content(message.content)
        elif isinstance(message, ToolsAdded):
            if self.dialect.shows_added_tools:
                self._system_token()
                out.plain(ADDED_TOOLS_HEADING + _schema_lines(message.tools))
        elif isinstance(message, Reminder):
            out.special(self.tokens.reminder)
            out.plain(message.text)
        else:
            if after_user:
                out.plain(BLANK_LINE)
            else:
                out.special(self.tokens.user)
            wrapped = isinstance(message, ToolResult)
            out.plain("<tool_result>" if wrapped else "")
            out.content(message.content)
            out.plain("</tool_result>" if wrapped else "")

    def _assistant(self, message: Assistant) -> None:
        out = self.out
        out.special(self.tokens.assistant)
        if message.prefix and self.conversation.thinking:
            out.special(THINK)
            out.plain(message.reasoning or "")
            if message.content:
                out.special(THINK_END)
        else:
            if self.keeps_reasoning:
                out.special(THINK)
                out.plain(message.reasoning or "")
            out.special(THINK_END)
        out.plain(message.content)
        if message.calls:
            self._calls(message.calls)
        if not message.prefix:
            out.special(self.tokens.end)

    def _open_turn(self) -> None:
        self.out.special(self.tokens.assistant)
        self.out.special(THINK if self.conversation.thinking else THINK_END)
        if self.conversation.tool_choice is ToolChoice.REQUIRED:
            self.out.plain(BLANK_LINE)
            self._tag(self.dialect.calls_tag)
            self.out.plain("\n")

    def _tag(self, name: str, attributes: str = "", *, closing: bool = False) -> None:
        self.out.plain("</" if closing else "<")
        self.out.special(DSML)
        self.out.plain(f"{name}{attributes}>")

    def _calls(self, calls: Sequence[ToolCall]) -> None:
        self.out.plain(BLANK_LINE)
        self._tag(self.dialect.calls_tag)
        self.out.plain("\n")
        for call in calls:
            self._tag(self.dialect.invoke_tag, f' name="{call.name}"')
            self.out.plain("\n")
            parameters = call_parameters(call.arguments)
            for name, value in parameters.items():
                is_text = isinstance(value, str)
                self._tag(
                    self.dialect.parameter_tag, f' name="{name}" string="{"true" if is_text else "false"}"'
                )
                self.out.plain(value if is_text else python_style(value))
                self._tag(self.dialect.parameter_tag, closing=True)
                self.out.plain("\n")
            if not parameters and self.dialect.blank_line_without_parameters:
                self.out.plain("\n")
            self._tag(self.dialect.invoke_tag, closing=True)
            self.out.plain("\n")
        self._tag(self.dialect.calls_tag, closing=True)


def call_parameters(arguments: str) -> dict[str, Any]:
    """The parameters of a call in the history; what is no JSON object becomes one text named `arguments`."""
    try:
        value = parse_json(arguments)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"arguments": arguments}


def _schema_lines(tools: Sequence[Tool]) -> str:
    return "\n".join(
        python_style(
            {"name": tool.name, "description": tool.description or "", "parameters": tool.parameters}
        )
        for tool in tools
    )
