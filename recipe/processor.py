"""From backend chunks to the events and the body of an API."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

from deepinfer.errors import InternalError
from deepinfer.recipe.answer import AnswerIdentity, Ending, Event, Finish, Usage, Writer
from deepinfer.recipe.chat_writer import ChatWriter
from deepinfer.recipe.conversation import ConvertedRequest
from deepinfer.recipe.detokenize import StreamDecoder
from deepinfer.recipe.dialect import DSML, THINK_END
from deepinfer.recipe.ledger import TokenLedger
from deepinfer.recipe.machine import AnswerMachine
from deepinfer.recipe.messages_writer import MessagesWriter
from deepinfer.recipe.responses_writer import ResponsesWriter
from deepinfer.recipe.signals import CallBegan, Logprobs, ReasoningText, Repair, Signal
from deepinfer.recipe.tokenizer import RecipeTokenizer
from deepinfer.recipe.window import Marker

TokenLogprob: TypeAlias = tuple[float, Sequence[tuple[int, float]]]
"""Log-probability of the token, and (id, log-probability) of its rivals."""

OVERLOADED_MESSAGE = "The server ran out of resources while it answered; try again later."
_WRITERS: dict[str, Callable[[ConvertedRequest, AnswerIdentity], Writer]] = {
    "chat": ChatWriter,
    "messages": MessagesWriter,
    "responses": ResponsesWriter,
}


class StreamProcessor:
    """Reads one answer and writes it as the API of its request.

    Call `ready` once, then `text` or `tokens` as they come, then `finish`; each returns the events due. An
    answer comes as text or as ids, never both.

    Args:
        tokenizer: needed for ids; with text it lets the reasoning tokens be counted.
        repair: read malformed calls for what they mean; by default they pass exactly as the official package
            passes them.
    """

    def __init__(
        self,
        request: ConvertedRequest,
        identity: AnswerIdentity,
        *,
        tokenizer: RecipeTokenizer | None = None,
        repair: bool = False,
    ) -> None:
        self.request = request
        self.identity = identity
        self.usage = Usage()
        self._writer: Writer = _WRITERS[request.api](request, identity)
        self._tokenizer = tokenizer
        self._repair = repair
        self._ledger = TokenLedger()
        self._machine: AnswerMachine | None = None
        self._decoder = StreamDecoder(tokenizer) if tokenizer is not None else None
        self._markers: dict[int, Marker] = {}
        if tokenizer is not None:
            spellings = {Marker.THINK_END: THINK_END, Marker.DSML: DSML}
            self._markers = {tokenizer.special_id(text): marker for marker, text in spellings.items()}
        self._waiting: tuple[int, Logprobs] = (0, [])
        self._reasoning = ""
        self._by_id = False
        self._ended = False

    @property
    def stopped_early(self) -> bool:
        """A stop sequence matched: nothing that follows is shown, so the backend should stop."""
        return self._machine is not None and self._machine.stop_sequence is not None

    @property
    def repairs(self) -> tuple[Repair, ...]:
        """What repair mode has corrected so far."""
        return tuple(self._machine.repairs) if self._machine else ()

    @property
    def done_line(self) -> str | None:
        """The data of the line that ends the stream of this API, if it has one."""
        return self._writer.done_line

    def ready(
        self, prompt_tokens: int, cached_tokens: int = 0, fingerprint: str | None = None
    ) -> list[Event]:
        """The prompt is in: its length, how much of it was cached, and the backend's fingerprint."""
        self.usage.prompt_tokens = prompt_tokens
        self.usage.cached_tokens = cached_tokens
        return self._writer.begin(self.usage, fingerprint)

    def text(self, text: str, token_count: int = 0) -> list[Event]:
        """A piece of text, made of `token_count` tokens."""
        machine = self._start(by_id=False)
        if self.stopped_early or self._ended:
            return []
        self.usage.completion_tokens += token_count
        machine.window.append(text)
        return self._write(machine.run())

    def tokens(self, ids: Sequence[int], logprobs: Sequence[TokenLogprob | None] = ()) -> list[Event]:
        """Generated ids, with a log-probability for each or for none."""
        machine = self._start(by_id=True)
        events: list[Event] = []
        for place, token_id in enumerate(ids):
            if self.stopped_early or self._ended:
                break
            self._push(machine, token_id, logprobs[place] if place < len(logprobs) else None)
            if self.request.parsing.stop_sequences:
                events += self._write(machine.run())
        return events + self._write(machine.run())

    def finish(self, reason: Finish | str = Finish.STOP) -> list[Event]:
        """The answer is over; a second call yields nothing."""
        if self._ended:
            return []
        machine = self._machine or self._start(by_id=self._tokenizer is not None)
        finish = Finish.STOP if self.stopped_early else Finish(reason)
        if self._repair and self._decoder is not None and self._by_id:
            self._append(machine, self._decoder.finish(), None)
        events = self._write(machine.finish(complete=finish is Finish.STOP))
        self._ended = True
        if finish is Finish.OVERLOADED and self.request.api != "chat":
            # only Chat Completions has a finish reason for this
            return events + self._writer.fail(OVERLOADED_MESSAGE, overloaded=True)
        self.usage.reasoning_tokens = self._reasoning_tokens()
        ending = Ending(finish, machine.stop_sequence, machine.calls > 0)
        return events + self._writer.end(ending, self.usage)

    def fail(self, message: str, *, overloaded: bool = False) -> list[Event]:
        """The answer cannot be completed: the API's own error event, and its body for a client that does not stream.

        Args:
            overloaded: the server lacks resources, so that a later try may succeed.
        """
        if self._ended:
            return []
        self._ended = True
        return self._writer.fail(message, overloaded=overloaded)

    def body(self) -> dict[str, Any]:
        """The answer in one piece, after `finish` or `fail`."""
        if not self._ended:
            raise InternalError("the body of an answer exists only after finish()")
        return self._writer.body()

    def _start(self, *, by_id: bool) -> AnswerMachine:
        if self._machine is None:
            if by_id and self._decoder is None:
                raise InternalError("token ids need a tokenizer")
            self._by_id = by_id
            self._machine = AnswerMachine(
                self.request.parsing,
                self._ledger,
                by_id=by_id,
                repair=self._repair,
                tools=self.request.conversation.tools,
            )
        elif self._by_id != by_id:
            raise InternalError("one answer comes as text or as ids, not both")
        return self._machine

    def _push(self, machine: AnswerMachine, token_id: int, logprob: TokenLogprob | None) -> None:
        assert self._decoder is not None and self._tokenizer is not None
        marker = self._markers.get(token_id)
        entry = [self._logprob_entry(token_id, logprob)] if logprob is not None else []
        if self._tokenizer.is_special(token_id):
            # what waits for the rest of a character has to go out before the control token
            self._append(machine, self._decoder.finish(), None)
        text = self._decoder.push(token_id)
        count, waiting = self._waiting
        self._waiting = (count + 1, waiting + entry)
        self._append(machine, text, marker)

    def _append(self, machine: AnswerMachine, text: str, marker: Marker | None) -> None:
        """Text, and with it the tokens that waited for it."""
        if not text:
            return
        count, entries = self._waiting
        self._waiting = (0, [])
        self._ledger.add(len(text), count, entries)
        self.usage.completion_tokens += count
        if marker is not None:
            machine.window.append_marker(marker)
        else:
            machine.window.append(text)

    def _logprob_entry(self, token_id: int, logprob: TokenLogprob) -> dict[str, Any]:
        value, rivals = logprob
        shown = [self._shown_token(rival, rival_value) for rival, rival_value in rivals]
        return {**self._shown_token(token_id, value), "top_logprobs": shown}

    def _shown_token(self, token_id: int, value: float) -> dict[str, Any]:
        assert self._tokenizer is not None
        data = self._tokenizer.token_bytes(token_id) or b""
        return {"token": self._tokenizer.token_text(token_id), "logprob": value, "bytes": list(data)}

    def _write(self, signals: Iterable[Signal]) -> list[Event]:
        events: list[Event] = []
        for signal in signals:
            call_id = None
            if isinstance(signal, CallBegan):
                assert self._machine is not None
                empty = self.request.conversation.thinking and not self._machine.has_reasoning
                call_id = self.identity.call_id(signal.index, empty_thinking=empty)
            elif isinstance(signal, ReasoningText) and not self._by_id:
                self._reasoning += signal.text
            events += self._writer.signal(signal, call_id)
        return events

    def _reasoning_tokens(self) -> int | None:
        if self._by_id:
            return self._ledger.reasoning_tokens
        if self._tokenizer is None:
            return None
        return len(self._tokenizer.encode_with_special(self._reasoning))
