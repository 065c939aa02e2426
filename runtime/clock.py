"""The clock of sequences: the only object that knows where a sequence stands.

Tokens, cache entries, rings and blocks of a sequence advance at different rates; every number that says where one of
them is lives here or is computed from what lives here, and changes only through the transitions below. A step never
computes a position of its own: it takes the ``Part`` that a transition returns, or the columns of a ``ClockTable``.

| name | meaning |
|---|---|
| t | known ids |
| n | committed rows: their cache entries and ring rows are final. While steps are in flight: as far as the host knows |
| w | highest row written, or that steps in flight may write, plus one; rows n .. w - 1 are overwritten before a read |
| h | write floor: no cache entry of a position below it is written |
| row | position of the next row; below n only while rows in front of a prefix hit run again |
| verifying | rows of verifies whose outcome is not known: they begin at ``row`` or above it |
| pub | published blocks: others may share them, nobody writes them |
| starts | per ring axis, the first position whose ring rows are valid |

Not state, always computed: groups n // r, the open group n % r, ring slot p % R, block p // B.

``ClockTable`` holds the numbers of many sequences in columns and has the transitions of the steps, for many rows at
once. ``Clock`` is a view of one row; it has the transitions that happen to one sequence at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer.errors import InternalError, RequestError
from deepinfer.runtime.plan import EnginePlan, Replay

STEP, KEPT = "T", "T_kept"
Rows = NDArray[np.integer[Any]] | np.integer[Any]
_COLUMNS = ("t", "n", "w", "h", "row", "prompt_end", "first_kept", "start_step", "start_kept", "hit", "verifying",
            "pub", "finished")
NO_HIT, BY_REPLAY = -2, -1


@dataclass(frozen=True)
class Part:
    """What a sequence brings to a step, as DiSeq of the native ABI names it."""

    c: int
    rows: int
    kept: int
    wanted: int
    floor: int
    start_step: int
    start_kept: int

    @property
    def stop(self) -> int:
        """Position after the last row."""
        return self.c + self.rows


@dataclass(frozen=True)
class Replayed:
    """One entry of the replay log: what made results differ from those of a run that computes every row.

    ``axis``: windows concerned; ``start``: their first valid row; ``floor``: the prefix hit in front of it, if any.
    """

    axis: str
    start: int
    floor: int = 0


class ClockTable:
    """Columns [rows] i64 of the names above. Transitions take ``at``, rows of the table, each at most once."""

    def __init__(self, plan: EnginePlan, rows: int) -> None:
        self.plan = plan
        self.data = np.zeros((len(_COLUMNS), rows), np.int64)
        (self.t, self.n, self.w, self.h, self.row, self.prompt_end, self.first_kept, self.start_step, self.start_kept,
         self.hit, self.verifying, self.pub, self.finished) = self.data
        self.hit[:] = NO_HIT

    def sent(self, at: Rows, rows: Rows) -> None:
        """The next ``rows`` rows (chunk) are part of a step that runs or will."""
        self._need((rows > 0) & (rows <= self.t[at] - self.row[at]) & (self.verifying[at] == 0), "send", at)
        self.row[at] += rows
        self.w[at] = np.maximum(self.w[at], self.row[at])

    def ran(self, at: Rows, stop: Rows) -> None:
        """Rows up to position ``stop`` are written and committed."""
        self._need(stop <= self.w[at], "run", at)
        self.n[at] = np.maximum(self.n[at], stop)

    def sampled(self, at: Rows) -> None:
        """The id after the last committed row is known: it is the anchor of the next verify."""
        self._need((self.t[at] == self.n[at]) & (self.n[at] == self.row[at]), "sample", at)
        self.t[at] += 1

    def verify(self, at: Rows, rows: Rows) -> None:
        """Anchors and drafts, ``rows`` in all, are part of a step: behind whatever steps before it accept."""
        self._need((rows > 0) & (rows <= self.plan.draft_tokens + 1), "verify", at)
        verifying = self.verifying[at] + rows
        self.verifying[at] = verifying
        self.w[at] = np.maximum(self.w[at], self.row[at] + verifying)

    def accept(self, at: Rows, rows: Rows, drafts: Rows) -> None:
        """Of the ``rows`` of the oldest verify the anchor and ``drafts`` drafts stay; the id after them is known."""
        n, verifying = self.n[at], self.verifying[at]
        self._need((drafts >= 0) & (drafts < rows) & (rows <= verifying) & (self.t[at] == n + 1)
                   & (self.row[at] == n), "accept", at)
        n = n + 1 + drafts
        self.verifying[at] = verifying - rows
        self.n[at] = n
        self.row[at] = n
        self.t[at] = n + 1

    def _need(self, holds: Any, transition: str, at: Rows) -> None:
        if not holds.all():
            wrong = np.atleast_1d(at)[np.flatnonzero(~np.atleast_1d(holds))]
            raise InternalError(f"the clock cannot {transition} now: {self.shown(int(wrong[0]))}")

    def shown(self, at: int) -> str:
        return "Clock(" + ", ".join(f"{k}={v}" for k, v in zip(_COLUMNS, self.data[:, at].tolist(), strict=True)) + ")"


class _Column:
    """A column's number of one row."""

    def __init__(self, at: int) -> None:
        self.at = at

    def __get__(self, clock: Clock, owner: type) -> int:
        return int(clock._table.data[self.at, clock._at])

    def __set__(self, clock: Clock, value: int) -> None:
        clock._table.data[self.at, clock._at] = value


