"""The loop of the engine process: take messages, run a step, send what it brought."""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import zmq
from numpy.typing import NDArray

from deepinfer.codegen.cache import Cache
from deepinfer.errors import RequestError
from deepinfer.runtime.engine_core import EngineCore
from deepinfer.runtime.metrics import Counter, Gauge, Histogram, Metrics
from deepinfer.runtime.outputs import CompletionOutput, RequestMetrics, TokenLogprobs
from deepinfer.runtime.sampling_params import SamplingParams
from deepinfer.runtime.sequence import Request, Sequence
from deepinfer.runtime.server import wire
from deepinfer.runtime.server.news import TokenNews
from deepinfer.runtime.server.trace import StepTrace, TracedEngine
from deepinfer.runtime.structured.compiler import Grammar

_IDLE_WAIT_MS = 1000
_COMPILE_WAIT_MS = 2  # between two looks at a form that is being compiled while nothing else is to do
_SNAPSHOT_SECONDS = 0.5  # between two reports of a busy engine; an idle one reports once


class EngineLoop:
    """Serves front ends from one engine core; everything happens in the caller's thread.

    ``socket``: a PAIR socket whose other end is the first front end, which carries what the others say. What goes there
    has the number of a front end in front, or nothing for all of them. ``trace``: of the first steps, or None.
    """

    def __init__(self, core: EngineCore, socket: zmq.Socket[bytes], trace: StepTrace | None = None) -> None:
        self.core, self.socket = core, socket
        self.trace = trace or StepTrace(0, Path())
        if trace is not None:
            core.engine = TracedEngine(core.engine, trace)
        self._open: dict[int, _Open] = {}
        self._single: dict[int, _Open] = {}  # those that are looked at one by one
        self._news = TokenNews(core.table)
        self._compiling: dict[int, _Compiling] = {}
        self._stopping = False
        self._reported, self._reported_free = 0.0, 0
        self._made = Cache.made  # an engine that was compiled in this process was so before it serves

    def run(self) -> None:
        """Serve until the front end says stop. An engine that fails raises; nothing is served after that."""
        self._report()
        while not self._stopping:
            if self._open:
                with self.trace.span("loop", "messages"):
                    self._take_messages(0)
            else:
                self._take_messages(_COMPILE_WAIT_MS if self._compiling else _IDLE_WAIT_MS)
                self._settle_books()
            self._take_compiled()
            if self._open:
                self._step()
        for entry in self._open.values():
            self.core.abort(entry.request.request_id)
        if self.trace.active:
            self.trace.write()

    # ---- messages -----------------------------------------------------------------------------------------------
    def _take_messages(self, wait_ms: int) -> None:
        while self.socket.poll(wait_ms):
            message = wire.decode_to_engine(self.socket.recv())
            wait_ms = 0
            if isinstance(message, wire.Submit):
                self._submit(message)
            elif isinstance(message, wire.Abort):
                self._compiling.pop(message.id, None)
                self._abort([message.id])
            elif isinstance(message, wire.Left):
                for key in [key for key in self._compiling if wire.front_end_of(key) == message.front_end]:
                    del self._compiling[key]
                self._abort([key for key in self._open if wire.front_end_of(key) == message.front_end])
            else:
                self._stopping = True
                return

    def _abort(self, keys: list[int]) -> None:
        for key in keys:
            if (entry := self._open.get(key)) is not None:
                self.core.abort(entry.request.request_id)

    def _submit(self, message: wire.Submit) -> None:
        """Queue a request. A form of the answer is compiled first, by a thread beside the loop."""
        try:
            params = SamplingParams(**message.sampling, detokenize=False)
            if params.form is None:
                self._start(message, params)
            else:
                self._compiling[message.id] = _Compiling(message, params, self.core.grammars.submit(params.form))
        except RequestError as error:
            self._refuse(message.id, error)

    def _take_compiled(self) -> None:
        """Queue requests whose form is ready, or refuse them."""
        for key in [key for key, entry in self._compiling.items() if entry.grammar.done()]:
            entry = self._compiling.pop(key)
            try:
                entry.grammar.result()
                self._start(entry.message, entry.params)
            except RequestError as error:
                self._refuse(key, error)

    def _start(self, message: wire.Submit, params: SamplingParams) -> None:
        request = self.core.make(str(message.id), wire.unpack_ids(message.prompt), params, priority=message.priority)
        self.core.add(request)
        self._open[message.id] = self._single[message.id] = _Open(request, message.debug)
        self.trace.request(message.id, begins=True, prompt_tokens=len(request.prompt_ids))

    def _refuse(self, key: int, error: RequestError) -> None:
        self._send([wire.Update(key, [], finish="refused", error=str(error), last=True)])

    # ---- steps --------------------------------------------------------------------------------------------------
    def _step(self) -> None:
        try:
            if self.core.requests:
                with self.trace.span("loop", "step", requests=len(self.core.requests)):
                    self.core.step()
        finally:
            with self.trace.span("loop", "send"):
                self._flush()
        self.trace.stepped()
        if not self._open:
            self.core.settle()
        if not self._open or time.monotonic() - self._reported > _SNAPSHOT_SECONDS:
            self._report()

    def _flush(self) -> None:
        """Send what is new. Requests of which only tokens are wanted are followed in columns, from their first token on
        and as long as they run; the others are looked at one by one."""
        for key, sent in self._news.gone():
            self._open[key].sent(sent)
            self._single[key] = self._open[key]
        updates = []
        for key, entry in list(self._single.items()):
            found = entry.updates(key)
            updates += found
            if found and not found[-1].last and (s := entry.plain) is not None and self._news.follow(
                    key, s, len(s.output.token_ids)):
                del self._single[key]
        if len(self._open) == sum(u.last for u in updates):
            self._report()  # who reads the metrics after the last answer finds it there
        keys, counts, tokens = self._news.take()
        if updates or len(keys):
            self._send(updates, keys, counts, tokens)
        for u in updates:
            if u.last:
                del self._open[u.id], self._single[u.id]
                self.trace.request(u.id, begins=False, finish=u.finish)

    def _send(self, updates: list[wire.Update], keys: NDArray[np.int64] | None = None,
              counts: NDArray[np.int64] | None = None, tokens: NDArray[np.int64] | None = None) -> None:
        """To each front end what is its own. ``keys``, ``counts``, ``tokens``: see `wire.Step`."""
        found: dict[int, list[wire.Update]] = {}
        for u in updates:
            found.setdefault(wire.front_end_of(u.id), []).append(u)
        packed: dict[int, tuple[bytes, bytes, bytes]] = {}
        if keys is not None and counts is not None and tokens is not None and len(keys):
            whose = wire.front_end_of(keys)
            for front_end in np.unique(whose).tolist():
                its = whose == front_end
                packed[front_end] = (keys[its].astype("<i8").tobytes(), wire.pack_ids(counts[its]),
                                     wire.pack_ids(tokens[np.repeat(its, counts)]))
        for front_end in found.keys() | packed.keys():
            step = wire.Step(found.get(front_end, []), *packed.get(front_end, ()))
            self.socket.send_multipart([str(front_end).encode(), wire.encode(step)])

    def _settle_books(self) -> None:
        """Let go of blocks that a store has taken meanwhile."""
        if not self._open and self._free() != self._reported_free:
            self._report()

    def _free(self) -> int:
        """Blocks that a request could have."""
        with self.core.lock:
            self.core.prefix.evict(0)
            return self.core.memory.blocks.free + self.core.prefix.evictable

    def _report(self) -> None:
        self._reported, self._reported_free = time.monotonic(), self._free()
        self.core.gauges()
        self.core.metrics.compiles.values[""] = Cache.made - self._made
        scheduler = self.core.scheduler
        tell_all(self.socket, wire.Snapshot(
            snapshot(self.core.metrics), len(scheduler.running), len(scheduler.waiting), self._reported_free))


