"""Answers of the Responses API."""

from __future__ import annotations

from typing import Any

from deepinfer.recipe.answer import AnswerIdentity, Ending, Event, Finish, Usage
from deepinfer.recipe.conversation import ConvertedRequest
from deepinfer.recipe.responses_tools import split_name
from deepinfer.recipe.signals import CallBegan, CallPiece, ContentText, Part, ReasoningText, Signal

_INCOMPLETE = {
    Finish.LENGTH: "max_output_tokens",
    Finish.CONTENT_FILTER: "content_filter",
}
_BARE_INPUT = '"input"'


class ResponsesWriter:
    """Events of a response, and its object. An item closes when the next begins or the answer ends."""

    done_line: str | None = None

    def __init__(self, request: ConvertedRequest, identity: AnswerIdentity) -> None:
        self.identity = identity
        self.request = request
        self.created = identity.clock()
        self.items: list[dict[str, Any]] = []
        self.open = False
        self.sequence = 0
        self.response: dict[str, Any] = {}
        self.custom_input: _CustomInput | None = None

    def begin(self, usage: Usage, fingerprint: str | None) -> list[Event]:
        self.response = self._response("in_progress")
        shown = [
            self._event(f"response.{step}", response=self.response) for step in ("created", "in_progress")
        ]
        return shown

    def signal(self, signal: Signal, call_id: str | None) -> list[Event]:
        if isinstance(signal, ReasoningText):
            return self._text("reasoning", signal.text, {})
        if isinstance(signal, ContentText):
            return self._text("message", signal.text, {"logprobs": signal.logprobs})
        if isinstance(signal, CallBegan):
            return self._begin_call(signal.name, call_id)
        return self._call_piece(signal)

    def end(self, ending: Ending, usage: Usage) -> list[Event]:
        reason = _INCOMPLETE.get(ending.finish)
        status = "incomplete" if reason else "completed"
        events = self._close(status)
        self.response = {
            **self._response(status),
            "completed_at": self.identity.clock(),
            "incomplete_details": {"reason": reason} if reason else None,
            "output": self.items,
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.cached_tokens},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            },
        }
        return [*events, self._event(f"response.{status}", response=self.response)]

    def fail(self, message: str, *, overloaded: bool) -> list[Event]:
        events = self._close("incomplete")
        error = {"code": "server_error", "message": message}
        self.response = {**self._response("failed"), "error": error, "output": self.items}
        return [*events, self._event("response.failed", response=self.response)]

    def body(self) -> dict[str, Any]:
        return self.response

    def _event(self, name: str, **data: Any) -> Event:
        event = Event(name, {"type": name, **data, "sequence_number": self.sequence})
        self.sequence += 1
        return event

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    def _item_id(self, prefix: str) -> str:
        return f"{prefix}_{self.identity.id}_{len(self.items)}"

    def _start(self, item: dict[str, Any]) -> list[Event]:
        events = self._close("completed")
        self.items.append(item)
        self.open = True
        events.append(
            self._event("response.output_item.added", item=dict(item), output_index=len(self.items) - 1)
        )
        return events

    def _text(self, kind: str, text: str, extra: dict[str, Any]) -> list[Event]:
        events: list[Event] = []
        if not self.open or self.items[-1]["type"] != kind:
            events = self._start_text(kind)
        part = self.items[-1]["content"][0]
        part["text"] += text
        part.get("logprobs", []).extend(extra.get("logprobs", []))
        name = f"response.{part['type']}.delta"
        return [*events, self._event(name, content_index=0, delta=text, **self._place(), **extra)]

    def _start_text(self, kind: str) -> list[Event]:
        item: dict[str, Any] = {"type": kind, "status": "in_progress", "content": []}
        if kind == "reasoning":
            part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
            mark = f"{self.identity.id}-{len(self.items)}"
            item |= {"id": self._item_id("rs"), "summary": [], "encrypted_content": mark}
        else:
            part = {"type": "output_text", "annotations": [], "logprobs": [], "text": ""}
            item |= {"id": self._item_id("msg"), "role": "assistant", "phase": "final_answer"}
        events = self._start(item)
        item["content"] = [part]
        shown = {**part, "logprobs": []} if "logprobs" in part else dict(part)
        events.append(
            self._event("response.content_part.added", content_index=0, part=shown, **self._place())
        )
        return events

    def _begin_call(self, name: str, call_id: str | None) -> list[Event]:
        if self.open and self.items[-1]["type"] == "message":
            self.items[-1]["phase"] = "commentary"
        item: dict[str, Any] = {"status": "in_progress", "call_id": call_id}
        # the item is numbered after the one it closes
        if name in self.request.custom_tools:
            self.custom_input = _CustomInput()
            item |= {"type": "custom_tool_call", "id": self._item_id("ctc"), "name": name, "input": ""}
        else:
            self.custom_input = None
            namespace, bare = split_name(name)
            item |= {"type": "function_call", "id": self._item_id("fc"), "name": bare, "arguments": ""}
            if namespace is not None:
                item["namespace"] = namespace
        return self._start(item)

    def _call_piece(self, piece: CallPiece) -> list[Event]:
        item = self.items[-1]
        if self.custom_input is not None:
            text, key, name = self.custom_input.take(piece), "input", "custom_tool_call_input"
        else:
            text, key, name = piece.json, "arguments", "function_call_arguments"
        if not text:
            return []
        item[key] += text
        return [self._event(f"response.{name}.delta", delta=text, **self._place())]

    def _close(self, status: str) -> list[Event]:
        if not self.open:
            return []
        self.open = False
        item = self.items[-1]
        item["status"] = status
        events: list[Event] = []
        if "content" in item:
            part = item["content"][0]
            done = {key: part[key] for key in ("logprobs", "text") if key in part}
            events.append(
                self._event(f"response.{part['type']}.done", content_index=0, **self._place(), **done)
            )
            events.append(
                self._event("response.content_part.done", content_index=0, part=part, **self._place())
            )
        elif item["type"] == "function_call":
            done = {"arguments": item["arguments"]}
            events.append(self._event("response.function_call_arguments.done", **self._place(), **done))
        else:
            done = {"input": item["input"]}
            events.append(self._event("response.custom_tool_call_input.done", **self._place(), **done))
        index = len(self.items) - 1
        events.append(self._event("response.output_item.done", item=item, output_index=index))
        return events

    def _response(self, status: str) -> dict[str, Any]:
        """The response object: echoed settings, and fixed values for what is not supported."""
        return {
            "id": self.identity.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": False,
            "completed_at": None,
            "content_filters": None,
            "error": None,
            "frequency_penalty": 0.0,
            "incomplete_details": None,
            "max_tool_calls": None,
            "model": self.identity.model,
            "moderation": None,
            "output": [],
            "parallel_tool_calls": True,
            "presence_penalty": 0.0,
            "previous_response_id": None,
            "prompt_cache_key": None,
            "prompt_cache_retention": None,
            "safety_identifier": None,
            "service_tier": "default",
            "store": False,
            "truncation": "disabled",
            "usage": None,
            "metadata": {},
            **self.request.echo,
        }


class _CustomInput:
    """The bare text of a custom tool out of a call's pieces; the JSON where the parameter is not `input`."""

    def __init__(self) -> None:
        self._name = ""
        self._json = ""
        self._bare: bool | None = None
        self._ended = False

    def take(self, piece: CallPiece) -> str:
        """What this piece adds to the input."""
        if self._bare is None:
            self._json += piece.json
            if piece.part is Part.NAME:
                self._name += piece.raw
            if piece.part is Part.VALUE_BEGIN:
                self._bare = self._name == _BARE_INPUT
                return "" if self._bare else self._json
            if piece.part is Part.END:
                self._bare = False
                return self._json
            return ""
        if not self._bare:
            return piece.json
        self._ended = self._ended or piece.part is Part.VALUE_END
        return piece.raw if piece.part is Part.VALUE and not self._ended else ""
