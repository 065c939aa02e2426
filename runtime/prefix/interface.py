"""What the scheduler asks a prefix cache, and the cache that never has anything."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from deepinfer.runtime.memory import SequenceMemory, Use
    from deepinfer.runtime.metrics import Metrics
    from deepinfer.runtime.sequence import Sequence


@dataclass(frozen=True)
class Hit:
    """A prefix that a waiting sequence may adopt.

    Args:
        floor: positions whose cache entries are there (h), a multiple of the block; 0: nothing was found.
        blocks: cache blocks 0 .. floor / B - 1 that adopting shares, and so does not take from the free ones.
        found: whatever the cache needs to adopt it (window snapshot, lineage).
        pending: blocks are on their way from a tier; ask again at the next step.
    """

    floor: int = 0
    blocks: tuple[int, ...] = ()
    found: Any = None
    pending: bool = False


MISS = Hit()
PENDING = Hit(pending=True)


class PrefixCache(Protocol):
    """Called by the scheduler between steps, with the engine's lock held. Blocks are those of the engine's pool: the
    cache holds each of its blocks once (``Pool.share``), and says which by ``held``.

    Life of a sequence: ``lookup`` while it waits and whenever it comes to the head of the queue again; ``adopt`` once
    it has a slot; ``committed`` after steps that filled blocks and after every chunk of its prompt; ``released`` before
    its memory is given back.
    """

    def attach(self, memory: SequenceMemory, busy: Callable[[int], bool], metrics: Metrics) -> None:
        """Take up the work for an engine. ``busy``: whether a step in flight touches a slot."""
        ...

    @property
    def evictable(self) -> int:
        """Blocks that nobody but the cache holds; admission counts them as free."""
        ...

    def lookup(self, s: Sequence, patient: bool = False) -> Hit:
        """The longest prefix of ``s.known_ids()`` that ``s`` may adopt. Pins nothing: ``adopt`` follows at once or a
        new lookup does. A request for prompt log-probabilities gets none. ``patient``: nothing else is to do than to
        wait for blocks that are on their way."""
        ...

    def wait(self) -> None:
        """Let what is on its way arrive: nothing runs, and blocks that it holds are needed."""
        ...

    def stop(self, s: Sequence, first: int, stop: int) -> int:
        """Where the next rows first .. stop - 1 of ``s`` have to end, so that windows can be kept there; ``first``:
        they wait until the step in flight has ended."""
        ...

    def adopt(self, hit: Hit, s: Sequence) -> None:
        """Share the blocks with the sequence's new, empty holding, restore windows into its slot if there is a
        snapshot, and take the clock through ``hit``. The prompt's own transition follows."""
        ...

    def committed(self, s: Sequence) -> None:
        """Blocks up to ``s.clock.n // B`` are full and retired, and their ids final: publish those beyond
        ``s.clock.pub``, raise it, take snapshots."""
        ...

    def released(self, s: Sequence) -> None:
        """The sequence ends or gives up its memory, which is still there: ``s.holding``."""
        ...

    def evict(self, need: int) -> int:
        """Give up at least ``need`` of the evictable blocks if there are so many; how many became free."""
        ...

    def close(self) -> None:
        """The engine ends."""
        ...

    def held(self) -> Iterable[int]:
        """Every block that the cache holds, for the pool's books."""
        ...

    def uses(self) -> Iterable[Use]:
        """What it takes besides the engine's blocks."""
        ...


class NoCache:
    """Nothing is found and nothing is kept."""

    evictable = 0

    def attach(self, memory: SequenceMemory, busy: Callable[[int], bool], metrics: Metrics) -> None:
        pass

    def lookup(self, s: Sequence, patient: bool = False) -> Hit:
        return MISS

    def wait(self) -> None:
        pass

    def stop(self, s: Sequence, first: int, stop: int) -> int:
        return stop

    def adopt(self, hit: Hit, s: Sequence) -> None:
        pass

    def committed(self, s: Sequence) -> None:
        pass

    def released(self, s: Sequence) -> None:
        pass

    def evict(self, need: int) -> int:
        return 0

    def close(self) -> None:
        pass

    def held(self) -> Iterable[int]:
        return ()

    def uses(self) -> Iterable[Use]:
        return ()
