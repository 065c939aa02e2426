"""Steps in the order in which they were submitted. Where the host may lag behind, a thread of their own runs them, or
the engine by itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from deepinfer.errors import InternalError
from deepinfer.runtime.backend import Engine
from deepinfer.runtime.executor import StepResult


class StepQueue:
    """What executors over an engine share. ``lag``: steps that may be in flight besides the one waited for; with any,
    a thread runs them."""

    def __init__(self, engine: Engine, lag: int) -> None:
        self.engine = engine
        self._waiting: deque[tuple[int, Callable[[], StepResult]]] = deque()
        self._tickets = 0
        self._worker = ThreadPoolExecutor(1, "steps") if lag else None

    def start(self, run: Callable[[], StepResult]) -> int:
        """Run a step behind those before it; its ticket."""
        self._tickets += 1
        found: Future[StepResult]
        if self._worker is not None:
            found = self._worker.submit(run)
        else:
            found = Future()
            try:
                found.set_result(run())
            except Exception as error:
                found.set_exception(error)
        self._waiting.append((self._tickets, found.result))
        return self._tickets

    def ahead(self, send: Callable[[], None], collect: Callable[[], StepResult]) -> int:
        """``send`` a step to an engine that runs it by itself, ``collect`` what it brought when it is waited for."""
        self._tickets += 1
        try:
            send()
        except Exception as error:
            failed: Future[StepResult] = Future()
            failed.set_exception(error)
            collect = failed.result
        self._waiting.append((self._tickets, collect))
        return self._tickets

    def wait(self, ticket: int) -> StepResult:
        """See ``Executor``."""
        first, found = self._waiting.popleft()
        if first != ticket:
            raise InternalError(f"step {ticket} is waited for before step {first}")
        return found()

    def state(self, name: str, unit: int) -> NDArray[np.uint8]:
        """See ``Executor``."""
        return self.engine.state(name, unit)

    def close(self) -> None:
        """See ``Executor``."""
        if self._worker is not None:
            self._worker.shutdown()
        self.engine.close()
