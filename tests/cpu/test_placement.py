"""Affinity and memory nodes: threads run where they were asked to, results stay, wrong wishes are one sentence."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

import pytest
from cpu.test_runner import feed, lib, opened

from deepinfer.errors import PlanError
from deepinfer.runtime.placement import AFFINITY, NUMA, Placement, cpu_list

__all__ = ["lib"]
ALLOWED = sorted(os.sched_getaffinity(0))


def masks() -> list[set[int]]:
    """Processors of every thread of this process but the main one's."""
    found = []
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # a thread of an earlier test has just ended
            if int(thread.name) != os.getpid():
                found.append(os.sched_getaffinity(int(thread.name)))
    return found


def test_threads_keep_to_their_processors_and_results_do_not_change(lib: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = feed(opened(lib), [9, 14], 3)
    monkeypatch.setenv(AFFINITY, "each")
    monkeypatch.setenv(NUMA, "interleave")
    placed, seen = opened(lib, threads=len(ALLOWED)), list[set[int]]()

    def work() -> None:  # a thread of its own, whose processors are nobody else's afterwards
        assert feed(placed, [9, 14], 3) == plain
        seen.append(os.sched_getaffinity(0))
        seen.extend(masks())

    runner = threading.Thread(target=work)
    runner.start()
    runner.join()
    for cpu in ALLOWED:
        assert {cpu} in seen


def test_an_engine_has_as_many_threads_as_processors_were_named(lib: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cpu.test_runner import INTERFACE

    from deepinfer.runtime.native_engine import NativeEngine

    monkeypatch.setenv(AFFINITY, str(ALLOWED[0]))
    assert NativeEngine(lib, INTERFACE, slots=2, blocks=2).threads == 1


def test_lists_of_processors_are_read_like_the_kernel_writes_them() -> None:
    assert cpu_list("0-2,5\n") == [0, 1, 2, 5]
    for bad in ("", "a", "1-", "-3", "1,,2"):
        with pytest.raises(ValueError):
            cpu_list(bad)


@pytest.mark.parametrize(("variable", "value", "sentence"), [
    (AFFINITY, "all", f"{AFFINITY}: this is no list of processors; found all; allowed off, each, or a list like"),
    (AFFINITY, "9999", f"{AFFINITY}: the process may not use these processors; found 9999"),
    (NUMA, "on", f"{NUMA}: this placement of memory does not exist; found on; allowed off, interleave, local")])
def test_wrong_wishes_are_one_sentence(variable: str, value: str, sentence: str,
                                       monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(PlanError) as e:
        Placement.wanted()
    assert str(e.value).startswith(sentence)


def test_on_one_node_the_wish_is_taken_and_nothing_done(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def policy(mode: int) -> int:
        calls.append(mode)
        return 1

    monkeypatch.setenv(NUMA, "interleave")
    with Placement.wanted().memory(policy):
        assert calls == [1]
    assert calls == [1, 0]
