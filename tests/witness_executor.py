"""A witness executor: the executor's interface over memory in which every row says where it is and what it hangs on.

Each row leaves a record (hash of the ids so far, position, how exact it is) in rings and pages laid out as a cache plan
says. A row reads what a row of a model reads: the entry before it, windows from their first valid row, open groups, and
some of all entries it may see; each record has to be the one of this very sequence. The next token is a hash of what
was read, so it is also known from ids and replay log alone (``tokens_of``). Steps run as late as they may: in ``wait``.

Exactness follows the rules of a model with two window layers: the first is exact where no window is cut, the second
where all rows of its window are exact in the first; an entry is exact if its row is, and the entry before it.
"""

from __future__ import annotations

import ctypes
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from witness import need

from deepinfer.runtime.executor import DECODE, SequenceStart, StepPlan, StepResult, share_drafts
from deepinfer.runtime.memory import SequenceMemory
from deepinfer.runtime.plan import PAGED, RING, EnginePlan, StatePlan
from deepinfer.runtime.prefix.road import must_be_exact

RECORD = np.dtype([("hash", "u8"), ("pos", "i4"), ("exact", "i4")])
A, B, C = (np.uint64(x) for x in (0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93, 0xA0761D6478BD642F))
VOCABULARY = 61
LAYERS = 2
MASK = (1 << 64) - 1
U64, I64 = NDArray[np.uint64], NDArray[np.int64]


class EngineFault(Exception):
    """The engine broke down in a step."""


