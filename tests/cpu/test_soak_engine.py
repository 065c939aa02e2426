"""2,000 random operations on a compiled engine in both loops; more: `python tests/soak_engine.py --budget N`."""

from __future__ import annotations

import logging

import pytest
from soak_engine import soak


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


def test_random_traffic_gives_the_answers_of_cold_runs() -> None:
    found = soak(2_000, seed=100)
    for what in ("arrivals", "aborts", "cached tokens", "drafts kept", "dropped", "faults", "spilled"):
        assert found[what], what

