"""Inputs under which mistakes of a kernel show: what nothing may read is no number, what nothing wrote is not zero by
luck, and numbers that stand in for others differ from them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from cpu.regions import RegionRunner
from cuda.arguments import Arguments

from deepinfer.backends.ascend950.source import AscendSource
from deepinfer.backends.cpu.storage import record_parts
from deepinfer.codegen.kernels.spec import KernelSpec

PICKS = 96  # one and a half tiles
FILLED = 40  # picks of a row that are entries
SEED = 3
GIVEN = 1000  # first number of a selection that is given
UNWRITTEN, NO_NUMBER, GREATEST = 0xA5, 0xFF, 0x7E  # bytes: of outputs, of a record, of a scale in E4M3


def more_picks(spec: KernelSpec) -> KernelSpec:
    """The same attention on longer selections; every other kernel as it is."""
    if spec.family != "attend":
        return spec
    picked = {s[4] for s in spec.get("sources") if s[0] == "selected"}
    return replace(spec, operands=tuple(replace(op, dims=(PICKS,)) if i in picked else op
                                        for i, op in enumerate(spec.operands)))


def awkward(spec: KernelSpec, source: AscendSource, made: Arguments, runner: RegionRunner) -> None:
    """Changes the arguments."""
    places = {p.where: i for i, p in enumerate(source.parameters)}
    for i, op in enumerate(spec.operands):
        if op.role == "value" and op.write:
            made.values[places["value", i]].reshape(-1).view(np.uint8)[:] = UNWRITTEN  # type: ignore[union-attr]
        if spec.family == "rowwise" and ("param", i, "scale") in places:
            scales: Any = made.values[places["param", i, "scale"]]
            if scales.dtype == np.uint8:
                scales -= (np.arange(scales.size) * 7 % 11).astype(np.uint8).reshape(scales.shape)
    if spec.family == "score_select":
        keys, ratio = spec.get("keys"), spec.get("ratio")
        _equals(made.values[places["state", keys, "base"]], int(_known(made, places, ratio).min()), runner, ratio)
    if spec.family == "attend":
        for kind, ratio, keys, _, picked in spec.get("sources"):
            if kind == "selected":
                made.values[places["value", picked]] = _picks(made, places, ratio)
                _entries(spec.operands[keys], made.values[places["state", keys, "base"]], made, places, ratio, runner)


def pinned(spec: KernelSpec, source: AscendSource, made: Arguments) -> bool:
    """Has selections be the given ones, none of which is a place of an entry; False where nothing is selected."""
    places = {p.where: i for i, p in enumerate(source.parameters)}
    pins = [where for where in places if where[0] == "pin" and where[-1] != "given"]
    for where in pins:
        made.values[places[(*where, "given")]] = 1
        count = made.rows * spec.operands[where[1]].size
        made.values[places[where]] = np.arange(GIVEN, GIVEN + count, dtype=np.int32)
    return bool(pins)


def _equals(base: Any, known: int, runner: RegionRunner, ratio: int) -> None:
    """Entries of the later half have one score: which of them are taken hangs on their numbers."""
    per = runner.block_tokens // ratio
    for e in range(known // 2, known):
        base[runner.blocks[e // per], e % per] = base[runner.blocks[known // 2 // per], known // 2 % per]


def _known(made: Arguments, places: dict[Any, int], ratio: int) -> Any:
    """Entries that each row sees."""
    positions: Any = made.values[places["axis", "pos"]]
    return (positions + 1) // ratio


def _picks(made: Arguments, places: dict[Any, int], ratio: int) -> Any:
    """Entries and gaps in no order; the last one is the same for all rows, and entry 0 is never chosen."""
    rng, known = np.random.default_rng(SEED), _known(made, places, ratio)
    picks = np.full((len(known), PICKS), -1, np.int32)
    last = int(known.min()) - 1
    for row in picks:
        row[rng.permutation(PICKS - 1)[:FILLED]] = rng.integers(1, last, FILLED)
    picks[:, -1] = last
    return picks


def _entries(op: Any, base: Any, made: Arguments, places: dict[Any, int], ratio: int, runner: RegionRunner) -> None:
    """Entry 0, which gaps are read from, is no number; the last one has by far the greatest scores."""
    per = runner.block_tokens // op.get("ratio")
    last = int(_known(made, places, ratio).min()) - 1
    base[runner.blocks[0], 0] = NO_NUMBER
    for p in record_parts(op.type):
        if p.dtype.is_block:
            record = base[runner.blocks[last // per], last % per]
            record[p.scales: p.scales + p.dtype.scale_bytes(p.count)] = GREATEST
