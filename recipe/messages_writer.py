"""Answers of the Messages API."""

from __future__ import annotations

from typing import Any

from deepinfer.recipe.answer import AnswerIdentity, Ending, Event, Finish, Usage
from deepinfer.recipe.conversation import ConvertedRequest
from deepinfer.recipe.json_text import parse_json
from deepinfer.recipe.signals import CallBegan, ContentText, ReasoningText, Signal

_STOP_REASONS = {
    Finish.LENGTH: "max_tokens",
    Finish.CONTENT_FILTER: "refusal",
}


class MessagesWriter:
    """Events of a message, and its body. A thinking-mode message always begins with a thinking block."""

    done_line: str | None = None

    def __init__(self, request: ConvertedRequest, identity: AnswerIdentity) -> None:
        self.identity = identity
        self.thinking = request.conversation.thinking
        self.blocks: list[dict[str, Any]] = []
        self.arguments: dict[int, str] = {}
        self.open = False
        self.message: dict[str, Any] = {}

    def begin(self, usage: Usage, fingerprint: str | None) -> list[Event]:
        self.message = {
            "id": self.identity.id,
            "type": "message",
            "role": "assistant",
            "model": self.identity.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(usage, 0),
        }
        events = [_event("message_start", message=dict(self.message))]
        if self.thinking:
            events += self._start({"type": "thinking", "thinking": "", "signature": ""})
        return events

    def signal(self, signal: Signal, call_id: str | None) -> list[Event]:
        if isinstance(signal, ReasoningText):
            self.blocks[-1]["thinking"] += signal.text
            return [self._delta(type="thinking_delta", thinking=signal.text)]
        if isinstance(signal, ContentText):
            events = [] if self._is_open("text") else self._start({"type": "text", "text": ""})
            self.blocks[-1]["text"] += signal.text
            return [*events, self._delta(type="text_delta", text=signal.text)]
        if isinstance(signal, CallBegan):
            events = self._start({"type": "tool_use", "id": call_id, "name": signal.name, "input": {}})
            self.arguments[len(self.blocks) - 1] = ""
            return events
        if not signal.json:
            return []
        self.arguments[len(self.blocks) - 1] += signal.json
        return [self._delta(type="input_json_delta", partial_json=signal.json)]

    def end(self, ending: Ending, usage: Usage) -> list[Event]:
        events = self._stop()
        if ending.finish in _STOP_REASONS:
            reason = _STOP_REASONS[ending.finish]
        elif ending.stop_sequence is not None:
            reason = "stop_sequence"
        else:
            reason = "tool_use" if ending.has_calls else "end_turn"
        delta = {"stop_reason": reason, "stop_sequence": ending.stop_sequence}
        shown = _usage(usage, usage.completion_tokens)
        self.message = {**self.message, "content": self._content(), **delta, "usage": shown}
        return [*events, _event("message_delta", delta=delta, usage=shown), _event("message_stop")]

    def fail(self, message: str, *, overloaded: bool) -> list[Event]:
        error = {"type": "overloaded_error" if overloaded else "api_error", "message": message}
        event = _event("error", error=error)
        self.message = event.data
        return [event]

    def body(self) -> dict[str, Any]:
        return self.message

    def _content(self) -> list[dict[str, Any]]:
        content = [dict(block) for block in self.blocks]
        for place, arguments in self.arguments.items():
            content[place]["input"] = _input(arguments)
        return content

    def _is_open(self, kind: str) -> bool:
        return self.open and self.blocks[-1]["type"] == kind

    def _start(self, block: dict[str, Any]) -> list[Event]:
        events = self._stop()
        events.append(_event("content_block_start", index=len(self.blocks), content_block=dict(block)))
        if not self.blocks:
            events.append(_event("ping"))
        self.blocks.append(block)
        self.open = True
        return events

    def _stop(self) -> list[Event]:
        if not self.open:
            return []
        events: list[Event] = []
        if self.blocks[-1]["type"] == "thinking":
            self.blocks[-1]["signature"] = self.identity.id
            events.append(self._delta(type="signature_delta", signature=self.identity.id))
        self.open = False
        return [*events, _event("content_block_stop", index=len(self.blocks) - 1)]

    def _delta(self, **delta: str) -> Event:
        return _event("content_block_delta", index=len(self.blocks) - 1, delta=delta)


def _event(name: str, **data: Any) -> Event:
    return Event(name, {"type": name, **data})


def _usage(usage: Usage, output_tokens: int) -> dict[str, Any]:
    return {
        "input_tokens": usage.missed_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": output_tokens,
        "service_tier": "standard",
    }


def _input(arguments: str) -> dict[str, Any]:
    """The arguments as an object; what the model left unfinished or malformed is an empty one."""
    try:
        value = parse_json(arguments)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
