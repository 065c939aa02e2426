"""A slice of the soak test with fixed seeds, and the mutants that it has to notice.

The whole of it is `python tests/soak_runtime.py`; its last result is tests/soak_runtime.json.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
from soak_runtime import SHAPES, Soak
from witness import WitnessFailure

from deepinfer.errors import InternalError
from deepinfer.runtime.prefix.cache import MemoryCache
from deepinfer.runtime.residence import Residence
from deepinfer.runtime.sequence import Sequence
from deepinfer.runtime.table import SequenceTable

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


@pytest.mark.parametrize("seed", range(len(SHAPES)))
def test_random_traffic_keeps_every_invariant(seed: int) -> None:
    run = Soak(seed, *SHAPES[seed])
    run.run(1_000)
    told = run.told()
    assert told["arrival"] > 10 and told["steps"] > 30


def test_a_replay_of_memory_that_was_given_up_is_no_history_of_new_entries() -> None:
    """Here a sequence is dropped behind one replay and comes back behind another."""
    seed = 46
    Soak(seed, *SHAPES[seed % len(SHAPES)]).run(8_000)


# ---- mutants --------------------------------------------------------------------------------------------------------
Patch = Callable[[pytest.MonkeyPatch], None]


def changed_row(change: Callable[[Any], None]) -> Patch:
    """The row that a sequence brings to a step."""
    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        original = SequenceTable.settle

        def settle(self: SequenceTable, slot: int) -> None:
            original(self, slot)
            change(self.template[slot])
        monkeypatch.setattr(SequenceTable, "settle", settle)
    return patch


def one_start(row: Any) -> None:
    row["start_kept"] = row["start_step"]


def lower_floor(row: Any) -> None:
    row["floor"] = max(0, row["floor"] - 2)


def published_to_w(monkeypatch: pytest.MonkeyPatch) -> None:
    original = MemoryCache.committed

    def committed(self: MemoryCache, s: Sequence) -> None:
        s.pull()
        clock, tokens = s.clock, s.output.token_ids
        n, count = clock.n, len(tokens)
        clock.n = max(n, clock.w)
        tokens.extend([5] * max(0, clock.n - s.known))
        original(self, s)
        clock.n = n
        del tokens[count:]
    monkeypatch.setattr(MemoryCache, "committed", committed)


def freed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(self: Residence, s: Sequence) -> None:
        if s.holding is not None:
            self._give_back(s)
    monkeypatch.setattr(Residence, "leave", leave)


def nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pass


MUTANTS: dict[str, tuple[Patch, dict[str, Any]]] = {
    "one window start for all axes": (changed_row(one_start), {}),
    "the write floor is one group too low": (changed_row(lower_floor), {}),
    "a ring of windows is one row short": (nothing, {"shorter": {"dec": 1}}),
    "a ring of raw rows is two rows short": (nothing, {"shorter": {"tail": 2}}),  # one of its rows is to spare
    "blocks are published up to the written rows": (published_to_w, {}),
    "ring rows are numbered from the step": (nothing, {"row_slots": True}),
    "memory is freed under a step in flight": (freed_at_once, {}),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_is_caught(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    patch, changes = MUTANTS[mutant]
    patch(monkeypatch)
    with pytest.raises((WitnessFailure, InternalError)):
        for seed in (9, 11, 4, 10, 5):
            Soak(seed, *SHAPES[seed], mutant=changes).run(4_000)
