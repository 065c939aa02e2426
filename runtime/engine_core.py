"""An engine with its queues: requests in, tokens out."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Series
from contextlib import contextmanager
from dataclasses import dataclass
from heapq import heappop, heappush
from threading import RLock

import numpy as np

from deepinfer.errors import InternalError, PlanError, RequestError
from deepinfer.runtime import events
from deepinfer.runtime.backend import Engine
from deepinfer.runtime.batch import Batch
from deepinfer.runtime.clock import Clock, Part
from deepinfer.runtime.cost import ChunkBudget
from deepinfer.runtime.detokenizer import Decode, StopTexts, TextStream
from deepinfer.runtime.executor import Executor
from deepinfer.runtime.host_executor import make_executor
from deepinfer.runtime.loop import Loop, News
from deepinfer.runtime.memory import SequenceMemory
from deepinfer.runtime.metrics import Metrics
from deepinfer.runtime.noise import mixed
from deepinfer.runtime.outputs import CompletionOutput, RequestMetrics
from deepinfer.runtime.plan import EnginePlan
from deepinfer.runtime.prefix.interface import NoCache, PrefixCache
from deepinfer.runtime.residence import Residence
from deepinfer.runtime.results import Results
from deepinfer.runtime.sampling import encode_bad_words, sequence_key
from deepinfer.runtime.sampling_params import SamplingParams
from deepinfer.runtime.scheduler import PATIENCE, Scheduler
from deepinfer.runtime.sequence import Request, Sequence, Status, TokenIds, TokenSeries, check_prompt
from deepinfer.runtime.speculation.interface import DraftPolicy, FixedDrafts
from deepinfer.runtime.structured.compiler import GrammarCompiler
from deepinfer.runtime.table import SequenceTable


@dataclass(frozen=True)
class TextSide:
    """Text to ids and back; ``decode`` takes (ids, skip_special_tokens). ``tokenizer_json``: gives the content of the
    tokenizer.json, where there is one."""

    encode: Callable[[str], list[int]]
    decode: Callable[[Series[int], bool], str]
    tokenizer_json: Callable[[], str] | None = None


class EngineCore:
    """Requests in, tokens out. All methods may be called from any thread; a step is one at a time.

    Args:
        plan, engine: what runs; the engine's memory has ``slots`` sequences and ``blocks`` cache blocks.
        ends: ids of the model's end tokens. ``text``: None without a tokenizer.
        seed: seed of requests that bring none; None: from the system.
        spill_bytes: host memory for preempted sequences.
        lag: steps that are planned ahead: 0 or 1; see ``loop``. ``executor``: runs the steps; None: the engine's own.
        policy: of drafts; None: all that the engine drafts. ``prefix``: cache of prefixes; None: there is none.
        stretch: see ``cost.ChunkBudget``. ``now``: seconds of a clock that only goes forward.
    """

    def __init__(self, plan: EnginePlan, engine: Engine, *, slots: int, blocks: int, ends: Iterable[int] = (),
                 text: TextSide | None = None, seed: int | None = None, spill_bytes: int = 1 << 30, lag: int = 0,
                 executor: Executor | None = None, policy: DraftPolicy | None = None,
                 prefix: PrefixCache | None = None, stretch: float | None = None,
                 now: Callable[[], float] = time.monotonic) -> None:
        self.plan, self._engine, self.text, self.now = plan, engine, text, now
        self.ends = frozenset(ends)
        self.grammars = GrammarCompiler(text.tokenizer_json if text else None, plan.vocab_size, self.ends)
        self.lock = RLock()
        self.metrics = Metrics()
        self.executor: Executor = executor or make_executor(plan, engine, lag)
        self.memory = SequenceMemory(plan, engine, slots, blocks)
        self.prefix: PrefixCache = prefix or NoCache()
        drafts = plan.draft_tokens if "draft" in plan.entries else 0
        self.policy: DraftPolicy = policy or FixedDrafts(drafts)
        self.table = SequenceTable(plan, self.memory)
        self.prefix.attach(self.memory, lambda slot: bool(self.table.inflight[slot]), self.metrics)
        self.residence = Residence(plan, self.memory, self.table, self.executor, self.prefix, self.policy,
                                   self.metrics, spill_bytes=spill_bytes, repeatable=seed is not None, now=now,
                                   answer=self._sequence)
        self.scheduler = Scheduler(plan, self.memory, self.table, self.residence, self.prefix, self.policy,
                                   ChunkBudget(stretch, plan.block_tokens), self.metrics)
        results = Results(plan, self.table, self.prefix, self.policy, self.metrics,
                          None if text is None else lambda token: text.decode((token,), False))
        self.loop = Loop(plan, self.scheduler, self.table, self.executor, self.residence, results, self.metrics,
                         lag=lag, now=now)
        self.batch = Batch(plan)
        self.requests: dict[str, Request] = {}
        self._deadlines: list[tuple[float, int, Request]] = []
        self._seed = int.from_bytes(os.urandom(8), "little") if seed is None else seed
        self._order = 0
        self._closed = False

    @property
    def engine(self) -> Engine:
        """What runs a session's rows."""
        return self._engine

    @engine.setter
    def engine(self, engine: Engine) -> None:
        """Another engine over the same memory; no sequence may be running."""
        self._engine = self.memory.engine = engine
        self.executor = self.residence.executor = self.loop.executor = make_executor(self.plan, engine, self.loop.lag)

    def close(self) -> None:
        """Give the engine's memory back; what comes afterwards is refused. Closing twice is fine."""
        with self.lock:
            if not self._closed:
                self.loop.give_up()
                self._closed = True
                self.grammars.close()
                self.policy.close()
                self.prefix.close()
                self.executor.close()

    def require_open(self) -> None:
        """RequestError when the engine is closed."""
        if self._closed:
            raise RequestError("the engine is closed", where="LLM", next_step="make another LLM")

    # ---- requests -------------------------------------------------------------------------------------------------
    def make(self, request_id: str, prompt_ids: TokenSeries, params: SamplingParams, *, prompt: str | None = None,
             priority: int = 0, stream: bool = False, where: str = "prompt",
             images: Iterable[tuple[int, bytes]] = ()) -> Request:
        """A checked request that is not queued yet; RequestError in one sentence when it cannot be served.

        A new form of the answer is compiled here, in the caller's thread (`GrammarCompiler.submit` does it before)."""
        self.require_open()
        plan = self.plan
        ids, array = check_prompt(plan, prompt_ids, where)
        params.check_vocabulary(plan.vocab_size)
        if params.n > self.memory.slots.size:
            raise RequestError("more answers than sequences run at the same time", where="n", found=params.n,
                               allowed=f"1..{self.memory.slots.size}")
        need = plan.blocks_for(len(ids)) + params.n - 1
        if need > self.memory.blocks.size:
            raise RequestError("prompt and answers need more cache blocks than there are", where=where, found=need,
                               allowed=f"at most {self.memory.blocks.size}", next_step="ask for fewer answers")
        if self.text is None and params.bad_words:
            raise RequestError("texts need a tokenizer", where="bad_words", next_step="give LLM a tokenizer")
        if self.text is None and params.stop_strings:
            raise RequestError("texts need a tokenizer", where="stop", next_step="give LLM a tokenizer")
        plan.replay_rows(params.replay)
        most = plan.max_model_len - len(ids)
        most = most if params.max_tokens is None else min(most, params.max_tokens)
        ends = frozenset(params.stop_token_ids or ()) | (frozenset() if params.ignore_eos else self.ends)
        grammar = None if params.form is None else self.grammars.compile(params.form)
        now = self.now()
        return Request(request_id, prompt, ids, params, ends, most, RequestMetrics(now),
                       [CompletionOutput(i) for i in range(params.n)], now + priority * PATIENCE, stream=stream,
                       deadline=None if params.deadline is None else now + params.deadline,
                       vocabulary=plan.vocab_size,
                       prompt_logprobs=None if params.prompt_logprobs is None else [None], grammar=grammar,
                       prompt_array=array, images=tuple(images))

    def add(self, request: Request) -> None:
        """Queue a request."""
        with self.lock:
            self.require_open()
            if request.request_id in self.requests:
                raise RequestError("a request with this id is running", where="request_id", found=request.request_id)
            self._order += 1
            request.order = self._order
            self.requests[request.request_id] = request
            if request.deadline is not None:
                heappush(self._deadlines, (request.deadline, request.order, request))
            self.scheduler.add(self._sequence(request))

    def _sequence(self, r: Request) -> Sequence:
        """The next answer's sequence."""
        p, text = r.params, self.text
        output = r.outputs[len(r.sequences)]
        seed = mixed(self._seed, r.order) if p.seed is None else p.seed
        bad = encode_bad_words(p.bad_words, text.encode) if text else ()
        decode: Decode | None = None
        if text is not None and p.detokenize:
            skip, ids_to_text = p.skip_special_tokens, text.decode

            def decode(some: Series[int]) -> str:
                return ids_to_text(some, skip)

        s = Sequence(r, Clock(self.plan), sequence_key(seed, output.index), output,
                     TextStream(decode) if decode else None,
                     StopTexts(p.stop_strings, p.include_stop_str_in_output), bad)
        if r.grammar is not None and p.form is not None:
            s.constraint = r.grammar.start(p.form.start_after)
        r.sequences.append(s)
        return s

    def abort(self, request_id: str) -> bool:
        """End a request between two steps. Its memory is free at once, or when the step in flight has ended. False: no
        such request."""
        with self.lock:
            request = self.requests.get(request_id)
            if request is None:
                return False
            self._end(request, "abort")
            self._deliver([request])
            return True

    def _end(self, request: Request, reason: str, error: str | None = None) -> None:
        """End every answer that goes on."""
        for s in request.sequences:
            if s.status is not Status.FINISHED:
                s.finish(reason, error=error)
            self.scheduler.drop(s)
        for out in request.outputs:
            if out.finish_reason is None:
                out.finish_reason, out.error = reason, error

    def _expire(self) -> None:
        """End requests whose deadline has passed."""
        now = self.now()
        while self._deadlines and self._deadlines[0][0] <= now:
            request = heappop(self._deadlines)[2]
            if not request.finished:
                self._end(request, "deadline")
                self._deliver([request])

    # ---- one step -----------------------------------------------------------------------------------------------
    def step(self) -> bool:
        """One turn of the loop; new results are in the ``updates`` of their requests. False: there was nothing to do.

        PlanError when requests wait and nothing can run because memory is held elsewhere; RequestError when the engine
        is closed.
        """
        with self.lock:
            self.require_open()
            if self._deadlines:
                self._expire()
            news = self._guarded(self.loop.turn)
            if news is None:
                if self.scheduler.idle:
                    return False
                raise PlanError("requests wait for memory that open sessions hold", where="cache blocks",
                                found=f"{self.memory.blocks.free} of {self.memory.blocks.size} free",
                                next_step="close sessions, or give LLM more num_blocks")
            self._take(news)
            return True

    def step_for(self, requests: Iterable[Request]) -> None:
        """A step, unless another thread has meanwhile brought news for one of ``requests``."""
        with self.lock:
            if not any(r.updates for r in requests):
                self.step()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """The engine without any step in flight, for whoever runs rows of its own."""
        with self.lock:
            self._land()
            yield

    def settle(self) -> None:
        """When no request is left: wait for a step that was planned before that was known, free what it held, and
        check the books. InternalError when they are wrong."""
        with self.lock:
            if not self.requests and not self._closed:
                self._land()
                self.memory.check()

    def _land(self) -> None:
        while self.loop.flights:
            news = self._guarded(self.loop.retire)
            if news is not None:
                self._take(news)

    def _guarded(self, turn: Callable[[], News | None]) -> News | None:
        """What ``turn`` brings; when the engine fails or a person interrupts it, everything that runs ends: nobody
        knows how far the step came."""
        try:
            return turn()
        except BaseException as error:
            self.loop.give_up()
            failed = isinstance(error, Exception)
            for request in list(self.requests.values()):
                self._end(request, "error" if failed else "abort", "the engine failed" if failed else None)
                if not failed:
                    self._deliver([request])
            self.residence.sweep()
            self.requests.clear()
            raise

    def _take(self, news: News) -> None:
        if news.touched:
            self._deliver(news.touched)

    def _deliver(self, touched: Iterable[Request]) -> None:
        """Put results where their readers fetch them, and forget requests that ended."""
        for r in touched:
            ended = r.finished and self.requests.pop(r.request_id, None) is not None
            if ended:
                r.metrics.finished_time = self.now()
            if ended or r.stream:
                r.updates.append(r.result(snapshot=not ended))
            if r.metrics.finished_time is not None:
                for out in r.outputs:
                    self.metrics.success.add(label=out.finish_reason or "")
                self.metrics.end_to_end.observe(r.metrics.finished_time - r.metrics.arrival_time)
                events.info("request_finished", request=r.request_id, prompt_tokens=len(r.prompt_ids),
                            tokens=sum(len(o.token_ids) for o in r.outputs), reason=r.outputs[0].finish_reason,
                            seconds=r.metrics.finished_time - r.metrics.arrival_time,
                            preemptions=r.metrics.num_preemptions)

    def gauges(self) -> None:
        """Bring the metrics that say how things are up to date. Blocks that only the prefix cache holds are free."""
        m, blocks = self.metrics, self.memory.blocks
        m.running.set(len(self.scheduler.running))
        m.waiting.set(len(self.scheduler.waiting))
        m.cache_usage.set(1 - (blocks.free + self.prefix.evictable) / max(1, blocks.size))
        for use in [*self.memory.uses(), *self.prefix.uses()]:
            m.cache_bytes.set(use.bytes, f"{use.group},{use.tier}")
            if use.ratio is not None:
                m.cache_used.set(use.ratio, use.group)


def fill(batch: Batch, part: Part, ids: TokenIds, slot: int, blocks: np.ndarray[tuple[int], np.dtype[np.int32]],
         lookback: int) -> None:
    """Add one sequence's part to a batch."""
    if part.stop > ids.count:
        raise InternalError(f"a part up to {part.stop} of {ids.count} ids")
    batch.add(ids[part.c:part.stop], slot=slot, c=part.c, blocks=blocks, kept=part.kept, wanted=part.wanted,
              floor=part.floor, start_step=part.start_step, start_kept=part.start_kept,
              before=ids[max(0, part.c - lookback):part.c])
