"""The threads of an engine by themselves: every item once, nobody waits for a thread that has not come, and steps that
are sent ahead run in their order."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from deepinfer.machine import cxx_compiler
from deepinfer.runtime.native.build import SOURCE_FOLDER

SOURCE = Path(__file__).parent / "runner" / "team_check.cpp"


@pytest.fixture(scope="module")
def check(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("team") / "team_check"
    subprocess.run([cxx_compiler(), "-std=c++17", "-O1", "-pthread", f"-I{SOURCE_FOLDER}", str(SOURCE),
                    str(SOURCE_FOLDER / "team.cpp"), str(SOURCE_FOLDER / "ahead.cpp"), "-o", str(out)], check=True)
    return out


def holds(check: Path, what: str) -> None:
    done = subprocess.run([check, what], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_item_of_a_launch_is_done_once_and_seen_by_the_next(check: Path) -> None:
    holds(check, "shares")


def test_launches_end_while_threads_that_have_not_begun_a_share_are_held(check: Path) -> None:
    holds(check, "held")


def test_calls_are_made_in_order_and_none_behind_a_fault(check: Path) -> None:
    holds(check, "ahead")


def test_a_thread_rests_when_it_costs_more_than_it_does_and_not_for_one_interrupt(check: Path) -> None:
    holds(check, "account")