def tell_all(socket: zmq.Socket[bytes], message: wire.FromEngine) -> None:
    """A message for every front end."""
    socket.send_multipart([b"", wire.encode(message)])


@dataclass(frozen=True)
class _Compiling:
    """A request that waits for its form."""

    message: wire.Submit
    params: SamplingParams
    grammar: Future[Grammar]


class _Open:
    """A request that is being answered and how much of each answer was sent."""

    def __init__(self, request: Request, debug: bool) -> None:
        self.request, self._debug = request, debug
        self._sent = [0] * len(request.outputs)
        self._going_on = list(range(len(request.outputs)))

    @property
    def plain(self) -> Sequence | None:
        """The answer, if it is the only one and nothing but its tokens is wanted while it goes on."""
        r = self.request
        alone = len(r.outputs) == 1 and r.params.logprobs is None and not self._debug
        return r.sequences[0] if alone and r.sequences else None

    def sent(self, tokens: int) -> None:
        """So many tokens of the only answer were sent."""
        self._sent[0] = tokens

    def updates(self, key: int) -> list[wire.Update]:
        """News since the last call."""
        r, found, ended = self.request, [], False
        for s in r.sequences:
            s.pull()
        for index in self._going_on:
            out, first = r.outputs[index], self._sent[index]
            count = len(out.token_ids)
            if count > first or out.finish_reason is not None:
                found.append(self._update(key, out, first))
                self._sent[index] = count
                ended |= out.finish_reason is not None
        if ended:
            self._going_on = [i for i in self._going_on if r.outputs[i].finish_reason is None]
            if not self._going_on:
                found[-1] = msgspec.structs.replace(found[-1], last=True, times=_times(r.metrics))
        return found

    def _update(self, key: int, out: CompletionOutput, first: int) -> wire.Update:
        r, tokens = self.request, out.token_ids[first:]
        if out.finish_reason == "stop" and tokens and tokens[-1] in r.ends:
            tokens.pop()
        logprobs = prompt = None
        if out.logprobs is not None:
            logprobs = [_logprob(out.logprobs[first + i], t, r.params.logprobs) for i, t in enumerate(tokens)]
        if first == 0 and r.prompt_logprobs is not None:
            prompt = [x if x is None else _logprob(x, r.prompt_ids[i], r.params.prompt_logprobs)
                      for i, x in enumerate(r.prompt_logprobs)]
        sequence = r.sequences[out.index] if out.index < len(r.sequences) else None
        return wire.Update(key, tokens, logprobs, prompt, out.finish_reason, out.error, index=out.index,
                           cached=r.sequences[0].hit if r.sequences else 0,
                           debug=sequence.debug() if self._debug and sequence is not None else None)