def soak_plan(*, window: int = 8, block: int = 16, drafts: int = 0, lag: int = 0, seqs: int = 12, step: int = 96,
              max_len: int = 160) -> EnginePlan:
    """Rings and tails have exactly the rows that the rules ask for."""
    ring = window + drafts + lag * (drafts + 1)
    states = (
        StatePlan("win", RING, ring, RECORD.itemsize, "T", reach=window, resume=window),
        StatePlan("dec", RING, ring, RECORD.itemsize, "T_kept", reach=window),
        StatePlan("tail", RING, 1 + drafts + 1, RECORD.itemsize, "T", reach=1),
        StatePlan("fine", PAGED, block, RECORD.itemsize),
        StatePlan("pooled", PAGED, block // 2, RECORD.itemsize, ratio=2))
    return EnginePlan(
        model="witness", target="cpu", vocab_size=VOCABULARY, max_model_len=max_len, max_num_seqs=seqs,
        limits={"step": step, "kept": step, "wanted": step, "seq": seqs}, block_tokens=block, window=window,
        states=states, entries=("step", "draft") if drafts else ("step",), draft_tokens=drafts, draft_filler=1,
        lookback=1, exact_keep=2 * window - 1, least_keep=window, rerun=window, exact_rerun=2 * window - 2,
        host_lag=lag)


def mixed(ids: I64, first: int = 0) -> U64:
    """What an id at its position adds to the hash of all ids."""
    at = np.arange(first, first + len(ids), dtype=np.uint64)
    x = ids.astype(np.uint64) * A ^ (at + np.uint64(1)) * C
    x ^= x >> np.uint64(29)
    return x * B


def drawn(seen: U64, key: Any) -> I64:
    """Tokens from what rows have read."""
    x = (seen ^ np.uint64(key)) * A
    x ^= x >> np.uint64(31)
    return ((x * B >> np.uint64(33)) % np.uint64(VOCABULARY)).astype(np.int64)


def seen_by(hashes: U64, rows: I64, start: I64 | int, window: int) -> U64:
    """Hash of a row and those in its window, from the hashes of all positions."""
    if not len(rows):
        return hashes[:0]
    base = max(0, int(rows[0]) - window)
    sums = np.zeros(int(rows[-1]) - base + 2, np.uint64)
    np.cumsum(hashes[base : int(rows[-1]) + 1], dtype=np.uint64, out=sums[1:])
    low = np.minimum(np.maximum(np.maximum(start, rows - window + 1), 0), rows)
    return hashes[rows] * C + (sums[rows - base] - sums[low - base])


def tokens_of(ids: I64, prompt: int, start_kept: int, window: int, key: int) -> I64:
    """The answer of a sequence, from its ids alone; ``start_kept``: first row that all layers computed."""
    hashes = np.cumsum(mixed(ids), dtype=np.uint64)
    rows = np.arange(prompt - 1, len(ids) - 1)
    return drawn(seen_by(hashes, rows, start_kept, window), key)


def mixed_one(token: int, at: int) -> int:
    """``mixed`` of one id."""
    x = (token * int(A) ^ (at + 1) * int(C)) & MASK
    return (x ^ x >> 29) * int(B) & MASK


def drawn_one(hashes: list[int], window: int, key: int) -> int:
    """``drawn`` behind the last of ``hashes``: those of its window, or of the rows that all layers computed."""
    x = ((hashes[-1] * int(C) + sum(hashes[-window:-1])) & MASK ^ key) * int(A) & MASK
    x ^= x >> 31
    return (x * int(B) & MASK) >> 33


@dataclass
class Held:
    """A sequence in a slot. ``ids`` with room for all; ``known``: how many of them hold; ``hashes``: of their
    beginnings."""

    ids: I64
    hashes: U64
    known: int
    key: int
    exact: bool
    n: int = 0
    dead: bool = False  # its logits were no numbers: steps planned before the host knew find nothing to do
    drafts: I64 = field(default_factory=lambda: np.zeros(0, np.int64))

    def put(self, at: int, ids: I64) -> None:
        self.ids[at : at + len(ids)] = ids
        base = self.hashes[at - 1] if at else np.uint64(0)
        self.hashes[at : at + len(ids)] = base + np.cumsum(mixed(ids, at), dtype=np.uint64)


@dataclass
class Flight:
    ticket: int
    step: StepPlan
    births: list[int]
    tables: list[NDArray[np.int32]]


class WitnessExecutor:
    """``memory``: set once it is there; blocks that are written may have one holder only. ``rng``: of drafts and of the
    entries that are looked at. ``fault``: the next step breaks down; ``broken``: slots whose next logits are no
    numbers. ``row_slots``: a mutant that numbers ring rows from the start of the step.
    ``operations``: transitions so far: rows sent and ran, verified and accepted, drafted."""

    def __init__(self, plan: EnginePlan, slots: int, blocks: int, seed: int = 0, shorter: dict[str, int] | None = None,
                 row_slots: bool = False) -> None:
        self.plan, self.row_slots = plan, row_slots
        self.rows = {s.name: s.rows - (shorter or {}).get(s.name, 0) for s in plan.states}
        self.data = {s.name: np.full((slots if s.kind == RING else blocks, s.rows), np.array((0, -1, 0), RECORD))
                     for s in plan.states}
        self.memory: SequenceMemory | None = None
        self.rng = np.random.default_rng(seed)
        self.held: dict[int, Held] = {}
        self.births = [0] * slots
        self.flights: deque[Flight] = deque()
        self.results: dict[int, StepResult] = {}
        self.operations = self.tickets = 0
        self.fault, self.broken = False, set[int]()
        self.checkpoint = None

    # ---- the engine's and the executor's interface ------------------------------------------------------------------
    def state(self, name: str, unit: int) -> NDArray[np.uint8]:
        return self.data[name][unit].view(np.uint8)

    def run(self, *_: Any) -> Any:
        raise NotImplementedError

    def close(self) -> None:
        self.flights.clear()

    def begin(self, slot: int, start: SequenceStart) -> None:
        self.births[slot] += 1
        room = self.plan.max_model_len + 3 * (self.plan.draft_tokens + 2)
        held = Held(np.zeros(room, np.int64), np.zeros(room, np.uint64), 0, start.key & ((1 << 63) - 1),
                    must_be_exact(self.plan, start.params.replay) and start.params.prompt_logprobs is None)
        held.put(0, np.concatenate((start.prompt, np.array(start.output, np.int64))))
        held.known = len(start.prompt) + len(start.output)
        held.n = held.known - 1
        self.held[slot] = held

    def submit(self, step: StepPlan) -> int:
        self.tickets += 1
        rows = step.sequences
        self.flights.append(Flight(self.tickets, step, [self.births[s] for s in rows["slot"]],
                                   [_table(row).copy() for row in rows]))
        return self.tickets

    def wait(self, ticket: int) -> StepResult:
        flight = self.flights.popleft()
        need(flight.ticket == ticket, "steps are waited for in order")
        if self.fault:
            self.fault = False
            raise EngineFault("the engine broke down")
        out = self.results.setdefault(id(flight.step), StepResult(self.plan))
        out.clear()
        self._check_flight(flight)
        self._step(flight.step, out)
        return out

    # ---- one step ---------------------------------------------------------------------------------------------------
    def _check_flight(self, flight: Flight) -> None:
        memory = self.memory
        assert memory is not None
        for row, birth, table in zip(flight.step.sequences, flight.births, flight.tables, strict=True):
            need(self.births[int(row["slot"])] == birth, "I15: a slot was given away under a step in flight")
            held = memory.blocks._holders[table]
            need((held > 0).all(), "I15: a block was given away under a step in flight")
            now = _table(row)[: len(table)]
            need(np.array_equal(now, table), "I15: a block table changed under a step in flight")

    def _step(self, step: StepPlan, out: StepResult) -> None:
        rows = step.sequences
        self.operations += 2 * step.count
        m = self.plan.draft_tokens
        held = [self.held[int(s)] for s in rows["slot"]]
        most = np.array([min(int(r["rows"]) - 1, len(h.drafts)) if r["kind"] == DECODE else 0
                         for r, h in zip(rows, held, strict=True)], np.int32)
        verified = share_drafts(np.full((len(rows), max(1, m)), np.nan, np.float32), most, step.budget)
        for i, (row, h) in enumerate(zip(rows, held, strict=True)):
            if h.dead:
                out.n[i] = h.n
                continue
            if row["kind"] == DECODE:
                c, q = h.n, 1 + int(verified[i])
                need(h.known == c + 1, "I2: the anchor")
                h.put(c + 1, h.drafts[: q - 1])
                kept = q
            else:
                c, q, kept = int(row["c"]), int(row["rows"]), int(row["kept"])
                given = step.token_ids[int(row["first"]) : int(row["first"]) + q]
                need(np.array_equal(given, h.ids[c : c + q]), "I2: ids of a chunk")
            seen = self._sequence(row, h, c, q, kept)
            self._choose(i, row, h, c, q, seen, verified, out)

    def _sequence(self, row: np.void, h: Held, c: int, q: int, kept: int) -> U64:
        """Run rows c .. c + q - 1: read, check, write. Returns what the kept rows have seen."""
        slot, floor, table = int(row["slot"]), int(row["floor"]), _table(row)
        start, first = int(row["start_step"]), int(row["start_kept"])
        truth, at = h.hashes[: c + q], np.arange(c, c + q)
        need(len(table) >= self.plan.blocks_for(c + q), "I10: blocks for all rows")
        entry = self._entries(h, table, c, max(c, floor), first_time=row["kind"] != DECODE)
        # what a row computes: the entry before it and its own id
        base = entry["hash"] if c else np.uint64(0)
        own = base + np.cumsum(mixed(h.ids[c : c + q], c), dtype=np.uint64)
        need(np.array_equal(own, truth[c:]), "I3: the entry before a row")
        whole = self._window("win", slot, c, c, truth, start, q)
        exact = self._exactness(slot, c, q, start, whole)
        below = max(c, floor)
        sticky = self._entry_exact(table, below) if below else True
        entries_exact = np.logical_and.accumulate(exact[below - c :] >= LAYERS) & sticky
        self._write_entries(slot, table, h, truth, c, q, below, entries_exact)
        begin = c + q - kept
        self._window("dec", slot, begin, begin, truth, first, kept)
        if h.exact and (row["kind"] == DECODE or row["wanted"]):
            last = c + q - 1
            need(entries_exact.all() and sticky and exact[-1] >= LAYERS, "I12: an exact request on inexact rows")
            need(first <= max(0, last - 2 * self.plan.window + 2), "exact requests keep enough rows")
        self._commit("win", slot, at, c, truth, exact)
        self._commit("tail", slot, at, c, truth, exact)
        self._commit("dec", slot, np.arange(begin, c + q), begin, truth, exact[q - kept :])
        return seen_by(truth, np.arange(begin, c + q), first, self.plan.window)

    def _entries(self, h: Held, table: NDArray[np.int32], c: int, stop: int, first_time: bool) -> np.void:
        """Check entries of positions below ``stop``, all of them in a chunk, else some; return the one before c."""
        size = self.plan.block_tokens
        at = np.arange(stop) if first_time else np.append(self.rng.integers(0, max(1, c), 3), max(0, c - 1))
        at = at[at < stop]
        found = self.data["fine"][table[at // size], at % size]
        need(np.array_equal(found["pos"], at) and np.array_equal(found["hash"], h.hashes[at]), "I3: entries")
        need(not h.exact or found["exact"].all(), "I12: an exact request reads replayed entries")
        groups = np.unique(at // 2)
        groups = groups[groups < stop // 2]
        pooled = self.data["pooled"][table[groups * 2 // size], groups % (size // 2)]
        need(np.array_equal(pooled["pos"], groups), "I3: groups")
        need(np.array_equal(pooled["hash"], h.hashes[2 * groups] ^ h.hashes[2 * groups + 1] * B), "I5: groups")
        out: np.void = self.data["fine"][table[(c - 1) // size], (c - 1) % size] if c else np.zeros(1, RECORD)[0]
        return out

    def _entry_exact(self, table: NDArray[np.int32], below: int) -> bool:
        size = self.plan.block_tokens
        return bool(self.data["fine"]["exact"][table[(below - 1) // size], (below - 1) % size])

    def _window(self, name: str, slot: int, begin: int, c: int, truth: U64, start: int, q: int) -> I64:
        """Check the ring rows that rows begin .. begin + q - 1 read; their positions."""
        low = max(start, begin - self.plan.window + 1, 0)
        at = np.arange(low, min(c, begin + q))
        if not q:
            return at[:0]
        self._ring(name, slot, at, c, truth, "I6")
        return at

    def _ring(self, name: str, slot: int, at: I64, c: int, truth: U64, what: str) -> None:
        found = self.data[name][slot, self._slot(name, at, c)]
        need(np.array_equal(found["pos"], at), f"{what}: ring {name} of slot {slot} at {at.tolist()}")
        need(np.array_equal(found["hash"], truth[at]), f"{what}: ring {name} holds rows of another sequence")

    def _exactness(self, slot: int, c: int, q: int, start: int, old: I64) -> I64:
        """How many layers are exact at each row."""
        window = self.plan.window
        at = np.arange(c, c + q)
        cut = start > np.maximum(0, at - window + 1)
        first = np.ones(q, bool) if not start else ~cut
        before = self.data["win"]["exact"][slot, self._slot("win", old, c)] >= 1
        line = np.concatenate((before, first))
        bad = np.concatenate((np.zeros(1, np.int64), np.cumsum(~line)))
        low = np.maximum(old[0] if len(old) else c, at - window + 1) - (old[0] if len(old) else c)
        stop = at + 1 - (old[0] if len(old) else c)
        second = first & (bad[stop] - bad[low] == 0)
        out: I64 = first.astype(np.int64) + second
        return out

    def _write_entries(self, slot: int, table: NDArray[np.int32], h: Held, truth: U64, c: int, q: int, below: int,
                       exact: NDArray[np.bool_]) -> None:
        size = self.plan.block_tokens
        at = np.arange(below, c + q)
        if not len(at):
            return
        assert self.memory is not None
        need((self.memory.blocks._holders[np.unique(table[at // size])] == 1).all(), "I4: a shared block is written")
        self._put("fine", table[at // size], at % size, truth[at], at, exact)
        groups = np.arange(-(-below // 2), (c + q) // 2) if below % 2 == 0 else np.arange(below // 2, (c + q) // 2)
        if not len(groups):
            return
        if 2 * groups[0] < c:
            raw = self.data["tail"][slot, self._slot("tail", 2 * groups[:1], c)]
            need(raw["pos"][0] == 2 * groups[0] and raw["hash"][0] == truth[2 * groups[0]], "I5: a raw row is gone")
        self._put("pooled", table[groups * 2 // size], groups % (size // 2),
                  truth[2 * groups] ^ truth[2 * groups + 1] * B, groups, exact[np.maximum(2 * groups + 1 - below, 0)])

    def _put(self, name: str, unit: Any, slot: Any, hashes: U64, at: I64, exact: Any) -> None:
        data = self.data[name]
        data["hash"][unit, slot], data["pos"][unit, slot], data["exact"][unit, slot] = hashes, at, exact

    def _commit(self, name: str, slot: int, at: I64, c: int, truth: U64, exact: I64) -> None:
        at, exact = at[-self.rows[name] :], exact[-self.rows[name] :]
        self._put(name, slot, self._slot(name, at, c), truth[at], at, exact)

    def _slot(self, name: str, at: I64, c: int) -> I64:
        out: I64 = (at - c if self.row_slots else at) % self.rows[name]
        return out

    # ---- tokens -----------------------------------------------------------------------------------------------------
    def _choose(self, i: int, row: np.void, h: Held, c: int, q: int, seen: U64, verified: NDArray[np.int32],
                out: StepResult) -> None:
        decode = row["kind"] == DECODE
        if not decode:
            h.n = c + q
            if h.n < h.known:  # a chunk in front of the end, or rows of a hit that run again
                out.n[i] = h.n
                return
        if int(row["slot"]) in self.broken:
            self.broken.discard(int(row["slot"]))
            out.finite[i], h.dead = False, True
            return
        if not row["draws"]:
            return
        drafts = int(verified[i])
        tokens = drawn(seen[len(seen) - drafts - 1 :], h.key)
        wrong = np.flatnonzero(tokens[:drafts] != h.drafts[:drafts])
        right = int(wrong[0]) if len(wrong) else drafts
        tokens = tokens[: right + 1]
        if decode:
            h.n = c + right + 1
        h.put(h.n, tokens[-1:])
        h.known = h.n + 1
        out.n[i], out.count[i], out.accepted[i], out.verified[i] = h.n, right + 1, right, drafts
        out.tokens[i, : right + 1] = tokens
        self._draft(i, row, h, out)

    def _draft(self, i: int, row: np.void, h: Held, out: StepResult) -> None:
        """Guesses, most of them right: the next tokens are known to who knows the rule."""
        m = self.plan.draft_tokens if row["want_draft"] else 0
        first, guess, window = int(row["start_kept"]), list[int](), self.plan.window
        self.operations += m > 0
        if m:  # a block of drafts reads a whole window in front of the anchor
            context = np.arange(max(first, h.n - window, 0), h.n)
            self._ring("dec", int(row["slot"]), context, h.n, h.hashes, "I7")
            hashes = h.hashes[max(first, h.known - window, 0) : h.known].tolist()
            for j in range(m):
                token = drawn_one(hashes, window, h.key) % VOCABULARY
                token = token if self.rng.random() < 0.7 else (token + 1) % VOCABULARY
                guess.append(token)
                hashes.append(hashes[-1] + mixed_one(token, h.known + j) & MASK)
        h.drafts = np.array(guess, np.int64)
        out.drafted[i], out.drafts[i, :m] = m, h.drafts


def _table(row: np.void) -> NDArray[np.int32]:
    count = int(row["num_blocks"])
    if not count:
        return np.zeros(0, np.int32)
    return np.ctypeslib.as_array((ctypes.c_int32 * count).from_address(int(row["blocks"])))
