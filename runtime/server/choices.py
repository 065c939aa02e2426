"""Several answers to one request, each a choice of the same stream and body."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deepinfer.recipe import Event
from deepinfer.recipe.fields import Field
from deepinfer.runtime.server.answer import Answer
from deepinfer.runtime.server.failures import HttpFailure
from deepinfer.runtime.server.wire import Update


def choices_asked(root: Field, most: int) -> int:
    """Answers that a Chat or plain completions request asks for.

    ``most``: sequences that run at the same time.
    """
    asked = root.integer_at("n", 31)
    if asked is not None and not 1 <= asked <= most:
        raise HttpFailure(400, f"n must be between 1 and {most}, which this engine runs at the same time; found "
                               f"{asked}.", code="invalid_request_error", param="n")
    return asked or 1


class ChoicesAnswer:
    """Answers of an API with `choices`, as one. Usage counts each prompt once and comes with the answer that ends last.

    ``per_prompt``: answers to each prompt; those to one prompt are neighbours. ``include_usage``: whether a chunk
    without usage says so.
    """

    def __init__(self, answers: Sequence[Answer], per_prompt: int, *, include_usage: bool) -> None:
        self._answers, self._per_prompt, self._include_usage = list(answers), per_prompt, include_usage
        self._begun: set[int] = set()  # prompts that the engine has begun
        self._usages: dict[int, dict[str, Any]] = {}
        self._failure: Answer | None = None
        self.done_line = answers[0].done_line

    def is_over(self) -> bool:
        return self._failure is not None or all(a.is_over() for a in self._answers)

    def begin(self, cached_tokens: int) -> list[Event]:
        return []  # each prompt begins with its first update, which knows how much of it was cached

    def push(self, update: Update) -> list[Event]:
        shown = self._begin(update)
        answer = self._answers[update.index]
        return shown if answer.is_over() else shown + self._placed(update.index, answer.push(update))

    def _begin(self, update: Update) -> list[Event]:
        prompt, count = update.index // self._per_prompt, self._per_prompt
        if prompt in self._begun:
            return []
        self._begun.add(prompt)
        return [e for i in range(prompt * count, (prompt + 1) * count)
                for e in self._placed(i, self._answers[i].begin(update.cached))]

    def fail(self, message: str, *, overloaded: bool) -> list[Event]:
        self._failure = self._answers[0]
        begun = [] if 0 in self._begun else self._failure.begin(0)
        return begun + self._failure.fail(message, overloaded=overloaded)

    def body(self) -> dict[str, Any]:
        if self._failure is not None:
            return self._failure.body()
        bodies = [a.body() for a in self._answers]
        found = {**bodies[0], "usage": self._sum([b["usage"] for b in bodies]),
                 "choices": [{**b["choices"][0], "index": i} for i, b in enumerate(bodies)]}
        return found | ({"debug": [b["debug"] for b in bodies]} if "debug" in found else {})

    def _placed(self, index: int, events: list[Event]) -> list[Event]:
        """The events of one answer in the stream of all."""
        shown = []
        for event in events:
            data = event.data
            for choice in data["choices"]:
                choice["index"] = index
            if data.get("usage") is not None:
                self._usages[index] = data.pop("usage")
                if len(self._usages) == len(self._answers):
                    data["usage"] = self._sum([self._usages[i] for i in range(len(self._answers))])
                elif not data["choices"]:
                    continue
                elif self._include_usage:
                    data["usage"] = None
            shown.append(event)
        return shown


    def _sum(self, usages: list[dict[str, Any]]) -> dict[str, Any]:
        """Usage of all prompts, each once, and all answers."""
        prompts = usages[:: self._per_prompt]
        found = dict(usages[0])
        for name in ("prompt_tokens", "prompt_cache_hit_tokens", "prompt_cache_miss_tokens"):
            if name in found:
                found[name] = sum(u[name] for u in prompts)
        if "prompt_tokens_details" in found:
            cached = sum(u["prompt_tokens_details"]["cached_tokens"] for u in prompts)
            found["prompt_tokens_details"] = {"cached_tokens": cached}
        found["completion_tokens"] = sum(u["completion_tokens"] for u in usages)
        found["total_tokens"] = found["prompt_tokens"] + found["completion_tokens"]
        if "completion_tokens_details" in found:
            reasoning = sum(u["completion_tokens_details"]["reasoning_tokens"] for u in usages)
            found["completion_tokens_details"] = {"reasoning_tokens": reasoning}
        return found
