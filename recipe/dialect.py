
"""The two prompt dialects: their control tokens, call tags and effort texts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from deepinfer.recipe.conversation import Effort
from deepinfer.recipe.prompt_texts import PROMPT_TEXTS

THINK = "<think>"
THINK_END = "</think>"
DSML = "｜DSML｜"


@dataclass(frozen=True)
class ControlTokens:
    """Spellings of the tokens that only the renderer may place."""

    begin: str = "<｜begin▁of▁sentence｜>"
    end: str = "<｜end▁of▁sentence｜>"
    user: str = "<｜User｜>"
    assistant: str = "<｜Assistant｜>"
    reminder: str = "<｜latest_reminder｜>"
    image: str = "<｜image｜>"
    system: str | None = None
    fim_hole: str = "<｜fim▁hole｜>"
    fim_begin: str = "<｜fim▁begin｜>"
    fim_end: str = "<｜fim▁end｜>"
    think: str = THINK
    think_end: str = THINK_END
    dsml: str = DSML


@dataclass(frozen=True)
class Dialect:
    """How one model generation writes a conversation.

    Attributes:
        calls_tag, invoke_tag, parameter_tag: what follows the DSML token inside the angle brackets.
        tools_heading: the tool section up to the first schema.
        efforts: the text at the very start of a thinking prompt.
        json_object: the whole format section of json_object; None: the paragraph of json_schema with
            `{"type": "json_object"}`.
        hoists_system: all system messages move to the front.
        keeps_empty_user: an empty user message still adds its blank line when it merges.
        blank_line_without_parameters: a call without parameters has an empty line between its tags.
        shows_added_tools: schemas of tools that become known later are shown at their place.
    """

    name: str
    tokens: ControlTokens
    calls_tag: str
    invoke_tag: str
    parameter_tag: str
    tools_heading: str
    efforts: Mapping[Effort, str]
    json_object: str | None
    hoists_system: bool
    keeps_empty_user: bool
    blank_line_without_parameters: bool
    shows_added_tools: bool


def _effort_line(level: int) -> str:
    return (
        f"Reasoning Effort: {level} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
    )


V4 = Dialect(
    name="v4",
    tokens=ControlTokens(),
    calls_tag="tool_calls",
    invoke_tag="invoke",
    parameter_tag="parameter",
    tools_heading=PROMPT_TEXTS.tools_v4,
    efforts=MappingProxyType(
        {
            Effort.LOW: "",
            Effort.HIGH: PROMPT_TEXTS.effort_high_v4,
            Effort.XHIGH: PROMPT_TEXTS.effort_high_v4,
            Effort.MAX: PROMPT_TEXTS.effort_max_v4,
        }
    ),
    json_object=PROMPT_TEXTS.json_object_v4,
    hoists_system=True,
    keeps_empty_user=False,
    blank_line_without_parameters=False,
    shows_added_tools=False,
)

V41 = Dialect(
    name="v4.1",
    tokens=ControlTokens(image="<｜deepseek_image｜>", system="<｜System｜>"),
    calls_tag=" calls",
    invoke_tag=" invoke",
    parameter_tag=" parameter",
    tools_heading=PROMPT_TEXTS.tools_v41,
    efforts=MappingProxyType(
        {
            Effort.LOW: _effort_line(50),
            Effort.HIGH: _effort_line(75),
            Effort.XHIGH: _effort_line(75),
            Effort.MAX: _effort_line(100),
        }
    ),
    json_object=None,
    hoists_system=False,
    keeps_empty_user=True,
    blank_line_without_parameters=True,
    shows_added_tools=True,
)

DIALECTS: Mapping[str, Dialect] = MappingProxyType({dialect.name: dialect for dialect in (V4, V41)})