def _logprob(found: TokenLogprobs, token: int, count: int | None) -> wire.TokenLogprob:
    """``found`` holds the chosen token besides the ``count`` most probable ones."""
    top = sorted(found.items(), key=lambda item: item[1].rank)[:count]
    return wire.TokenLogprob(found[token].logprob, [(i, x.logprob) for i, x in top])


def _times(m: RequestMetrics) -> wire.Times:
    def between(start: float | None, end: float | None) -> float | None:
        return None if start is None or end is None else end - start

    return wire.Times(between(m.arrival_time, m.first_scheduled_time),
                      between(m.first_scheduled_time, m.first_token_time),
                      between(m.first_token_time, m.last_token_time))


def snapshot(metrics: Metrics) -> list[wire.Metric]:
    """All metrics of an engine by value."""
    out = []
    for m in vars(metrics).values():
        if isinstance(m, Histogram):
            out.append(wire.Metric("histogram", m.name, m.help, bounds=list(m.bounds), counts=list(m.counts),
                                   total=m.total))
        elif isinstance(m, Counter):
            kind = "gauge" if isinstance(m, Gauge) else "counter"
            values = dict(m.values) if m.values or m.label else {"": 0.0}
            out.append(wire.Metric(kind, m.name, m.help, m.label, values))
    return out
