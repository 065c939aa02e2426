"""Whether a checkpoint fits on this machine, asked before a byte of it is fetched or mapped."""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import dataclass
from pathlib import Path

from deepinfer.errors import PlanError

_GROUPS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current"))


@dataclass(frozen=True)
class Need:
    """Bytes that serving takes: ``weights`` in memory, ``tables`` that may stay mapped on disk, ``engine`` (values,
    rings, cache blocks), and ``fetch``, what is still to be downloaded."""

    weights: int
    tables: int = 0
    engine: int = 0
    fetch: int = 0

    @property
    def memory(self) -> int:
        return self.weights + self.engine


def gigabytes(size: int) -> str:
    """``510.3 GB``; below one, megabytes."""
    return f"{size / 1e9:.1f} GB" if size >= 10**9 else f"{size / 1e6:.1f} MB"


def available_memory() -> int:
    """Bytes of memory that this process may still take: of the machine, and of its control group."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    with contextlib.suppress(OSError, ValueError):  # no control group, or one without a limit
        limit, used = (int(file.read_text(encoding="ascii")) for file in _GROUPS)
        free = min(free, limit - used)
    return free


def free_disk(folder: Path) -> int:
    """Free bytes where ``folder`` is, or will be made."""
    here = folder.absolute()
    while not here.exists():
        here = here.parent
    return shutil.disk_usage(here).free


def require_disk(name: str, size: int, folder: Path, purpose: str = "fetch",
                 otherwise: str = "point HF_HOME at a larger disk") -> None:
    """Raises PlanError when ``size`` bytes, of which ``purpose`` says what for, do not fit into ``folder``."""
    free = free_disk(folder)
    if size > free:
        raise PlanError("the checkpoint does not fit on the disk", where=name,
                        found=f"{gigabytes(size)} to {purpose} into {folder}", allowed=f"{gigabytes(free)} free",
                        next_step=_instead(otherwise))


def require_memory(name: str, need: Need) -> None:
    """Raises PlanError when weights and engine do not fit into memory; tables need not."""
    free = available_memory()
    if need.memory > free:
        parts = [f"{gigabytes(need.weights)} of weights"]
        parts += [f"{gigabytes(need.engine)} for the engine"] if need.engine else []
        parts += [f"{gigabytes(need.tables)} of lookup tables stay on disk"] if need.tables else []
        raise PlanError("the checkpoint does not fit into memory", where=name, found=", ".join(parts),
                        allowed=f"{gigabytes(free)} available", next_step=_instead("use a larger machine"))


def require_device_memory(name: str, free: int, need: Need) -> None:
    """Raises PlanError when weights and engine do not fit into the memory of a device, before any of it is taken."""
    if need.memory > free:
        raise PlanError("the engine does not fit into the memory of the device", where=name,
                        found=f"{gigabytes(need.weights)} of weights, {gigabytes(need.engine)} for values and caches",
                        allowed=f"{gigabytes(free)} free", next_step=_instead(
                            "give LLM fewer num_blocks or max_num_seqs, or compile fewer layers"))


def _instead(first: str) -> str:
    return (f"{first}, or run a smaller model of the same kind here: "
            "`python -m deepinfer.tools.make_checkpoint --help` makes one")
