"""Cycles of a kernel's pipes, from what its text does: what reports predict times with.

``reading`` counts the instructions, copies and products of each core of a block, the CPU twin counts them while it runs
(``tests/ascend/test_cost.py`` compares both), and ``cycles`` is the table that makes cycles of either:

    V             an instruction on a register each, and CALL for entering and leaving a vector function
    M             16 x 16 results a cycle over 32 bytes of features
    MTE1, FIX     bytes from L1 to L0, and of f32 results from L0C, over the rates of target.PATHS
    MTE2, MTE3    bytes from memory over the rate of L2; bytes to memory over the same, and to L1 over that of UB_L1
    S             COPY for each copy that the core starts
    L2            bytes from and to memory of all cores of an AI core over the rate of L2, which they share

Cores of a block work beside each other: of each pipe the busiest core counts. Not modelled: conflicts of memory banks,
instruction fetch, loads of the scalar unit, waiting for flags.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from deepinfer.backends.ascend950.reading import Kernel
from deepinfer.backends.ascend950.target import PATHS, VECTOR_CORES
from deepinfer.backends.grid import Grid
from deepinfer.backends.work import Pipes, Work

COPY = 20.0  # cycles, assumed
CALL = 20.0  # cycles, assumed
LEAST_ROWS = 32  # of a tile of inputs: below, the cube core multiplies rows that are not there
CUBE, VECTORS = -1, (0, 1)  # cores of a block, as ``reading`` numbers them
MANY = 4096  # keys at which the cost of a key is read


def cycles(did: Mapping[str, float]) -> dict[str, float]:
    """Cycles of each pipe of a core that did so much (``DID`` of twin/run.py)."""
    n = {name: float(did.get(name, 0)) for name in (
        "functions", "instructions", "copies", "bytes_in", "bytes_out", "bytes_to_l1", "bytes_to_l0",
        "bytes_of_results", "products")}
    return {"S": n["copies"] * COPY, "V": n["instructions"] + n["functions"] * CALL, "M": n["products"],
            "MTE1": n["bytes_to_l0"] / PATHS["L1_L0"], "MTE2": n["bytes_in"] / PATHS["L2"],
            "MTE3": n["bytes_out"] / PATHS["L2"] + n["bytes_to_l1"] / PATHS["UB_L1"],
            "FIX": n["bytes_of_results"] / PATHS["L0C_UB"]}


def of_unit(cores: Sequence[Mapping[str, float]], share: float) -> dict[str, float]:
    """The same for cores that work beside each other; ``share``: of the L2 path that they have to themselves."""
    each = [cycles(did) for did in cores]
    moved = sum(float(did.get(name, 0)) for did in cores for name in ("bytes_in", "bytes_out"))
    return {pipe: max(c[pipe] for c in each) for pipe in each[0]} | {"L2": moved / PATHS["L2"] / share}


@dataclass(frozen=True)
class Question:
    """How the text of a kernel is asked for its work.

    Args:
        function, unit, grid: of the stage that does the work.
        launches: stages; those before are counted as launches only.
        tiles: variants of an item with their shares, as numbers of variables in the text.
        inputs: whether an item has up to 64 input rows (``valid`` in the text), fewer than 32 being multiplied as 32.
        run: items of the same input rows that a block takes one after the other.
        keys: variables that say how many keys of each source a row meets, with their shares of all keys.
        overlapped: whether the pipes work beside each other.
        known: other numbers.
    """

    function: str
    unit: str
    grid: Grid
    launches: int = 1
    tiles: tuple[tuple[float, tuple[tuple[str, int], ...]], ...] = ((1.0, ()),)
    inputs: bool = False
    run: int = 1
    keys: tuple[tuple[str, float], ...] = ()
    overlapped: bool = True
    known: tuple[tuple[str, int], ...] = field(default=())

    def work(self, text: str) -> Work:
        """The answer."""
        kernel = Kernel(text, self.function)
        start = self._read(kernel, 0, {})
        grid = (self.grid.of, self.grid.per, self.grid.plus, self.grid.times, self.grid.fixed)
        if self.inputs:
            few, least, most = (self._items(kernel, start, {"valid": n}) for n in (16, LEAST_ROWS, 2 * LEAST_ROWS))
            row = _times(_less(least, few), 1 / 16)
            padded = _less(_times(_less(most, least), 1 / LEAST_ROWS), row)
            item = _less(least, _times(_plus(row, padded), LEAST_ROWS))
            return Work(self.unit, grid, _pipes(item), _pipes(row), _pipes(padded), (), LEAST_ROWS, self.overlapped,
                        _pipes(start), self.launches)
        none = {name: 0 for name, _ in self.keys}
        alone, key = self._items(kernel, start, none), dict[str, float]()
        item = alone
        for name, share in self.keys:
            some, more = (self._items(kernel, start, {**none, name: n}) for n in (MANY, 2 * MANY))
            slope = _less(more, some)  # of MANY keys
            key = _plus(key, _times(slope, share / MANY))
            item = _plus(item, _less(_less(some, slope), alone))
        times = self.grid.times  # items of a row, each of which meets all keys
        return Work(self.unit, grid, _pipes(item), (), (), _pipes(_times(key, times)), 1, self.overlapped,
                    _pipes(start), self.launches)

    def _items(self, kernel: Kernel, start: Mapping[str, float], given: Mapping[str, int]) -> dict[str, float]:
        """Cycles of an item, the mean of all variants."""
        total: dict[str, float] = {}
        for share, variant in self.tiles:
            read = _less(self._read(kernel, self.run, {**given, **dict(variant)}), start)
            total = _plus(total, _times(read, share / self.run))
        return total

    def _read(self, kernel: Kernel, items: int, given: Mapping[str, int]) -> dict[str, float]:
        numbers = {"row_first": 0, "t0": 0, "rows": items, "items": items, "stop": items, **dict(self.known), **given}
        if self.unit == "vector":
            return of_unit([kernel.did(VECTORS[0], numbers)], 1 / VECTOR_CORES)
        return of_unit([kernel.did(core, numbers) for core in (CUBE, *VECTORS)], 1.0)


def _plus(a: Mapping[str, float], b: Mapping[str, float]) -> dict[str, float]:
    return {p: a.get(p, 0.0) + b.get(p, 0.0) for p in {**a, **b}}


def _less(a: Mapping[str, float], b: Mapping[str, float]) -> dict[str, float]:
    return _plus(a, _times(b, -1.0))


def _times(a: Mapping[str, float], n: float) -> dict[str, float]:
    return {p: v * n for p, v in a.items()}


def _pipes(a: Mapping[str, float]) -> Pipes:
    """What there is of it, in f32-like precision so that equal texts give equal files."""
    return tuple((p, round(v, 6)) for p, v in a.items() if abs(v) > 1e-6)
