"""Answers of the Chat Completions API."""

from __future__ import annotations

from typing import Any

from deepinfer.recipe.answer import AnswerIdentity, Ending, Event, Finish, Usage
from deepinfer.recipe.conversation import ConvertedRequest
from deepinfer.recipe.signals import (
    CallBegan,
    CallPiece,
    ContentText,
    Logprobs,
    ReasoningText,
    Signal,
)

CONTENT, REASONING = "content", "reasoning_content"


class ChatWriter:
    """Chunks of a chat answer, and its body."""

    done_line: str | None = "[DONE]"

    def __init__(self, request: ConvertedRequest, identity: AnswerIdentity) -> None:
        self.identity = identity
        self.thinking = request.conversation.thinking
        self.include_usage = request.include_usage
        self.created = identity.clock()
        self.fingerprint: str | None = None
        self.text = {CONTENT: "", REASONING: ""}
        self.logprobs: dict[str, Logprobs] = {}
        self.calls: list[dict[str, Any]] = []
        self.finish_reason: str | None = None
        self.usage: dict[str, Any] = {}
        self.error: dict[str, Any] | None = None

    def begin(self, usage: Usage, fingerprint: str | None) -> list[Event]:
        self.fingerprint = fingerprint
        delta = {"role": "assistant", **self._delta(CONTENT, None if self.thinking else "")}
        if self.thinking:
            delta[REASONING] = ""
        return [self._chunk(delta)]

    def signal(self, signal: Signal, call_id: str | None) -> list[Event]:
        if isinstance(signal, ReasoningText):
            return self._text(REASONING, signal.text, signal.logprobs)
        if isinstance(signal, ContentText):
            return self._text(CONTENT, signal.text, signal.logprobs)
        if isinstance(signal, CallBegan):
            function = {"name": signal.name, "arguments": ""}
            call = {"index": signal.index, "id": call_id, "type": "function", "function": function}
            self.calls.append({**call, "function": dict(function)})
            return [self._chunk({"tool_calls": [call]})]
        return self._arguments(signal)

    def _text(self, key: str, text: str, logprobs: Logprobs) -> list[Event]:
        self.text[key] += text
        if logprobs:
            self.logprobs.setdefault(key, []).extend(logprobs)
        return [self._chunk(self._delta(key, text), {key: logprobs} if logprobs else None)]

    def _arguments(self, piece: CallPiece) -> list[Event]:
        if not piece.json:
            return []
        self.calls[piece.index]["function"]["arguments"] += piece.json
        return [self._chunk({"tool_calls": [{"index": piece.index, "function": {"arguments": piece.json}}]})]

    def end(self, ending: Ending, usage: Usage) -> list[Event]:
        called = ending.has_calls and ending.finish is Finish.STOP
        self.finish_reason = "tool_calls" if called else ending.finish.value
        self.usage = self._usage(usage)
        event = self._chunk(self._delta(CONTENT, ""), finish=self.finish_reason)
        event.data["usage"] = self.usage
        return [event]

    def fail(self, message: str, *, overloaded: bool) -> list[Event]:
        code = "overloaded" if overloaded else "server_error"
        self.error = {"error": {"message": message, "type": "server_error", "param": None, "code": code}}
        return [Event(None, self.error)]

    def body(self) -> dict[str, Any]:
        if self.error is not None:
            return self.error
        message: dict[str, Any] = {"role": "assistant", "content": self.text[CONTENT]}
        if self.thinking:
            message[REASONING] = self.text[REASONING]
        if self.calls:
            message["tool_calls"] = self.calls
        choice = {
            "index": 0,
            "message": message,
            "logprobs": self.logprobs or None,
            "finish_reason": self.finish_reason,
        }
        return {
            "id": self.identity.id,
            "object": "chat.completion",
            "created": self.created,
            "model": self.identity.model,
            "choices": [choice],
            "usage": self.usage,
            "system_fingerprint": self.fingerprint,
        }

    def _delta(self, key: str, text: str | None) -> dict[str, Any]:
        """A delta with both channels in thinking mode, one of them null; only content in chat mode."""
        if not self.thinking:
            return {key: text}
        return {CONTENT: text if key == CONTENT else None, REASONING: text if key == REASONING else None}

    def _chunk(
        self, delta: dict[str, Any], logprobs: dict[str, Logprobs] | None = None, finish: str | None = None
    ) -> Event:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        data: dict[str, Any] = {
            "id": self.identity.id,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.identity.model,
            "system_fingerprint": self.fingerprint,
            "choices": [choice],
        }
        if self.include_usage:
            data["usage"] = None
        return Event(None, data)

    def _usage(self, usage: Usage) -> dict[str, Any]:
        shown: dict[str, Any] = {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        }
        if self.thinking and usage.reasoning_tokens is not None:
            shown["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning_tokens}
        shown["prompt_cache_hit_tokens"] = usage.cached_tokens
        shown["prompt_cache_miss_tokens"] = usage.missed_tokens
        return shown
