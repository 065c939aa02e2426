"""A witness engine: the runtime's engine interface without a model.

Every row leaves a record (position, value) in rings and pages laid out as the native engine lays them out, and its
value is a hash of exactly what a row of a real model may see: its ids and look-back, windows from their first valid
row, the entries of completed groups. A read that finds another position than it expects fails at once; a value that
was computed from too much or too little differs from that of ``Reference``, which keeps everything by absolute
position and has neither rings nor pages nor chunks.

    e1 (T) <- ids;  x1 = window(e1);  tail, fine, pooled <- x1;  e2 (T) <- x1
    x2 = window(e2), entries;  deep <- x2;  d1 (T_kept) <- x2;  y1 = window(d1), x2, deep;  d2 (T_kept) <- y1
    logits <- window(d2), y1;  dr (T_kept) <- y1;  draft <- context(dr), block
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer.runtime.backend import block_table
from deepinfer.runtime.batch import Batch
from deepinfer.runtime.plan import PAGED, RING, EnginePlan, StatePlan

MASK = (1 << 64) - 1
A, B_, C = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93, 0xA0761D6478BD642F
RECORD = np.dtype([("pos", np.int64), ("value", np.uint64)])
U64 = NDArray[np.uint64]


class WitnessFailure(AssertionError):
    """A row read something that is not what it should be."""


def witness_plan(*, window: int = 8, block: int = 16, ratio: int = 2, drafts: int = 0, lag: int = 0, lookback: int = 3,
                 vocab: int = 61, seqs: int = 4, step: int = 32, wanted: int = 16, max_len: int = 200,
                 kept: int | None = None, replay: str = "off") -> EnginePlan:
    """Sizes of a witness; rings and tails have exactly the rows that the rules ask for."""
    ring = window + drafts + lag * (drafts + 1)
    states = [StatePlan(n, RING, ring, RECORD.itemsize, axis, reach=window, resume=window * (axis == "T"))
              for n, axis in (("e1", "T"), ("e2", "T"), ("d1", "T_kept"), ("d2", "T_kept"), ("dr", "T_kept"))]
    states.append(StatePlan("tail", RING, ratio - 1 + drafts + 1, RECORD.itemsize, "T", reach=ratio - 1))
    states.append(StatePlan("fine", PAGED, block, RECORD.itemsize))
    states.append(StatePlan("deep", PAGED, block, RECORD.itemsize))
    states.append(StatePlan("pooled", PAGED, block // ratio, RECORD.itemsize, ratio=ratio))
    return EnginePlan(
        model="witness", target="cpu", vocab_size=vocab, max_model_len=max_len, max_num_seqs=seqs,
        limits={"step": step, "kept": kept or step, "wanted": wanted, "seq": seqs}, block_tokens=block, window=window,
        states=tuple(states), entries=("step", "draft") if drafts else ("step",), draft_tokens=drafts, draft_filler=1,
        lookback=lookback, replay=replay, exact_keep=2 * window - 1, least_keep=window, rerun=window,
        exact_rerun=2 * window - 2, host_lag=lag)


def _final(x: U64, tag: int) -> U64:
    x = (x + np.uint64(tag * C & MASK)) * np.uint64(B_)
    x ^= x >> np.uint64(29)
    x *= np.uint64(A)
    return x ^ (x >> np.uint64(32))


def _mixed(x: U64, at: NDArray[np.int64]) -> U64:
    return (x ^ (at.astype(np.uint64) * np.uint64(C))) * np.uint64(B_)


def logits_of(y: U64, vocab: int) -> NDArray[np.float32]:
    """[rows, V] between -4 and 4."""
    h = _final(y[:, None] + np.arange(vocab, dtype=np.uint64) * np.uint64(A), 99)
    return ((h >> np.uint64(40)).astype(np.float32) / np.float32(2**24)) * np.float32(8) - np.float32(4)


class Memory:
    """Rings by slot and pages by block, unwritten records at position -1."""

    def __init__(self, plan: EnginePlan, slots: int, blocks: int) -> None:
        self.data: dict[str, NDArray[Any]] = {}
        for s in plan.states:
            units = slots if s.kind == RING else blocks
            self.data[s.name] = np.full((units, s.rows), np.array((-1, 0), dtype=RECORD))


class WitnessEngine:
    """See the module. ``shorter``: rows that a ring has fewer than its plan says (a mutant)."""

    def __init__(self, plan: EnginePlan, slots: int, blocks: int, shorter: Mapping[str, int] | None = None) -> None:
        self.plan = plan
        self.memory = Memory(plan, slots, blocks)
        self.rows = {s.name: s.rows - (shorter or {}).get(s.name, 0) for s in plan.states}
        self.ratio = next(s.ratio for s in plan.states if s.name == "pooled")
        self.runs = 0
        self.checkpoint: Path | None = None
        self.broken_ids: set[int] = set()  # a row with such an id gets NaN logits
        self.closed = False

    def state(self, name: str, unit: int) -> NDArray[np.uint8]:
        return self.memory.data[name][unit].view(np.uint8)

    def close(self) -> None:
        self.closed = True

    def run(self, entry: str, batch: Batch, pins: Mapping[str, NDArray[np.int32]] | None = None) -> dict[str, Any]:
        self.runs += 1
        plan, seqs = self.plan, batch.sequences[: batch.count]
        for axis, key in (("step", "rows"), ("kept", "kept"), ("wanted", "wanted")):
            need(seqs[key].sum() <= plan.limits[axis], f"{axis} rows over the limit")
        need(batch.count <= plan.limits["seq"] and len(set(seqs["slot"].tolist())) == batch.count, "slots")
        out, row = [], 0
        for s in seqs:
            ids = batch.token_ids[row : row + s["rows"]]
            look = batch.lookback[row : row + s["rows"]]
            row += int(s["rows"])
            out.append(self._draft(s, ids) if entry == "draft" else self._step(s, ids, look))
        return {k: np.concatenate([o[k] for o in out]) for k in out[0]}

    # ---- one sequence ---------------------------------------------------------------------------------------------
    def _step(self, s: np.void, ids: NDArray[np.int64], look: NDArray[np.int64]) -> dict[str, Any]:
        c, q, kept, wanted = (int(s[k]) for k in ("c", "rows", "kept", "wanted"))
        need(0 < q and 0 <= wanted <= kept <= q and np.array_equal(look[:, 0], ids), "rows of a sequence")
        slot, start = int(s["slot"]), int(s["start_step"])
        e1 = _final(_mixed(look.view(np.uint64), np.arange(look.shape[1])).sum(axis=1), 1)
        x1 = self._window(slot, "e1", c, e1, start, c)
        self._entries(s, x1)
        e2 = _final(x1, 5)
        x2 = _final(self._window(slot, "e2", c, e2, start, c) + self._seen(s, ("fine", 1), ("pooled", self.ratio)), 10)
        self._write(s, "deep", _final(x2, 13))
        at = c + q - kept
        x2, deep = x2[q - kept :], self._seen(s, ("deep", 1))[q - kept :]
        first = int(s["start_kept"])
        d1 = _final(x2, 6)
        y1 = _final(self._window(slot, "d1", at, d1, first, c) + x2 + deep, 11)
        d2 = _final(y1, 7)
        y2 = _final(self._window(slot, "d2", at, d2, first, c) + y1, 12)
        raw = _final(x1, 2)
        for name, begin, fresh in (("e1", c, e1), ("e2", c, e2), ("tail", c, raw), ("d1", at, d1), ("d2", at, d2),
                                   ("dr", at, _final(y1, 8))):
            self._commit(slot, name, begin, fresh)
        logits = logits_of(y2[kept - wanted :], self.plan.vocab_size)
        for i, token in enumerate(ids[q - wanted :]):
            if int(token) in self.broken_ids:
                logits[i] = np.nan
        return {"logits": logits}

    def _entries(self, s: np.void, x1: U64) -> None:
        """Write the entries of completed groups and rows that lie at or above the floor."""
        c, q, floor, ratio = int(s["c"]), int(s["rows"]), int(s["floor"]), self.ratio
        need(floor % ratio == 0, "a floor inside a group")
        table = block_table(s)
        need(len(table) >= self.plan.blocks_for(c + q), "blocks for all rows")
        self._write(s, "fine", _final(x1, 4))
        raw = _final(x1, 2)
        for j in range(c // ratio, (c + q) // ratio):
            if j * ratio < floor:
                continue
            rows = np.arange(j * ratio, j * ratio + ratio)
            old = self._ring(int(s["slot"]), "tail", rows[rows < c], "I5")
            values = np.concatenate((old, raw[rows[rows >= c] - c]))
            self._page("pooled", table, j)[()] = (j, _final(_mixed(values, rows - j * ratio).sum(keepdims=True), 3)[0])

    def _write(self, s: np.void, name: str, values: U64) -> None:
        """An entry a row, of rows at or above the floor."""
        c = int(s["c"])
        rows = np.arange(max(c, int(s["floor"])), c + len(values))
        at = self._at(name, block_table(s), rows)
        self.memory.data[name]["pos"][at] = rows
        self.memory.data[name]["value"][at] = values[rows - c]

    def _seen(self, s: np.void, *states: tuple[str, int]) -> U64:
        """For each row the sum over the entries that it sees; ``states``: names and ratios."""
        c, q, table = int(s["c"]), int(s["rows"]), block_table(s)
        total = np.zeros(q, dtype=np.uint64)
        for name, ratio in states:
            count = (c + q) // ratio
            found = self.memory.data[name][self._at(name, table, np.arange(count))]
            need(np.array_equal(found["pos"], np.arange(count)), f"I3: entries of {name}")
            sums = np.concatenate((np.zeros(1, np.uint64), np.cumsum(_mixed(found["value"], np.arange(count)))))
            total += sums[(np.arange(c, c + q) + 1) // ratio]
        return total

    def _at(self, name: str, table: NDArray[np.int32], entries: NDArray[np.int64]) -> tuple[Any, Any]:
        per = self.rows[name]
        return table[entries // per], entries % per

    def _page(self, name: str, table: NDArray[np.int32], j: int) -> NDArray[Any]:
        per = self.rows[name]
        block: NDArray[Any] = self.memory.data[name][int(table[j // per]) : int(table[j // per]) + 1, j % per]
        return block.reshape(())

    def _ring(self, slot: int, name: str, at: NDArray[np.int64], what: str) -> U64:
        found = self.memory.data[name][slot, at % self.rows[name]]
        need(np.array_equal(found["pos"], at), f"{what}: ring {name} at {at.tolist()} holds {found['pos'].tolist()}")
        out: U64 = found["value"]
        return out

    def _window(self, slot: int, name: str, begin: int, fresh: U64, start: int, c: int) -> U64:
        """For each row from position ``begin`` on the mixed sum over its window; rows before c come from the ring."""
        size = self.plan.window
        low = max(start, begin - size + 1, 0)
        old = np.arange(low, min(c, begin))
        need(low >= begin or begin <= c, f"I6: rows {c}..{begin - 1} of {name} are not kept and would be read")
        view = np.concatenate((self._ring(slot, name, old, "I6"), fresh)) if low < begin else fresh
        first = begin - (len(view) - len(fresh))
        rows = np.arange(begin, begin + len(fresh))
        back = np.arange(size)
        at = rows[:, None] - back
        seen = at >= max(start, 0)
        values = view[np.clip(at - first, 0, max(0, len(view) - 1))] if len(view) else np.zeros_like(at, np.uint64)
        out: U64 = np.where(seen, _mixed(values, np.broadcast_to(back, at.shape)), np.uint64(0)).sum(
            axis=1, dtype=np.uint64)
        return out

    def _commit(self, slot: int, name: str, begin: int, fresh: U64) -> None:
        at = np.arange(begin, begin + len(fresh))[-self.rows[name] :]
        ring = self.memory.data[name][slot]
        ring["pos"][at % self.rows[name]] = at
        ring["value"][at % self.rows[name]] = fresh[len(fresh) - len(at) :]

    def _draft(self, s: np.void, ids: NDArray[np.int64]) -> dict[str, Any]:
        c, m = int(s["c"]), len(ids)
        at = np.arange(max(int(s["start_kept"]), c - self.plan.window, 0), c)
        context = _mixed(self._ring(int(s["slot"]), "dr", at, "I7"), c - at).sum(dtype=np.uint64)
        return draft_outputs(int(context), ids, c, self.plan.vocab_size, m)


def draft_outputs(context: int, ids: Sequence[int] | NDArray[np.int64], at: int, vocab: int, m: int) -> dict[str, Any]:
    block = int(_mixed(np.asarray(ids, dtype=np.int64).view(np.uint64), np.arange(at, at + m)).sum(dtype=np.uint64))
    y = _final(np.uint64(context + block & MASK) + np.arange(m, dtype=np.uint64), 20)
    logits = logits_of(y, vocab)
    return {"tokens": logits.argmax(axis=1)[None], "draft_logits": logits[None], "base_logits": logits[None] * 0.5,
            "confidence": logits.max(axis=1)[None]}


def need(holds: Any, what: str) -> None:
    if not holds:
        raise WitnessFailure(what)


@dataclass
class Need:
    """Bytes by number; what ``Package.memory`` answers."""

    total: int


class WitnessPackage:
    """A witness as ``LLM`` takes it."""

    def __init__(self, plan: EnginePlan) -> None:
        self.plan = plan
        self.engine: WitnessEngine | None = None

    def memory(self, slots: int, blocks: int) -> Need:
        size = sum(s.unit_bytes * (slots if s.kind == RING else blocks) for s in self.plan.states)
        return Need(size)

    def start(self, checkpoint: str | Path | None, *, slots: int, blocks: int, threads: int | None = None,
              placement: Any = None, progress: bool = True) -> WitnessEngine:
        self.engine = WitnessEngine(self.plan, slots, blocks)
        self.engine.checkpoint = Path(checkpoint) if checkpoint else None
        return self.engine


class Reference:
    """What the witness computes, kept by absolute position, one row at a time; ``feed``, ``adopt``, ``rewind`` and
    ``draft`` mean what they mean for a session."""

    def __init__(self, plan: EnginePlan) -> None:
        self.plan = plan
        self.ratio = next(s.ratio for s in plan.states if s.name == "pooled")
        self.ids: list[int] = []
        self.values: dict[str, dict[int, int]] = {s.name: {} for s in plan.states}
        self.sums: dict[str, list[int]] = {s.name: [0] for s in plan.states}  # mixed entries before each one
        self.floor = self.row = self.enc = self.dec = 0
        self.hit = False

    def fork(self) -> Reference:
        other = Reference(self.plan)
        other.__dict__.update(self.__dict__)
        other.ids, other.values = list(self.ids), {k: dict(v) for k, v in self.values.items()}
        other.sums = {k: list(v) for k, v in self.sums.items()}
        return other

    def feed(self, ids: Sequence[int], keep: int | None) -> NDArray[np.float32]:
        new = len(self.ids)
        self.ids += [int(i) for i in ids]
        end = len(self.ids)
        if self.hit:
            self.row = max(0, min(self.floor - self.plan.rerun, end - (keep or 0)))
            self.enc = self.dec = self.row
            self.hit = False
        first = self.row if keep is None else max(self.row, end - keep)
        if first > self.row:
            self.dec = first
        y2 = [self._row(i, i >= first) for i in range(self.row, end)]
        out = y2[max(new, first) - self.row :]
        self.row = end
        return logits_of(np.array([y for y in out if y is not None], dtype=np.uint64), self.plan.vocab_size)

    def adopt(self, tokens: int) -> None:
        self.ids, self.floor, self.hit = self.ids[:tokens], tokens, True
        for name in ("e1", "e2", "d1", "d2", "dr", "tail"):
            self.values[name] = {}

    def rewind(self, tokens: int) -> None:
        self.ids, self.row = self.ids[:tokens], tokens

    def draft(self, anchor: int) -> dict[str, Any]:
        n, m = len(self.ids), self.plan.draft_tokens
        context = sum(_mix(self.values["dr"][p], n - p) for p in range(max(self.dec, n - self.plan.window, 0), n))
        return draft_outputs(context & MASK, [anchor] + [self.plan.draft_filler] * (m - 1), n, self.plan.vocab_size, m)

    def _row(self, i: int, kept: bool) -> int | None:
        v, ratio = self.values, self.ratio
        look = [self.ids[i - b] if i >= b else -1 for b in range(self.plan.lookback + 1)]
        v["e1"][i] = _fin(sum(_mix(t & MASK, b) for b, t in enumerate(look)), 1)
        x1 = self._window("e1", i, self.enc)
        v["tail"][i], v["e2"][i] = _fin(x1, 2), _fin(x1, 5)
        if i >= self.floor:
            self._entry("fine", i, _fin(x1, 4))
            if (i + 1) % ratio == 0:
                rows = range(i + 1 - ratio, i + 1)
                self._entry("pooled", i // ratio, _fin(sum(_mix(v["tail"][p], p % ratio) for p in rows), 3))
        seen = self.sums["fine"][i + 1] + self.sums["pooled"][(i + 1) // ratio]
        x2 = _fin(self._window("e2", i, self.enc) + seen, 10)
        if i >= self.floor:
            self._entry("deep", i, _fin(x2, 13))
        if not kept:
            return None
        v["d1"][i] = _fin(x2, 6)
        y1 = _fin(self._window("d1", i, self.dec) + x2 + self.sums["deep"][i + 1], 11)
        v["d2"][i], v["dr"][i] = _fin(y1, 7), _fin(y1, 8)
        return _fin(self._window("d2", i, self.dec) + y1, 12)

    def _entry(self, name: str, j: int, value: int) -> None:
        sums = self.sums[name]
        self.values[name][j] = value
        del sums[j + 1 :]
        sums.append(sums[j] + _mix(value, j))

    def _window(self, name: str, i: int, start: int) -> int:
        return sum(_mix(self.values[name][p], i - p) for p in range(max(start, i - self.plan.window + 1, 0), i + 1))


def _fin(x: int, tag: int) -> int:
    x = (x + tag * C) * B_ & MASK
    x = (x ^ (x >> 29)) * A & MASK
    return x ^ (x >> 32)


def _mix(x: int, at: int) -> int:
    return (x ^ (at * C & MASK)) * B_ & MASK
