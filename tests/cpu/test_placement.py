"""Affinity and memory nodes: threads run where they were asked to, results stay, wrong wishes are one sentence."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner
from cpu.test_runner import feed, lib, opened

from deepinfer.cli import main
from deepinfer.errors import PlanError
from deepinfer.runtime import placement
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
    for bad in ("", "a", "1-", "-3", "1,,2", "2-0", "1,0-2", "0,0", "0-99999999999"):
        with pytest.raises(ValueError):
            cpu_list(bad)


def test_no_more_threads_run_than_there_are_processors_and_an_event_says_so(caplog: pytest.LogCaptureFixture) -> None:
    placed = Placement((ALLOWED[0],))
    assert Placement().threads(1) == placed.threads(1) == 1
    assert not caplog.records
    assert placed.threads(2) == 1
    assert Placement().threads(len(ALLOWED) + 1) <= len(ALLOWED)
    assert [r.getMessage().split()[:2] for r in caplog.records] == [["threads", "asked=2"],
                                                                    ["threads", f"asked={len(ALLOWED) + 1}"]]


@pytest.mark.parametrize(("limits", "expected"), [
    ({"": "max 100000", "a/b": "250000 100000"}, 2), ({"a": "100000 100000", "a/b": "max 100000"}, 1),
    ({"a/b": "50000 100000"}, 1), ({}, 64), ({"elsewhere": "100000 100000"}, 64), ({"a/b": "garbage"}, 64)])
def test_a_quota_of_the_control_group_counts_as_processors(limits: dict[str, str], expected: int, tmp_path: Path,
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "own"
    own.write_text("4:memory:/elsewhere\n0::/a/b\n")
    for group, text in limits.items():
        (tmp_path / "groups" / group).mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups" / group / "cpu.max").write_text(text + "\n")
    monkeypatch.setattr(placement, "_OWN_GROUP", own)
    monkeypatch.setattr(placement, "_GROUPS", tmp_path / "groups")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    assert placement.processors() == expected


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


@pytest.mark.parametrize(("given", "sentence"), [
    ({"cpus": "all"}, "cpus: this is no list of processors; found all; allowed off, each, or a list like"),
    ({"cpus": "9999"}, "cpus: the process may not use these processors; found 9999; allowed"),
    ({"numa": "on"}, "numa: this placement of memory does not exist; found on; allowed off, interleave, local")])
def test_an_argument_is_checked_like_the_environment_and_comes_before_it(given: dict[str, str], sentence: str,
                                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(AFFINITY, "off")
    monkeypatch.setenv(NUMA, "off")
    with pytest.raises(PlanError) as e:
        Placement.wanted(**given)
    assert str(e.value).startswith(sentence)
    monkeypatch.setenv(AFFINITY, "9999")
    assert Placement.wanted(cpus=str(ALLOWED[-1])) == Placement((ALLOWED[-1],), "off")
    assert Placement.wanted(cpus="off").threads(None) is None


@pytest.mark.parametrize("command", ["serve", "chat", "drift", "profile"])
def test_commands_refuse_a_wrong_placement_before_they_look_for_an_engine(command: str) -> None:
    for flag, value, sentence in (
            ("--cpus", "9999", "may not use these processors; found 9999; allowed"),
            ("--cpus", "some", "this is no list of processors; found some; allowed off, each, or a list"),
            ("--numa", "on", "'on' is not one of 'off', 'interleave', 'local'"),
            ("--threads", "0", "0 is not in the range x>=1")):
        result = CliRunner().invoke(main, [command, "engines/missing", flag, value])
        assert result.exit_code == 2
        assert f"'{flag}'" in result.output
        assert sentence in result.output
        assert "\n" not in result.output.strip()


def test_a_config_file_has_the_flags_names(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(f'threads = 1\ncpus = "{ALLOWED[0]}"\nnuma = "local"\n')
    result = CliRunner().invoke(main, ["serve", "m", "--config", str(file), "--print-config"])
    assert result.exit_code == 0, result.output
    for line in ("threads = 1  # file", f'cpus = "{ALLOWED[0]}"  # file', 'numa = "local"  # file'):
        assert line in result.output
    file.write_text('cpus = "9999"\n')
    result = CliRunner().invoke(main, ["serve", "m", "--config", str(file), "--print-config"])
    assert result.exit_code == 2
    assert f"{file}: cpus: " in result.output


def test_on_one_node_the_wish_is_taken_and_nothing_done(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def policy(mode: int) -> int:
        calls.append(mode)
        return 1

    monkeypatch.setenv(NUMA, "interleave")
    with Placement.wanted().memory(policy):
        assert calls == [1]
    assert calls == [1, 0]
