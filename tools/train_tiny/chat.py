"""The official chat encoding of DeepSeek-V4.1-Flash, as far as the scripted dialogues need it.

A rendered dialogue is a list of pieces: a :class:`Control` becomes one id, a plain string is encoded as ordinary
text, so that text can never turn into a control token.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from deepinfer.recipe.prompt_texts import PROMPT_TEXTS

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
SYSTEM, USER, ASSISTANT = "<｜System｜>", "<｜User｜>", "<｜Assistant｜>"
THINK, THINK_END, DSML = "<think>", "</think>", "｜DSML｜"

EFFORT = "Reasoning Effort: {} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
_CONTROL_IN_TOOLS = re.compile(f"({THINK}|{THINK_END}|{DSML})")


@dataclass(frozen=True)
class Control:
    """One control token, by its spelling."""

    spelling: str


Piece = str | Control


@dataclass(frozen=True)
class Call:
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Turn:
    """One message.  ``role`` is system, user, assistant or tool."""

    role: str
    text: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()


@dataclass(frozen=True)
class Dialogue:
    turns: tuple[Turn, ...]
    tools: tuple[dict[str, Any], ...] = ()
    thinking: bool = False
    effort: int = 75
    response_format: dict[str, Any] | None = None


def _tool_pieces(tools: tuple[dict[str, Any], ...]) -> list[Piece]:
    pieces: list[Piece] = [
        Control(part) if _CONTROL_IN_TOOLS.fullmatch(part) else part
        for part in _CONTROL_IN_TOOLS.split(PROMPT_TEXTS.tools_v41)
    ]
    schemas = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return [*pieces, schemas + PROMPT_TEXTS.tools_tail]


def _call_pieces(calls: tuple[Call, ...]) -> list[Piece]:
    mark = Control(DSML)
    pieces: list[Piece] = ["\n\n<", mark, " calls>\n"]
    for call in calls:
        pieces += ["<", mark, f' invoke name="{call.name}">\n']
        for name, value in call.arguments.items():
            is_text = isinstance(value, str)
            shown = value if is_text else json.dumps(value, ensure_ascii=False)
            kind = "true" if is_text else "false"
            pieces += ["<", mark, f' parameter name="{name}" string="{kind}">{shown}</', mark, " parameter>\n"]
        pieces += ["</", mark, " invoke>\n"]
    return [*pieces, "</", mark, " calls>"]


def _assistant_pieces(turn: Turn, show_reasoning: bool) -> list[Piece]:
    pieces: list[Piece] = [Control(ASSISTANT)]
    if show_reasoning:
        pieces += [Control(THINK), turn.reasoning]
    pieces += [Control(THINK_END), turn.text]
    if turn.calls:
        pieces += _call_pieces(turn.calls)
    return [*pieces, Control(EOS)]


def _system_pieces(dialogue: Dialogue) -> list[Piece]:
    pieces: list[Piece] = [EFFORT.format(dialogue.effort)] if dialogue.thinking else []
    first = dialogue.turns[0]
    pieces += [first.text] if first.role == "system" else []
    if dialogue.tools:
        pieces += ["\n\n", *_tool_pieces(dialogue.tools)]
    if dialogue.response_format is not None:
        schema = json.dumps(dialogue.response_format, ensure_ascii=False)
        pieces += ["\n\n" + PROMPT_TEXTS.response_format + schema]
    return [Control(SYSTEM), *pieces] if pieces else []


def _joined(pieces: list[Piece]) -> list[Piece]:
    """Neighbouring strings as one: each span between control tokens is encoded as a whole."""
    out: list[Piece] = []
    for piece in pieces:
        if isinstance(piece, str) and out and isinstance(out[-1], str):
            out[-1] += piece
        elif piece != "":
            out.append(piece)
    return out


def render(dialogue: Dialogue) -> list[Piece]:
    """The whole dialogue, from the begin token to the last answer's end token.

    Reasoning of earlier turns is shown only when tools are declared, as the official encoder does; the last
    answer shows it in thinking mode always, since it is what the model is to write.
    """
    pieces: list[Piece] = [Control(BOS), *_system_pieces(dialogue)]
    turns = dialogue.turns[1:] if dialogue.turns[0].role == "system" else dialogue.turns
    last = max(i for i, turn in enumerate(turns) if turn.role == "assistant")
    previous = ""
    for i, turn in enumerate(turns):
        if turn.role == "assistant":
            show = dialogue.thinking and (bool(dialogue.tools) or i == last)
            pieces += _assistant_pieces(turn, show)
        else:
            text = f"<tool_result>{turn.text}</tool_result>" if turn.role == "tool" else turn.text
            pieces += ["\n\n" + text] if previous in ("user", "tool") else [Control(USER), text]
        previous = turn.role
    return _joined(pieces)
