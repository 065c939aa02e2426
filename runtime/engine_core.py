"""The loop: schedule, run one step of the engine, choose tokens, bring every sequence up to date."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Series
from dataclasses import dataclass
from threading import RLock

import numpy as np

from deepinfer.errors import InternalError, PlanError, RequestError
from deepinfer.runtime import events
from deepinfer.runtime.backend import Engine, Outputs
from deepinfer.runtime.batch import Batch
from deepinfer.runtime.clock import Clock, Part
from deepinfer.runtime.detokenizer import Decode, StopTexts, TextStream
from deepinfer.runtime.memory import SequenceMemory
from deepinfer.runtime.metrics import Metrics
from deepinfer.runtime.noise import mixed
from deepinfer.runtime.outputs import CompletionOutput, RequestMetrics, TokenLogprobs
from deepinfer.runtime.plan import OFF, EnginePlan
from deepinfer.runtime.sampling import (
    NOT_FINITE,
    Row,
    TokenChooser,
    bad_logits,
    encode_bad_words,
    sequence_key,
    top_logprobs,
)
from deepinfer.runtime.sampling_params import SamplingParams
from deepinfer.runtime.scheduler import Scheduler
from deepinfer.runtime.sequence import Request, Sequence, Status, TokenIds, check_prompt
from deepinfer.runtime.structured.compiler import GrammarCompiler
from deepinfer.runtime.structured.constraint import restricted


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
    """

    def __init__(self, plan: EnginePlan, engine: Engine, *, slots: int, blocks: int, ends: Iterable[int] = (),
                 text: TextSide | None = None, seed: int | None = None, spill_bytes: int = 1 << 30,
                 now: Callable[[], float] = time.monotonic) -> None:
        self.plan, self.engine, self.text, self.now = plan, engine, text, now
        self.ends = frozenset(ends)
        self.grammars = GrammarCompiler(text.tokenizer_json if text else None, plan.vocab_size, self.ends)
        self.lock = RLock()
        self.metrics = Metrics()
        self.memory = SequenceMemory(plan, engine, slots, blocks)
        self.scheduler = Scheduler(plan, self.memory, self.metrics, spill_bytes)
        self.batch = Batch(plan)
        self.requests: dict[str, Request] = {}
        self._seed = int.from_bytes(os.urandom(8), "little") if seed is None else seed
        self._order = 0
        self._closed = False

    def close(self) -> None:
        """Give the engine's memory back; what comes afterwards is refused. Closing twice is fine."""
        with self.lock:
            if not self._closed:
                self._closed = True
                self.grammars.close()
                self.engine.close()

    def require_open(self) -> None:
        """RequestError when the engine is closed."""
        if self._closed:
            raise RequestError("the engine is closed", where="LLM", next_step="make another LLM")

    # ---- requests -------------------------------------------------------------------------------------------------
    def make(self, request_id: str, prompt_ids: Series[int], params: SamplingParams, *, prompt: str | None = None,
             priority: int = 0, stream: bool = False, where: str = "prompt") -> Request:
        """A checked request that is not queued yet; RequestError in one sentence when it cannot be served.

        A new form of the answer is compiled here, in the caller's thread (`GrammarCompiler.submit` does it before)."""
        self.require_open()
        plan = self.plan
        ids = check_prompt(plan, prompt_ids, where)
        params.check_vocabulary(plan.vocab_size)
        if params.n > self.memory.slots.size:
            raise RequestError("more answers than sequences run at the same time", where="n", found=params.n,
                               allowed=f"1..{self.memory.slots.size}")
        need = plan.blocks_for(len(ids)) + (params.n - 1) * self.memory.fork_need(len(ids))
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
        return Request(request_id, prompt, ids, params, ends, most, RequestMetrics(self.now()),
                       [CompletionOutput(i) for i in range(params.n)], priority, stream=stream,
                       prompt_logprobs=None if params.prompt_logprobs is None else [None], grammar=grammar)

    def add(self, request: Request) -> None:
        """Queue a request."""
        with self.lock:
            self.require_open()
            if request.request_id in self.requests:
                raise RequestError("a request with this id is running", where="request_id", found=request.request_id)
            self._order += 1
            request.order = self._order
            replay = self.plan.replay_rows(OFF if request.prompt_logprobs is not None else request.params.replay)
            ids = TokenIds(request.prompt_ids, request.most_tokens)
            clock = Clock(self.plan)
            clock.prompt(ids.count, replay)
            self.requests[request.request_id] = request
            self.scheduler.add(self._sequence(request, clock, ids))

    def _sequence(self, r: Request, clock: Clock, ids: TokenIds) -> Sequence:
        """The next answer's sequence."""
        p, text = r.params, self.text
        output = r.outputs[len(r.sequences)]
        seed = mixed(self._seed, r.order) if p.seed is None else p.seed
        bad = encode_bad_words(p.bad_words, text.encode) if text else ()
        chooser = TokenChooser(p, sequence_key(seed, output.index), ids[: len(r.prompt_ids)], tuple(sorted(r.ends)),
                               bad)
        decode: Decode | None = None
        if text is not None and p.detokenize:
            skip, ids_to_text = p.skip_special_tokens, text.decode

            def decode(some: Series[int]) -> str:
                return ids_to_text(some, skip)

        s = Sequence(r, clock, ids, chooser, output, TextStream(decode) if decode else None,
                     StopTexts(p.stop_strings, p.include_stop_str_in_output))
        if r.grammar is not None and p.form is not None:
            s.constraint = r.grammar.start(p.form.start_after)
        r.sequences.append(s)
        return s

    def abort(self, request_id: str) -> bool:
        """End a request between two steps; its memory is free at once. False: no such request."""
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

    # ---- one step -------------------------------------------------------------------------------------------------
    def step(self) -> bool:
        """Run one step; new results are in the ``updates`` of their requests. False: there was nothing to run.

        PlanError when requests wait and nothing can run because memory is held elsewhere; RequestError when the engine
        is closed.
        """
        with self.lock:
            self.require_open()
            parts = self.scheduler.schedule()
            if not parts:
                if self.scheduler.idle:
                    return False
                raise PlanError("requests wait for memory that open sessions hold", where="cache blocks",
                                found=f"{self.memory.blocks.free} of {self.memory.blocks.size} free",
                                next_step="close sessions, or give LLM more num_blocks")
            outputs = self._run(parts)
            touched = self._advance(parts, outputs["logits"])
            self._deliver(touched)
            self._count(parts)
            if self.scheduler.idle:
                self.memory.check()
            return True

    def step_for(self, requests: Iterable[Request]) -> None:
        """A step, unless another thread has meanwhile brought news for one of ``requests``."""
        with self.lock:
            if not any(r.updates for r in requests):
                self.step()

    def _run(self, parts: dict[Sequence, Part]) -> Outputs:
        batch, now = self.batch, self.now()
        batch.clear()
        for s, part in parts.items():
            assert s.holding is not None
            fill(batch, part, s.ids, s.holding.slot, s.holding.blocks, self.plan.lookback)
            m = s.request.metrics
            if m.first_scheduled_time is None:
                m.first_scheduled_time = now
                self.metrics.queued.observe(now - m.arrival_time)
        try:
            return self.engine.run("step", batch)
        except Exception:
            for request in list(self.requests.values()):
                self._end(request, "error", "the engine failed")
            self.requests.clear()
            raise

    def _advance(self, parts: dict[Sequence, Part], logits: Row) -> list[Request]:
        """Clocks move, tokens are chosen. Returns the requests with news."""
        broken, best = bad_logits(logits), None
        touched: dict[Request, None] = {}
        row = 0
        for s, part in parts.items():
            s.clock.ran(part)
            rows = slice(row, row + part.wanted)
            row += part.wanted
            if not part.wanted:
                continue
            touched[s.request] = None
            if broken[rows].any():
                s.finish("error", error=NOT_FINITE)
                self._forks_fail(s.request)
                continue
            self._take_prompt_logprobs(s, part, logits[rows])
            if s.clock.pending:
                continue
            if best is None and s.free_choice:
                best = logits.argmax(axis=-1)
            for answer in self._with_forks(s):
                token = int(best[row - 1]) if best is not None and answer.free_choice else None
                self._take(answer, logits[row - 1], token)
        for s in [s for s in self.scheduler.running if s.status is Status.FINISHED]:
            self.scheduler.drop(s)
        return list(touched)

    def _take(self, s: Sequence, logits: Row, token: int | None) -> None:
        """The token after the last row, its log-probabilities and what follows from it."""
        m, now = s.request.metrics, self.now()
        try:
            mask = None if s.constraint is None else s.constraint.mask()
            row = logits if mask is None else restricted(logits, mask[0])
            chosen = s.chooser.choose(row, s.clock.n) if token is None else token
        except RequestError as error:
            s.finish("error", error=str(error))
            return
        if m.last_token_time is None:
            self.metrics.first_token.observe(now - m.arrival_time)
        else:
            self.metrics.inter_token.observe(now - m.last_token_time)
        self.metrics.generation_tokens.add()
        count = s.request.params.logprobs
        s.take(chosen, now, None if count is None else self._named(top_logprobs(logits, chosen, count)))

    def _with_forks(self, s: Sequence) -> list[Sequence]:
        """The sequence, and at the end of a prompt its forks, one for each further answer."""
        r = s.request
        if not r.to_fork:
            return [s]
        assert s.holding is not None
        out = [s]
        while r.to_fork:
            other = self._sequence(r, s.clock.fork(), s.ids.copy())
            other.holding = self.memory.fork(s.holding, s.clock.n)
            self.scheduler.add_running(other)
            out.append(other)
        return out

    def _forks_fail(self, r: Request) -> None:
        """A prompt that failed fails for the answers that have no sequence yet."""
        for out in r.outputs[len(r.sequences):]:
            out.finish_reason, out.error = "error", r.outputs[0].error

    def _take_prompt_logprobs(self, s: Sequence, part: Part, logits: Row) -> None:
        r, first = s.request, part.stop - part.wanted
        if r.prompt_logprobs is None or len(r.prompt_logprobs) == len(r.prompt_ids):
            return
        count = r.params.prompt_logprobs or 0
        for at, row in enumerate(logits, first):
            if at + 1 < len(r.prompt_ids):
                r.prompt_logprobs.append(self._named(top_logprobs(row, r.prompt_ids[at + 1], count)))

    def _named(self, found: TokenLogprobs) -> TokenLogprobs:
        """Log-probabilities with the tokens' texts."""
        text = self.text
        if text is None:
            return found
        return {i: type(x)(x.logprob, x.rank, text.decode((i,), False)) for i, x in found.items()}

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

    def _count(self, parts: dict[Sequence, Part]) -> None:
        m, rows = self.metrics, sum(p.rows for p in parts.values())
        m.steps.add()
        m.iteration_tokens.observe(rows)
        m.prompt_tokens.add(sum(max(0, min(p.stop, s.clock.prompt_end) - p.c) for s, p in parts.items()))
        m.running.set(len(self.scheduler.running))
        m.waiting.set(len(self.scheduler.waiting))
        m.cache_usage.set(1 - self.memory.blocks.free / max(1, self.memory.blocks.size))


def fill(batch: Batch, part: Part, ids: TokenIds, slot: int, blocks: np.ndarray[tuple[int], np.dtype[np.int32]],
         lookback: int) -> None:
    """Add one sequence's part to a batch."""
    if part.stop > ids.count:
        raise InternalError(f"a part up to {part.stop} of {ids.count} ids")
    batch.add(ids[part.c:part.stop], slot=slot, c=part.c, blocks=blocks, kept=part.kept, wanted=part.wanted,
              floor=part.floor, start_step=part.start_step, start_kept=part.start_kept,
              before=ids[max(0, part.c - lookback):part.c])
