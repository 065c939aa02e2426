"""What the compiler asks of a target: capabilities, storage of values, source text, binaries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from deepinfer.codegen.kernels.spec import KernelSpec
from deepinfer.dsl.types import DType

# Instruction sets to build for: all that the target has, so that an engine runs on every machine of its kind, or the
# best one of the machine that compiles.
ALL, HOST = "all", "host"

# How much of a row an op needs at once; a slot that works at one granularity takes ops of it and of finer ones.
GRANULARITIES = ("none", "element", "group", "row")


@dataclass(frozen=True)
class Roof:
    """A machine as two limits, for predictions: ``read`` bytes a second from memory, ``multiply`` multiply-adds a
    second in the widest format of its matrix units; ``basis``: where the figures come from.

    For backends that predict cycles (backends/work.py): ``clock`` (Hz), ``units`` of each kind, ``launch`` seconds
    that a launch takes by itself.
    """

    machine: str
    read: float
    multiply: float
    basis: str
    clock: float = 0.0
    units: tuple[tuple[str, int], ...] = ()
    launch: float = 0.0

    def seconds(self, size: float, macs: float) -> float:
        """Least time for ``size`` bytes and ``macs`` multiply-adds."""
        return max(size / self.read, macs / self.multiply)


@dataclass(frozen=True)
class Capabilities:
    """What the skeletons of a target can carry; fusion is legality against these, see codegen/passes/fuse.py.

    ``prologue`` / ``epilogue``: widest granularity of the slot before / after each family's anchor. ``shared_input``:
    contractions of the same rows run in one kernel. ``group``: most elements of a group that a slot of that granularity
    holds, 0 for any. ``row_columns``: most results of a contraction that rowwise kernels carry, 0 for none.
    ``mixed_tiles``: unrelated contractions may share a launch. ``ticket``: the last block of a row can run a row-wide
    step after the anchor in the same kernel. ``barrier_us``: cost of a kernel boundary. ``workspace_bytes``: values
    inside row loops (codegen/plan/row_loops.py): little where caches should hold them, much where a product of few rows
    is slow. ``on_chip_bytes``: bytes of live row data a kernel may hold. ``draws``: there are kernels that
    draw tokens; else drafts are the largest logits, and the runtime draws on the host. ``fetches``: rows of lookup
    tables can be asked for ahead of their use. ``roofs``: machines that reports predict for; they change no code.
    """

    target: str
    prologue: dict[str, str] = field(default_factory=dict)
    epilogue: dict[str, str] = field(default_factory=dict)
    group: int = 0
    row_columns: int = 0
    shared_input: bool = False
    mixed_tiles: bool = False
    ticket: bool = False
    barrier_us: float = 1.0
    workspace_bytes: int = 64 << 20
    on_chip_bytes: int = 1 << 20
    draws: bool = False
    fetches: bool = False
    roofs: tuple[Roof, ...] = ()


@dataclass(frozen=True)
class Source:
    """Generated text of one kernel. Items: see codegen/plan/launch.py.

    ``exchange_bytes``: more than 0 for a kernel in two stages. The first leaves so many bytes at most to the second,
    which runs over single rows when all items of the first are done.
    """

    symbol: str
    text: str
    suffix: str
    rows_per_item: int
    items_per_tile: int
    scratch_bytes: int
    exchange_bytes: int = 0


@dataclass(frozen=True)
class Binary:
    """Compiled kernels of an engine: files to put into ``lib/``, and what made them. ``isa``: as asked for;
    ``instruction_sets``: what that came to; ``compiled``: for the target, else for its stand-in on this machine."""

    files: dict[str, Path]
    compilers: dict[str, str]
    cache_hits: int
    cache_misses: int
    isa: str = ALL
    instruction_sets: tuple[str, ...] = ()
    compiled: bool = True


class Backend(Protocol):
    """One folder under backends/. ``TARGETS``: names it serves; ``BUILT``: whether it can compile today."""

    TARGETS: tuple[str, ...]
    BUILT: bool

    def capabilities(self, target: str) -> Capabilities: ...

    def stored(self, dtype: DType) -> DType:
        """Plain dtype in which a value of ``dtype`` lies in the arena; must hold it exactly."""
        ...

    def emit(self, spec: KernelSpec) -> Source: ...

    def compile(self, sources: Sequence[Source], *, jobs: int, isa: str = ALL,
                progress: Callable[[str], None] | None = None) -> Binary: ...
