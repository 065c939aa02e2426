"""The clock of one sequence: the only object that knows where a sequence stands.

Tokens, cache entries, rings and blocks of a sequence advance at different rates; every number that says where one of
them is lives here or is computed from what lives here, and changes only through the transitions below. A step never
computes a position of its own: it takes the ``Part`` that a transition returns.

| name | meaning |
|---|---|
| t | known ids |
| n | committed rows: their cache entries and ring rows are final |
| w | highest row ever written, plus one; rows n .. w - 1 are stale and will be overwritten before they are read |
| h | write floor: no cache entry of a position below it is written |
| row | position of the next row; below n only while rows in front of a prefix hit run again |
| starts | per ring axis, the first position whose ring rows are valid |

Not state, always computed: groups n // r, the open group n % r, ring slot p % R, block p // B.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass

from deepinfer.errors import InternalError, RequestError
from deepinfer.runtime.plan import EnginePlan, Replay

STEP, KEPT = "T", "T_kept"


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


class Clock:
    """See the module. A new clock is at the start of an empty sequence (transition *admit*)."""

    def __init__(self, plan: EnginePlan) -> None:
        self.plan = plan
        self.t = self.n = self.w = self.h = self.row = 0
        self.prompt_end = 0
        self.first_kept = 0
        self.starts = {STEP: 0, KEPT: 0}
        self.log: list[Replayed] = []
        self.hit: int | None = None  # after a hit, until the next prompt: rows to run again, -1: what replay says
        self.windowed = False  # the rows in front of those have their windows
        self.verifying = 0  # rows of a verify whose outcome is not known yet
        self.finished = False

    # ---- what the scheduler asks ------------------------------------------------------------------------------------
    @property
    def pending(self) -> int:
        """Rows that can run now."""
        return self.t - self.row

    def kept_in(self, rows: int) -> int:
        """How many of the next ``rows`` rows are kept."""
        return max(0, min(rows, self.row + rows - self.first_kept))

    def rows_within(self, rows: int, kept: int) -> int:
        """The most of the next ``rows`` rows of which no more than ``kept`` are kept."""
        before = max(0, self.first_kept - self.row)
        return min(rows, before + kept)

    @property
    def blocks(self) -> int:
        """Blocks that the written rows take."""
        return self.plan.blocks_for(self.w)

    # ---- transitions ------------------------------------------------------------------------------------------------
    def first_row(self, ids: int, replay: Replay, wanted: int) -> int:
        """The position at which rows start to run when ``ids`` further ids come: below h after a hit."""
        if self.hit is None:
            return self.row
        if self.hit >= 0:
            return max(0, self.h - self.hit)
        end = self.t + ids
        least = end - wanted + 1 - replay.depth if replay.depth else end - (replay.keep or 0)
        return max(0, min(self.h - replay.rerun, least))

    def prompt(self, ids: int, replay: Replay, wanted: int = 1) -> None:
        """``ids`` further ids are known and end a prompt, of whose last ``wanted`` rows logits will be asked for."""
        self._need(not self.finished and self.pending == 0 and ids > 0, "prompt")
        if self.hit is not None:
            self.row = self.first_row(ids, replay, wanted)
            self.starts = {STEP: 0 if self.windowed else self.row, KEPT: self.row}
            self.hit = None
            if self.row > 0 and not self.windowed:
                self.log.append(Replayed(STEP, self.row, self.h))
        self.t += ids
        self.prompt_end = self.t
        self.first_kept = self.row if replay.keep is None else max(self.row, self.t - replay.keep)
        if self.first_kept > (0 if self.windowed else self.row):
            self.starts[KEPT] = self.first_kept
            self.log.append(Replayed(KEPT, self.first_kept))
        self.windowed = False

    def part(self, rows: int, wanted: int) -> Part:
        """The next ``rows`` rows (chunk, decode), logits of the last ``wanted`` of them asked for."""
        kept = self.kept_in(rows)
        self._need(0 < rows <= self.pending and 0 <= wanted <= kept and not self.verifying, "part")
        return Part(self.row, rows, kept, wanted, self.h, self.starts[STEP], self.starts[KEPT])

    def ran(self, part: Part) -> None:
        """The rows of ``part`` are written and committed."""
        self._need(part.c == self.row, "ran")
        self.row = part.stop
        self.n = max(self.n, self.row)
        self.w = max(self.w, self.row)

    def sampled(self) -> None:
        """The id after the last committed row is known: it is the anchor of the next step."""
        self._need(self.t == self.n == self.row, "sampled")
        self.t += 1

    def draft(self, rows: int) -> Part:
        """A block of ``rows`` draft rows whose first is the anchor, at position n. Nothing is written."""
        self._need(self.hit is None and self.row == self.n and self.t in (self.n, self.n + 1) and rows > 0, "draft")
        return Part(self.n, rows, rows, rows, self.h, self.starts[STEP], self.starts[KEPT])

    def verify(self, drafts: int) -> Part:
        """The anchor and ``drafts`` drafted ids as rows n .. n + drafts, logits of all asked for."""
        self._need(self.t == self.n + 1 and self.row == self.n and not self.verifying
                   and 0 <= drafts <= self.plan.draft_tokens, "verify")
        rows = drafts + 1
        self.verifying = rows
        self.w = max(self.w, self.n + rows)
        return Part(self.n, rows, rows, rows, self.h, self.starts[STEP], self.starts[KEPT])

    def accept(self, drafts: int) -> None:
        """Of the verified rows the anchor and ``drafts`` drafts stay, and the id after them is known."""
        self._need(0 <= drafts < self.verifying, "accept")
        self.verifying = 0
        self.n += drafts + 1
        self.row = self.n
        self.t = self.n + 1

    def cut(self, ids: int) -> None:
        """A stop inside an accepted run: ids from position ``ids`` on never were, and the sequence ends."""
        self._need(0 < ids <= self.t and not self.verifying, "cut")
        self.t = ids
        self.n = self.row = min(self.n, ids)
        self.finished = True

    def finish(self) -> None:
        """No further rows: finished or aborted, at any point."""
        self.verifying = 0
        self.finished = True

    def fork(self) -> Clock:
        """The clock of an independent copy of the sequence."""
        self._need(not self.verifying, "fork")
        other = copy(self)
        other.starts, other.log = dict(self.starts), list(self.log)
        return other

    def rewind(self, to: int) -> None:
        """Rows from position ``to`` on never were. RequestError when the rings no longer hold what that takes."""
        self._need(self.row == self.n and not self.verifying, "rewind")
        least = max(self.h, self.starts[KEPT], self.w - self.plan.rewind_rows) if self.hit is None else self.n
        if not least <= to <= self.n:
            raise RequestError("rows that far back are gone", where="rewind", found=to,
                               allowed=f"{least}..{self.n}", next_step="fork() before feeding, or feed again")
        self.t = self.n = self.row = to

    def adopt(self, floor: int, rerun: int | None = None) -> None:
        """A prefix hit without windows: of the rows so far only the entries of positions below ``floor`` stay.

        Rows in front of it (``rerun`` of them; None: as many as the replay option of the next prompt says) run again
        before any new one, to fill the rings; they write no entries.
        """
        self._need(self.row == self.n and not self.verifying, "adopt")
        unit = self.plan.entry_positions
        if floor % unit or not 0 <= floor <= self.n:
            raise RequestError("the cache cannot be cut there", where="adopt", found=floor,
                               allowed=f"0..{self.n}" + (f" in steps of {unit}" if unit > 1 else ""))
        self.t = self.n = self.w = self.h = self.row = floor
        self.hit = -1 if rerun is None else rerun

    def hit_at(self, floor: int, start: int, *, windows: bool, log: Iterable[Replayed] = ()) -> None:
        """An empty sequence adopts the entries of positions below ``floor`` from the prefix cache.

        The next prompt runs the rows from ``start`` on, those below ``floor`` without writing entries. ``windows``: the
        window rows in front of ``start`` are in its rings; else its windows begin there. ``log``: what was replayed
        when the adopted entries were written.
        """
        self._need(self.t == self.w == 0 and self.hit is None and 0 <= start <= floor
                   and floor % self.plan.block_tokens == 0, "hit")
        self.t = self.n = self.w = self.h = self.row = floor
        self.hit, self.windowed = floor - start, windows
        self.log = list(log)

    def restart(self) -> None:
        """Every row runs again in the role it had, its memory was given up. Exact: no chunking changes a row's bits."""
        self._need(self.h == 0 and not self.verifying, "restart")
        self.n = self.w = self.row = 0

    def _need(self, holds: bool, transition: str) -> None:
        if not holds:
            raise InternalError(f"the clock cannot {transition} now: {self}")

    def __repr__(self) -> str:
        return (f"Clock(t={self.t}, n={self.n}, w={self.w}, h={self.h}, row={self.row}, kept from {self.first_kept}, "
                f"starts={self.starts}, verifying={self.verifying}, finished={self.finished})")
