"""Where the threads of a CPU engine run, and on which memory nodes its pages lie.

Wishes are arguments (``cpus`` and ``numa`` of ``LLM`` and of the commands), else come from the environment:

``DEEPINFER_AFFINITY``  ``off`` (default): the system moves threads as it likes; ``each``: one processor for every
thread, of those that the process may use; or a list like ``0-7,16``.
``DEEPINFER_NUMA``      ``off`` (default): pages lie where they are touched first, which is one node; ``interleave``:
pages of values, rings and cache are spread over all nodes; ``local``: threads keep to the processors of the node that
the process starts on. On a machine with one node nothing is done, and an event says so.

Results never depend on either.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from deepinfer.errors import PlanError
from deepinfer.runtime import events

AFFINITY, NUMA = "DEEPINFER_AFFINITY", "DEEPINFER_NUMA"
MODES = ("off", "interleave", "local")
_NODES = Path("/sys/devices/system/node")
_GROUPS = Path("/sys/fs/cgroup")
_OWN_GROUP = Path("/proc/self/cgroup")
_MOST = 1 << 16  # processors: more are in no machine, and a list of them would not end
_DEFAULT, _INTERLEAVED = 0, 1  # DI_MEMORY_* of runtime/native/placement.h


def cpu_list(text: str) -> list[int]:
    """``0-2,5`` -> [0, 1, 2, 5]; ValueError for anything else, backward ranges and repeats too."""
    found = list[int]()
    for part in text.strip().split(","):
        first, dash, last = part.partition("-")
        start, stop = int(first), int(last if dash else first)
        if not 0 <= start <= stop < _MOST:
            raise ValueError(part)
        found += range(start, stop + 1)
    if len({*found}) < len(found):
        raise ValueError(text)
    return found


def processors() -> int:
    """Processors that this process may keep busy: those it may run on, as far as its control group's quota of their
    time goes; at least one."""
    return max(1, min([len(os.sched_getaffinity(0)), *_quotas()]))


def _quotas() -> Iterator[int]:
    """Whole processors of time that each control group around this process grants (version 2 of control groups)."""
    try:
        own = next(line[3:] for line in _OWN_GROUP.read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        return
    folder = _GROUPS / own.strip().lstrip("/")
    for group in (folder, *folder.parents):
        if group.is_relative_to(_GROUPS):
            with suppress(OSError, ValueError):  # no file, or "max": no limit
                quota, period = map(int, (group / "cpu.max").read_text().split())
                yield quota // period


@dataclass(frozen=True)
class Placement:
    """``cpus``: processors of the threads, in their order; empty: anywhere. ``numa``: one of MODES."""

    cpus: tuple[int, ...] = ()
    numa: str = "off"

    @staticmethod
    def wanted(cpus: str | None = None, numa: str | None = None) -> Placement:
        """What is asked for, by arguments before the environment; PlanError where that cannot be had."""
        numa, where = _wish(numa, "numa", NUMA)
        if numa not in MODES:
            raise PlanError("this placement of memory does not exist", where=where, found=numa,
                            allowed=", ".join(MODES))
        allowed = sorted(os.sched_getaffinity(0))
        found = _affinity(*_wish(cpus, "cpus", AFFINITY), allowed)
        if numa == "local" and not found:
            found = _node_of(allowed)
        return Placement(tuple(found), numa)

    def threads(self, asked: int | None) -> int | None:
        """Threads of an engine: as many as were asked for, else one for each processor that was named. More than there
        are processors would wait for each other at every launch: they are not begun, and an event says so."""
        most = len(self.cpus) or processors()
        if asked and asked > most:
            events.warn("threads", asked=asked, processors=most, done=f"{most} run: more would wait for each other")
            return most
        return asked or len(self.cpus) or None

    @contextmanager
    def memory(self, set_policy: Callable[[int], int]) -> Iterator[None]:
        """While it lasts, pages that are touched first lie as asked. ``set_policy``: native, returns the nodes."""
        if self.numa != "interleave":
            yield
            return
        nodes = set_policy(_INTERLEAVED)
        events.info("numa", wanted=self.numa, nodes=nodes, done="interleaved" if nodes > 1 else "nothing: one node")
        try:
            yield
        finally:
            set_policy(_DEFAULT)


def _wish(given: str | None, argument: str, variable: str) -> tuple[str, str]:
    """A wish and where it comes from."""
    if given is not None:
        return str(given).strip(), argument
    return os.environ.get(variable, "").strip() or "off", variable


def _affinity(wanted: str, where: str, allowed: list[int]) -> list[int]:
    if wanted == "off":
        return []
    if wanted == "each":
        return allowed
    try:
        cpus = cpu_list(wanted)
    except ValueError:
        raise PlanError("this is no list of processors", where=where, found=wanted,
                        allowed="off, each, or a list like 0-7,16") from None
    foreign = sorted({*cpus} - {*allowed})
    if foreign:
        raise PlanError("the process may not use these processors", where=where,
                        found=", ".join(map(str, foreign)), allowed=", ".join(map(str, allowed)))
    return cpus


def _node_of(allowed: list[int]) -> list[int]:
    """Allowed processors of the memory node with the first of them; none on a machine with one node."""
    nodes = [cpu_list(text) for p in sorted(_NODES.glob("node[0-9]*/cpulist")) if (text := p.read_text().strip())]
    if len(nodes) < 2:
        events.info("numa", wanted="local", nodes=max(1, len(nodes)), done="nothing: one node")
        return []
    home = next((n for n in nodes if allowed[0] in n), allowed)
    return [c for c in allowed if c in home]
