"""The loop: plan a step, submit it, wait for one, bring its sequences up to date.

With ``lag`` 0 (plain) a step is waited for at once. With ``lag`` 1 (overlapped) the next step is planned and submitted
while one runs, so that the engine never waits for the host: the host then plans with what it knows, which is one step
old, and gives each sequence memory for whatever that step may accept. Both give the same tokens, because nothing that
a step computes depends on when it was planned.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepinfer.runtime.executor import Executor, StepPlan
from deepinfer.runtime.metrics import Metrics
from deepinfer.runtime.plan import EnginePlan
from deepinfer.runtime.residence import Residence
from deepinfer.runtime.results import Results
from deepinfer.runtime.scheduler import Scheduler
from deepinfer.runtime.sequence import Request, Sequence
from deepinfer.runtime.table import SequenceTable


@dataclass(eq=False)
class Flight:
    """A step that was submitted. ``slots``, ``serials``: of its sequences; ``draws``: which of them choose a token;
    ``decoding``, ``prompt``: its rows at most; ``cut``: whether the chunk budget ended its prompt rows."""

    ticket: int
    step: StepPlan
    slots: NDArray[np.int64]
    serials: NDArray[np.int64]
    draws: NDArray[np.int64] | int
    decoding: int
    prompt: int
    cut: bool


@dataclass
class News:
    """Requests with results that somebody waits for, and sequences that ended."""

    touched: list[Request]
    ended: list[Sequence]


NOTHING = News([], [])


class Loop:
    """See the module."""

    def __init__(self, plan: EnginePlan, scheduler: Scheduler, table: SequenceTable, executor: Executor,
                 residence: Residence, results: Results, metrics: Metrics, *, lag: int,
                 now: Callable[[], float]) -> None:
        self.scheduler, self.table, self.executor = scheduler, table, executor
        self.residence, self.results, self.metrics = residence, results, metrics
        self.lag, self.now = lag, now
        self.flights: deque[Flight] = deque()
        self._steps = deque(StepPlan(plan) for _ in range(lag + 1))
        self._host_seconds = 0.0  # since the last step's end, without what the engine took
        self._draining = False

    def turn(self) -> News | None:
        """Submit a step if there is one, and take the oldest result if it is due; None: there was nothing to do."""
        self._draining = self._draining and bool(self.flights)
        sent = not self._draining and self._send()
        if self.flights and (not sent or len(self.flights) > self.lag):
            return self.retire()
        return NOTHING if sent else None

    def _send(self) -> bool:
        step, began = self._steps[0], self.now()
        found = self.scheduler.schedule(step)
        self._host_seconds += self.now() - began
        self._draining = self.scheduler.blocked and bool(self.flights)
        if not found:
            return False
        self._steps.rotate(-1)
        scheduler, rows = self.scheduler, step.sequences
        slots = rows["slot"].astype(np.int64)
        draws = 1 if step.decoding == step.count else rows["draws"].astype(np.int64)
        serials = self.table.serial[slots]
        self.flights.append(Flight(self.executor.submit(step), step, slots, serials, draws, scheduler.decoding,
                                   scheduler.prompt_rows, scheduler.chunk_cut))
        return True

    def retire(self) -> News:
        """Wait for the oldest step in flight and take its result. Raises what the engine raised."""
        flight = self.flights.popleft()
        try:
            result = self.executor.wait(flight.ticket)
        except Exception:
            self._forget(flight)
            raise
        began = self.now()
        touched, ended = self.results.take(flight, result, began)
        for s in ended:
            self.scheduler.drop(s)
        if self.residence.leaving:
            self.residence.sweep()
        self.scheduler.chunks.observe(flight.decoding, flight.prompt, result.seconds, flight.cut)
        self.metrics.steps.add()
        self.metrics.iteration_tokens.observe(flight.step.rows_run(result))
        self.metrics.engine_seconds.observe(result.seconds)
        self.metrics.host_seconds.observe(self._host_seconds + self.now() - began)
        self._host_seconds = 0.0
        return News(touched, ended)

    def give_up(self) -> None:
        """The engine failed: nothing is in flight any more, whatever is left of it is ignored."""
        while self.flights:
            flight = self.flights.popleft()
            with suppress(Exception):
                self.executor.wait(flight.ticket)
            self._forget(flight)
        self.table.forget_flights()  # also of a step that was never submitted
        self._draining = False

    def _forget(self, flight: Flight) -> None:
        self.table.retire(flight.slots, flight.draws)
