"""What a step brought, written into the sequences: clocks, tokens, reasons to stop, log-probabilities, counters.

Sequences whose tokens nobody looks at one by one (no stop texts, log-probabilities or grammar) are brought up to date
together, in arrays; text is made when it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from deepinfer.errors import RequestError
from deepinfer.runtime.executor import Logprobs, StepPlan, StepResult
from deepinfer.runtime.metrics import Metrics
from deepinfer.runtime.outputs import TokenLogprobs
from deepinfer.runtime.plan import EnginePlan
from deepinfer.runtime.prefix.interface import NoCache, PrefixCache
from deepinfer.runtime.sampling import NOT_FINITE, Logprob
from deepinfer.runtime.sequence import Request, Sequence, Status
from deepinfer.runtime.speculation.interface import DraftPolicy, FixedDrafts, Observed
from deepinfer.runtime.table import SequenceTable

Places = NDArray[np.int64] | slice  # of sequences in a step


class Taken(Protocol):
    """A step that has ended: ``slots`` and ``serials`` of the sequences that it was planned for, and which of them
    ``draws`` a token (0 or 1 each, or of all)."""

    @property
    def step(self) -> StepPlan: ...

    @property
    def slots(self) -> NDArray[np.int64]: ...

    @property
    def serials(self) -> NDArray[np.int64]: ...

    @property
    def draws(self) -> NDArray[np.int64] | int: ...


class Results:
    """``decode``: the text of an id by itself, or None without a tokenizer."""

    def __init__(self, plan: EnginePlan, table: SequenceTable, prefix: PrefixCache, policy: DraftPolicy,
                 metrics: Metrics, decode: Callable[[int], str] | None) -> None:
        self.plan, self.table, self.prefix, self.policy = plan, table, prefix, policy
        self.metrics, self.decode = metrics, decode
        self._places = np.arange(plan.draft_tokens + 1)
        self._depths = self._places.astype(np.float64)
        self._labels = [str(place) for place in range(plan.draft_tokens)]
        self._touched: dict[Request, None] = {}
        self._ended: list[Sequence] = []
        self._now = 0.0
        self._publishes = not isinstance(prefix, NoCache)
        self._observed = not isinstance(policy, FixedDrafts)  # who always verifies the same number learns nothing

    def take(self, flight: Taken, result: StepResult, now: float) -> tuple[list[Request], list[Sequence]]:
        """Bring every sequence of a step up to date; those that ended after it was planned are left alone.

        Returns the requests with news that somebody waits for, and the sequences that ended.
        """
        self._touched, self._ended, self._now = {}, [], now
        t, step, slots = self.table, flight.step, flight.slots
        t.retire(slots, flight.draws)
        alive = t.serial[slots] == flight.serials
        decoded: Places = slice(0, step.decoding)
        fine = result.finite[decoded]
        if not (alive.all() and fine.all()) or result.errors:
            decoded = self._going_on(flight, result, alive, fine)
        chosen = decoded
        if step.decoding < step.count:
            prompts = step.decoding + np.flatnonzero(alive[step.decoding:])
            self._prompts(step, result, prompts)
            chosen = np.concatenate((np.arange(step.decoding)[decoded], prompts[result.count[prompts] > 0]))
        at = slots[decoded]
        if len(at):
            accepted = result.accepted[decoded]
            t.clocks.accept(at, step.rows["rows"][decoded], accepted)
            self._drafts_counted(step, result, at, decoded, accepted)
        self._errors(flight, result)
        at = slots[chosen]
        if len(at):
            self._tokens(result, at, chosen, now)
            if self._publishes:
                self._publish(at)
        t.pull_some()
        return list(self._touched), self._ended

    # ---- rows -------------------------------------------------------------------------------------------------------
    def _prompts(self, step: StepPlan, result: StepResult, at: NDArray[np.int64]) -> None:
        """Rows that the host sent: few, so one by one."""
        t = self.table
        for i in at.tolist():
            row = step.rows[i]
            slot = int(row["slot"])
            s = t.sequences[slot]
            assert s is not None
            here = np.array([slot])
            t.clocks.ran(here, np.array([int(row["c"]) + int(row["rows"])]))
            if not result.finite[i]:
                self._fail(s, NOT_FINITE)
                continue
            if i in result.prompt_logprobs:
                self._prompt_logprobs(s.request, row, result.prompt_logprobs[i])
            if row["draws"] and i not in result.errors:
                t.clocks.sampled(here)
            if self._publishes:
                self.prefix.committed(s)

    def _going_on(self, flight: Taken, result: StepResult, alive: NDArray[np.bool_],
                  fine: NDArray[np.bool_]) -> NDArray[np.int64]:
        """The decoding rows that count: those whose logits are no numbers fail, and so do, later, those with errors."""
        decoding = flight.step.decoding
        for slot in flight.slots[:decoding][alive[:decoding] & ~fine].tolist():
            s = self.table.sequences[slot]
            assert s is not None
            self._fail(s, NOT_FINITE)
        return np.array([i for i in np.flatnonzero(alive[:decoding] & fine).tolist() if i not in result.errors],
                        np.int64)

    def _errors(self, flight: Taken, result: StepResult) -> None:
        for i, sentence in result.errors.items():
            s = self.table.sequences[int(flight.slots[i])]
            if s is not None and s.serial == flight.serials[i] and s.status is not Status.FINISHED:
                self._fail(s, sentence)

    def _drafts_counted(self, step: StepPlan, result: StepResult, slots: NDArray[np.int64], at: Places,
                        accepted: NDArray[np.int32]) -> None:
        if not self.plan.draft_tokens:
            return
        verified = result.verified[at]
        if verified.any():
            m = self.metrics
            proposed, kept = self._by_place(verified), self._by_place(accepted)
            m.drafts.add(proposed[0])
            m.depth.observe_all(self._depths, np.bincount(verified, minlength=len(self._depths)))
            m.draft_tokens.add(sum(proposed))
            m.accepted_tokens.add(sum(kept))
            for label, asked, stayed in zip(self._labels, proposed, kept, strict=True):
                m.proposed_at.add(asked, label)
                m.accepted_at.add(stayed, label)
            self.table.proposed[slots, verified] += 1
            self.table.accepted[slots, accepted] += 1
        if not self._observed:
            return
        self.policy.observe(Observed(slots, verified, accepted, result.confidence[at], result.drafted[at],
                                     step.rows_run(result), step.ids, result.seconds))

    def _by_place(self, lengths: NDArray[np.int32]) -> list[int]:
        """[m], how many of ``lengths`` reach beyond each draft position."""
        found: list[int] = np.bincount(lengths, minlength=len(self._places))[:0:-1].cumsum()[::-1].tolist()
        return found

    # ---- tokens -----------------------------------------------------------------------------------------------------
    def _tokens(self, result: StepResult, slots: NDArray[np.int64], at: Places, now: float) -> None:
        """``slots``: of the sequences that chose tokens; ``at``: their places in the step."""
        t, drafts = self.table, self.plan.draft_tokens
        count, tokens = result.count[at].astype(np.int64), result.tokens[at]
        emitted = t.emitted[slots]
        room = t.most[slots] - emitted
        is_end = tokens == t.ends[0][slots, None]
        for place in range(1, t.most_ends):
            is_end |= tokens == t.ends[place][slots, None]
        if drafts:
            is_end &= self._places < count[:, None]
            ended = is_end.any(axis=1)
            keep = np.where(ended, is_end.argmax(axis=1) + 1, count)
        else:
            ended, keep = is_end[:, 0], count
        ended = ended & (keep <= room)
        keep = np.minimum(keep, room)
        self._times(slots, keep, now)
        t.append(slots, emitted, tokens)
        t.emitted[slots] = emitted + keep
        t.last[slots] = now
        self.metrics.generation_tokens.add(int(keep.sum()))
        looked = t.watched[slots] | ended | (keep == room)
        if looked.any():
            places = at.indices(len(result.count))[0] + np.arange(len(slots)) if isinstance(at, slice) else at
            for k in np.flatnonzero(looked).tolist():
                s = t.sequences[int(slots[k])]
                assert s is not None
                self._one(s, int(places[k]), int(keep[k]), bool(ended[k]), result)

    def _times(self, slots: NDArray[np.int64], keep: NDArray[np.int64], now: float) -> None:
        last, observed = self.table.last[slots], self.metrics.inter_token
        earliest = float(last.min())  # NaN if there is one
        if earliest == float(last.max()):  # all were part of the step before
            for tokens, times in enumerate(np.bincount(keep).tolist()):
                if times and tokens:
                    observed.observe((now - earliest) / tokens, times * tokens)
            return
        first = np.isnan(last)
        if first.any():
            for slot in slots[first].tolist():
                s = self.table.sequences[slot]
                assert s is not None
                m = s.request.metrics
                if m.first_token_time is None:
                    m.first_token_time = now
                    self.metrics.first_token.observe(now - m.arrival_time)
            observed.observe_all(np.zeros(int(first.sum())), keep[first] - 1)
            last, keep = last[~first], keep[~first]
        observed.observe_all((now - last) / np.maximum(keep, 1), keep)

    def _one(self, s: Sequence, i: int, keep: int, ended: bool, result: StepResult) -> None:
        """Everything about the newest ``keep`` tokens of one answer that needs a look at each."""
        s.pull()
        r, tokens = s.request, s.output.token_ids
        reason: str | None = None
        stop: int | str | None = None
        if not ended and len(r.ends) > len(self.table.ends):
            fresh = tokens[len(tokens) - keep:]
            found = next((k for k, token in enumerate(fresh, 1) if token in r.ends), None)
            if found is not None:
                keep, ended = self._cut(s, keep, found), True
        if s.read_eagerly:
            silent = ended and not r.params.include_stop_str_in_output
            hit = s.read_on(tokens[len(tokens) - keep: len(tokens) - silent])
            if hit is not None:
                keep, ended, reason, stop = self._cut(s, keep, hit[0]), False, "stop", hit[1]
        if i in result.logprobs:
            self._logprobs(s, result.logprobs[i], keep)
        if s.constraint is not None:
            try:
                s.constraint.accept(tokens[len(tokens) - keep:])
            except RequestError as error:
                self._fail(s, str(error))
                return
            s.constraint.require_equal(len(tokens), tokens[len(tokens) - keep:])
            s.drafts = result.drafts[i, : result.drafted[i]].tolist()
        if reason is None:
            if ended:
                reason = "stop"
                stop = tokens[-1] if tokens[-1] in (r.params.stop_token_ids or ()) else None
            elif len(tokens) >= r.most_tokens:
                reason = "length"
            elif s.constraint is not None and s.constraint.over:
                reason = "stop"
        r.metrics.last_token_time = self._now
        if r.stream:
            self._touched[r] = None
        if reason is not None:
            if s.clock.t > s.known:
                s.clock.cut(s.known)
            self._end(s, reason, stop)

    def _cut(self, s: Sequence, keep: int, to: int) -> int:
        """Of the newest ``keep`` tokens only ``to`` stay."""
        del s.output.token_ids[len(s.output.token_ids) - (keep - to):]
        if s.holding is not None:
            self.table.emitted[s.holding.slot] -= keep - to
        self.metrics.generation_tokens.add(to - keep)
        return to

    def _end(self, s: Sequence, reason: str, stop: int | str | None = None, error: str | None = None) -> None:
        if s.holding is not None:
            self.prefix.committed(s)
        s.finish(reason, stop, error)
        self._touched[s.request] = None
        self._ended.append(s)

    def _fail(self, s: Sequence, sentence: str) -> None:
        """This answer ends, and so do those to the same prompt that have no sequence yet."""
        for out in s.request.outputs[len(s.request.sequences):]:
            out.finish_reason, out.error = "error", sentence
        s.finish("error", error=sentence)
        self._touched[s.request] = None
        self._ended.append(s)

    # ---- log-probabilities ------------------------------------------------------------------------------------------
    def _logprobs(self, s: Sequence, found: Logprobs, keep: int) -> None:
        out = s.output
        if out.logprobs is None:
            out.logprobs, out.cumulative_logprob = [], 0.0
        for k in range(keep):
            out.logprobs.append(self._named(found, k))
            out.cumulative_logprob = (out.cumulative_logprob or 0.0) + float(found.values[k, 0])

    def _prompt_logprobs(self, r: Request, row: np.void, found: Logprobs) -> None:
        if r.prompt_logprobs is None:
            return
        first = int(row["c"]) + int(row["rows"]) - int(row["wanted"])
        for k in range(len(found.ids)):
            if len(r.prompt_logprobs) == first + k + 1 < len(r.prompt_ids):
                r.prompt_logprobs.append(self._named(found, k))

    def _named(self, found: Logprobs, k: int) -> TokenLogprobs:
        """One token's log-probabilities by id, by falling probability; the token itself comes first where it is not
        among the most probable ones."""
        ids, values, ranks = (x[k].tolist() for x in (found.ids, found.values, found.ranks))
        places = range(1, len(ids)) if ids[0] in ids[1:] else range(len(ids))
        text: Callable[[int], str | None] = self.decode or (lambda token: None)
        return {ids[j]: Logprob(values[j], ranks[j], text(ids[j])) for j in places if ids[j] >= 0}

    # ---- prefix cache -----------------------------------------------------------------------------------------------
    def _publish(self, slots: NDArray[Any]) -> None:
        """Blocks that became full."""
        c = self.table.clocks
        full = c.n[slots] // self.plan.block_tokens > c.pub[slots]
        if not full.any():
            return
        for slot in slots[full & (c.finished[slots] == 0)].tolist():
            s = self.table.sequences[slot]
            if s is not None:
                self.prefix.committed(s)