class Clock:
    """The clock of one sequence: row ``at`` of a table, or of one of its own. A new clock is at the start of an empty
    sequence (transition *admit*)."""

    t, n, w, h, row, prompt_end, first_kept, start_step, start_kept, hit, verifying, pub, finished = (
        _Column(i) for i in range(len(_COLUMNS)))

    def __init__(self, plan: EnginePlan) -> None:
        self.plan = plan
        self._table, self._at = ClockTable(plan, 1), 0
        self.log: list[Replayed] = []
        self._given_up = 0  # entries of the log that speak of memory which is gone
        self.windowed = False  # after a hit, until the next prompt: windows in front of its first row are there
        self.whole = False  # the same of the windows of kept rows

    def move(self, table: ClockTable | None = None, at: int = 0) -> None:
        """The numbers lie in row ``at`` of ``table`` from now on; None: in a table of the clock's own."""
        table = table or ClockTable(self.plan, 1)
        table.data[:, at] = self._table.data[:, self._at]
        self._table, self._at = table, at

    # ---- what the scheduler asks ------------------------------------------------------------------------------------
    @property
    def adopted(self) -> bool:
        """Whether a hit waits for the prompt that says how many rows in front of it run again."""
        return self.hit != NO_HIT

    @property
    def pending(self) -> int:
        """Rows that can run now."""
        return self.t - self.row

    @property
    def starts(self) -> dict[str, int]:
        """By ring axis."""
        return {STEP: self.start_step, KEPT: self.start_kept}

    @starts.setter
    def starts(self, value: dict[str, int]) -> None:
        self.start_step, self.start_kept = value[STEP], value[KEPT]

    def kept_in(self, rows: int) -> int:
        """How many of the next ``rows`` rows are kept."""
        return max(0, min(rows, self.row + rows - self.first_kept))

    def rows_within(self, rows: int, kept: int) -> int:
        """The most of the next ``rows`` rows of which no more than ``kept`` are kept."""
        return min(rows, max(0, self.first_kept - self.row) + kept)

    @property
    def blocks(self) -> int:
        """Blocks that the written rows take."""
        return self.plan.blocks_for(self.w)

    # ---- a prompt ---------------------------------------------------------------------------------------------------
    def first_row(self, ids: int, replay: Replay, wanted: int) -> int:
        """The position at which rows start to run when ``ids`` further ids come: below h after a hit."""
        if not self.adopted:
            return self.row
        if self.hit >= 0:
            return max(0, self.h - self.hit)
        end = self.t + ids
        least = end - wanted + 1 - replay.depth if replay.depth else end - (replay.keep or 0)
        return max(0, min(self.h - replay.rerun, least))

    def prompt(self, ids: int, replay: Replay, wanted: int = 1) -> None:
        """``ids`` further ids are known and end a prompt, of whose last ``wanted`` rows logits will be asked for."""
        self._need(not self.finished and self.pending == 0 and ids > 0, "prompt")
        if self.adopted:
            self.row = self.first_row(ids, replay, wanted)
            self.starts = {STEP: 0 if self.windowed else self.row, KEPT: self.row}
            self.hit = NO_HIT
            if self.row > 0 and not self.windowed:
                self.log.append(Replayed(STEP, self.row, self.h))
        self.t += ids
        self.prompt_end = self.t
        self.first_kept = self.row if replay.keep is None else max(self.row, self.t - replay.keep)
        if self.whole and self.first_kept == self.row:
            self.start_kept = 0
        elif self.first_kept > (0 if self.windowed else self.row):
            self.start_kept = self.first_kept
            self.log.append(Replayed(KEPT, self.first_kept))
        self.windowed = self.whole = False

    # ---- steps of this sequence alone -------------------------------------------------------------------------------
    def part(self, rows: int, wanted: int) -> Part:
        """The next ``rows`` rows (chunk, decode), logits of the last ``wanted`` of them asked for."""
        kept = self.kept_in(rows)
        self._need(0 < rows <= self.pending and 0 <= wanted <= kept and not self.verifying, "part")
        return Part(self.row, rows, kept, wanted, self.h, self.start_step, self.start_kept)

    def ran(self, part: Part) -> None:
        """The rows of ``part`` are written and committed."""
        self._need(part.c == self.row, "ran")
        self._table.sent(self._here, np.int64(part.rows))
        self._table.ran(self._here, np.int64(part.stop))

    def sampled(self) -> None:
        """The id after the last committed row is known: it is the anchor of the next step."""
        self._table.sampled(self._here)

    def draft(self, rows: int) -> Part:
        """A block of ``rows`` draft rows whose first is the anchor, at position n. Nothing is written."""
        self._need(not self.adopted and self.row == self.n and self.t in (self.n, self.n + 1) and rows > 0, "draft")
        return Part(self.n, rows, rows, rows, self.h, self.start_step, self.start_kept)

    def verify(self, drafts: int) -> Part:
        """The anchor and ``drafts`` drafted ids as rows n .. n + drafts, logits of all asked for."""
        self._need(self.t == self.n + 1 and self.row == self.n and not self.verifying, "verify")
        rows = drafts + 1
        self._table.verify(self._here, np.int64(rows))
        return Part(self.n, rows, rows, rows, self.h, self.start_step, self.start_kept)

    def accept(self, drafts: int) -> None:
        """Of the verified rows the anchor and ``drafts`` drafts stay, and the id after them is known."""
        self._table.accept(self._here, np.int64(self.verifying), np.int64(drafts))

    # ---- history ----------------------------------------------------------------------------------------------------
    def cut(self, ids: int) -> None:
        """A stop inside an accepted run: ids from position ``ids`` on never were, and the sequence ends."""
        self._need(0 < ids <= self.t, "cut")
        self.t = ids
        self.n = self.row = min(self.n, ids)
        self.finish()

    def finish(self) -> None:
        """No further rows: finished or aborted, at any point; what is in flight does not count any more."""
        self.verifying = 0
        self.finished = 1

    def fork(self) -> Clock:
        """The clock of an independent copy of the sequence."""
        self._need(not self.verifying, "fork")
        other = Clock(self.plan)
        other._table.data[:, 0] = self._table.data[:, self._at]
        other.log, other._given_up = list(self.log), self._given_up
        return other

    def rewind(self, to: int) -> None:
        """Rows from position ``to`` on never were. RequestError when the rings no longer hold what that takes."""
        self._need(self.row == self.n and not self.verifying, "rewind")
        least = max(self.h, self.start_kept, self.w - self.plan.rewind_rows) if not self.adopted else self.n
        if not least <= to <= self.n:
            raise RequestError("rows that far back are gone", where="rewind", found=to,
                               allowed=f"{least}..{self.n}", next_step="fork() before feeding, or feed again")
        self.t = self.n = self.row = to

    def adopt(self, floor: int, rerun: int | None = None) -> None:
        """A prefix hit without windows on the sequence's own rows: of them only the entries of positions below
        ``floor`` stay, as ``hit`` says."""
        self._need(self.row == self.n and not self.verifying, "adopt")
        unit = self.plan.entry_positions
        if floor % unit or not 0 <= floor <= self.n:
            raise RequestError("the cache cannot be cut there", where="adopt", found=floor,
                               allowed=f"0..{self.n}" + (f" in steps of {unit}" if unit > 1 else ""))
        self._hit(floor, rerun)

    def adopt_prefix(self, floor: int, start: int, *, windows: bool, whole: bool = False,
                     log: Iterable[Replayed] = ()) -> None:
        """A hit on rows of other sequences: an empty one adopts the entries of positions below ``floor``.

        The next prompt runs the rows from ``start`` on, those below ``floor`` without writing entries. ``windows``: the
        window rows in front of ``start`` are in its rings; else its windows begin there. ``whole``: those of kept rows
        too, from a run that kept all. ``log``: what was replayed when the adopted entries were written.
        """
        self._need(self.t == self.w == 0 and not self.adopted and 0 <= start <= floor and floor > 0
                   and floor % self.plan.block_tokens == 0, "adopt_prefix")
        self._hit(floor, floor - start)
        self.pub = floor // self.plan.block_tokens
        self.windowed, self.whole = windows, whole
        self.log += log

    def _hit(self, floor: int, rerun: int | None) -> None:
        self.t = self.n = self.w = self.h = self.row = floor
        self.pub = min(self.pub, floor // self.plan.block_tokens)
        self.hit = BY_REPLAY if rerun is None else rerun

    def restart(self) -> None:
        """Every row runs again in the role it had, its memory was given up. Exact: no chunking changes a row's bits."""
        self._need(self.h == 0 and not self.verifying, "restart")
        self.n = self.w = self.row = self.pub = 0

    def reset(self) -> None:
        """As a new clock, but for the log: what was known of a sequence whose memory is gone becomes a prompt."""
        self._need(not self.verifying, "reset")
        self._table.data[:, self._at] = 0
        self.hit = NO_HIT
        self.windowed = self.whole = False
        self._given_up = len(self.log)

    @property
    def replays(self) -> list[Replayed]:
        """The part of the log that the sequence's present entries and rings depend on."""
        return self.log[self._given_up:]

    @property
    def _here(self) -> Any:
        return np.int64(self._at)

    def _need(self, holds: Any, transition: str) -> None:
        if not holds:
            raise InternalError(f"the clock cannot {transition} now: {self}")

    def __repr__(self) -> str:
        return self._table.shown(self._at)
