"""How many drafts a step verifies in all, and which sequences draft at all.

Confidence-scheduled verification: with a_rj the probability that draft j of sequence r is accepted together with all
before it, and T(B) the time of a step of B rows, a step of the sequences R that verifies the K most probable drafts
brings |R| + sum of the K largest a_rj tokens in T(|R| + K) + the time of drafting. K is the best of all, whatever the
shape of T (a staircase has many local optima).

Causality. K must not depend on the drafts that it admits: a confidence is computed from the draft before it, so a K
made from it favours some drafts over others, and the tokens that come out no longer follow the model's distribution.
K is therefore never made from a sequence's newest block, which may be the one to be verified, but from those before.
Which drafts the K are is decided where the newest confidences are; that is safe, since a_rj never rises with j and so
no draft's place depends on what follows it.

Drafting stops for all when the best K no longer pays for the blocks, and for one sequence whose blocks bring clearly
less than their share of the costs. Both are tried again after a pause that doubles while nothing has changed. Trying is
cheap: until the first confidences are there, only as many drafts are verified as pay if few of them stay; an engine
that ran before knows how many do. Where not even drafts that are all right would pay, none is made.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from deepinfer.runtime.speculation.acceptance import Acceptance
from deepinfer.runtime.speculation.cost import CostCurve
from deepinfer.runtime.speculation.interface import Counts, Observed, Slots
from deepinfer.runtime.speculation.live import LiveCosts

_POOL = 1024  # confidences that an estimate is made of, at least as many as one block of each sequence has
_SAMPLE = 3.0  # sequences whose blocks say as much as the long record
_HISTORY = 16  # blocks of a sequence that are remembered
_WEIGHT = 0.1  # of the newest value in a running mean
_WARM = 2  # steps after a pause until estimates rest on blocks made since
_TRIED, _MANY = 3, 8  # further steps until all stop (1 of _MANY sequences); a third of the blocks until one does
_LEAST, _CLEAR = 1.005, 1.05  # speed with drafts over speed without: all stop below; pauses start anew above
_SHARE = 0.6  # of its costs that a sequence's drafts have to bring
_SLOW = 0.05  # of the newest block in what a sequence's blocks bring: blocks of one text are alike for a while
_DOUBT, _FEW = 3.0, 0.1  # a mean may be off by so many times the deviation of a count with that mean, and a few more
_FIRST_PAUSE, _LONGEST_PAUSE = 64, 2048  # steps without drafts
_FIRST_LOOK = 256  # steps until it is seen what sizes that are not run really cost; then twice as many each time
_ENOUGH = 256  # steps after which their costs are worth keeping


class ScheduledDrafts:
    """A `DraftPolicy`.

    Args:
        curve: of the engine on this machine, as far as it is known. ``slots``: of the engine; ``m``: drafts of a block.
        limit: drafts that one sequence verifies in a step at most; None: its block.
        keep: called at the end with the curve and the acceptance that the engine's steps showed, if there were enough.
    """

    def __init__(self, curve: CostCurve, slots: int, m: int, limit: int | None = None,
                 keep: Callable[[CostCurve, Acceptance], None] | None = None) -> None:
        self.m, self.limit, self._keep = m, m if limit is None else limit, keep
        self.costs = LiveCosts(curve)
        self.reach = np.full((slots, _HISTORY, m), np.nan)  # a_rj of each sequence's blocks, by place in the ring
        self.blocks = np.zeros(slots, np.int64)  # blocks made for the sequence in the slot
        self.ready = np.zeros(slots, bool)  # the newest block waits to be verified
        self.off_until = np.zeros(slots, np.int64)  # step up to which the sequence does not draft
        self.pause = np.full(slots, _FIRST_PAUSE, np.int64)
        self.tried = np.zeros(slots, np.int64)  # blocks judged since the last change
        self.gain = np.zeros(slots)  # running mean of drafts accepted a block
        self.spent = np.zeros(slots)  # running mean of drafts verified a block
        self.all_off_until, self.all_pause = 0, _FIRST_PAUSE
        self.awake, self.advantage = 0, 0.0  # steps since all could draft; running mean of the speed-up
        self.speed = self.row = self.block = 0.0  # tokens a second; seconds of a verified draft and of a block
        self.worth = Acceptance(m)
        self.silent = False  # the draft head states no confidences
        self.now = 0  # steps planned
        self._asked: Slots = np.zeros(0, np.int64)
        self._last = 1
        self._look_at = self._look_pause = _FIRST_LOOK
        self._follow()

    def _follow(self) -> None:
        """Another cost curve."""
        self.curve = self.costs.curve
        self._seconds = self.curve.step(np.arange(len(self.reach) * (self.m + 1) + 1))  # of a step, by its rows
        self._most_speed: dict[int, float] = {}  # best speed-up that drafts could bring, by sequences

    # ---- DraftPolicy ------------------------------------------------------------------------------------------------
    def opened(self, slot: int) -> None:
        self.reach[slot], self.ready[slot] = np.nan, False
        self.blocks[slot] = self.tried[slot] = self.off_until[slot] = 0
        self.gain[slot] = self.spent[slot] = 0.0
        self.pause[slot] = _FIRST_PAUSE

    def most(self, slots: Slots) -> Counts:
        self.now += 1
        self._asked = slots
        if not self._last / 2 <= len(slots) <= 2 * self._last:  # another load: what did not pay then may pay now
            self._last = len(slots)
            self.off_until[:] = np.minimum(self.off_until, self.now)
            self.pause[:] = _FIRST_PAUSE
            if not self.worth.told or self._speed_up(len(slots), self.worth.usual(self.silent)) >= _LEAST:
                self.all_off_until, self.all_pause = min(self.all_off_until, self.now), _FIRST_PAUSE
        return np.full(len(slots), self.limit, np.int32)

    def wanted(self, slots: Slots) -> NDArray[np.bool_]:
        if self._looks:
            return np.ones(len(slots), bool)
        if self.now < self.all_off_until or self._at_best(len(self._asked) or len(slots)) < _LEAST:
            return np.zeros(len(slots), bool)
        out: NDArray[np.bool_] = self.off_until[slots] <= self.now
        return out

    def budget(self, most: Counts, other_rows: int) -> int:
        slots = self._asked
        drafting = self.wanted(slots)
        room = int(most[drafting].sum())
        if not room:
            return 0
        count = int(drafting.sum())
        hoped = self._hoped(slots[drafting], most[drafting])[:room]
        tokens = len(slots) + np.concatenate(((0.0,), np.cumsum(hoped)))
        steps = self._seconds[other_rows:other_rows + len(tokens)]
        if len(steps) < len(tokens):  # prompt rows beside
            steps = self.curve.step(other_rows + np.arange(len(tokens)))
        blocks = self.curve.draft(count)
        speeds = tokens / (steps + blocks)
        best = int(np.argmax(speeds))
        self.speed, self.block = float(speeds[best]), blocks / count
        self.row = float(steps[best] - steps[0]) / max(best, 1)
        if self.worth.told or self.silent:
            self._weigh(self.speed * float(steps[0]) / len(slots), len(slots))
        if self._looks:
            return 0 if self.now == self._look_at else min(room, 2 * best or count)
        return best

    def observe(self, seen: Observed) -> None:
        slots, verified, accepted = seen.slots, seen.verified, seen.accepted
        judged = self.ready[slots]
        self.worth.observe(verified, accepted, self.reach[slots, (self.blocks[slots] - 1) % _HISTORY], judged)
        if judged.any():
            self._judge(slots[judged], verified[judged], accepted[judged])
        fresh = seen.drafted > 0
        self.ready[slots] = fresh
        if fresh.any():
            at = slots[fresh]
            self.silent = bool(np.isnan(seen.confidence[fresh, 0]).all())
            self.reach[at, self.blocks[at] % _HISTORY] = np.cumprod(seen.confidence[fresh].astype(np.float64), axis=1)
            self.blocks[at] += 1
        if not seen.prompt_rows and self.costs.observe(seen.rows, int(np.count_nonzero(fresh)), seen.seconds):
            self._follow()

    def close(self) -> None:
        if self._keep is not None and self.costs.steps >= _ENOUGH:
            self._keep(self.costs.curve, self.worth)

    @property
    def _looks(self) -> bool:
        """Whether this step is one of two, the first without drafts and the other with more than pay, that show what
        they cost: the curve may be wrong about sizes that are not run because of what it says."""
        if self.now > self._look_at + 1:
            self._look_pause = min(2 * self._look_pause, _LONGEST_PAUSE)
            self._look_at = self.now + self._look_pause
        return self.now >= self._look_at

    # ---- inside -----------------------------------------------------------------------------------------------------
    def _hoped(self, slots: Slots, most: Counts) -> NDArray[np.float64]:
        """a_rj of blocks like those to be verified, the most probable first: the older blocks of each sequence, as
        many as make a fair sample; where nothing is known, what drafts of that position were worth so far."""
        usual = self.worth.usual(self.silent)
        places = self._sample(slots)
        count = places.shape[1]
        found = self.reach[slots[:, None], places % _HISTORY]
        known = (places >= 0)[:, :, None] & ~np.isnan(found)
        worth = np.where(known, np.minimum(1.0, found * self.worth.trust), usual)
        worth[np.arange(self.m) >= most[:, None, None] + np.zeros((1, count, 1))] = 0.0
        ordered = np.sort(worth, axis=None)[::-1]
        if count == 1:
            return ordered
        # few sequences are a small sample: what they say counts less
        plain = np.sort(np.where(np.arange(self.m) < most[:, None], usual, 0.0), axis=None)[::-1]
        known_part = len(slots) / (len(slots) + _SAMPLE)
        out: NDArray[np.float64] = known_part * ordered.reshape(-1, count).mean(axis=1) + (1 - known_part) * plain
        return out

    def _sample(self, slots: Slots) -> NDArray[np.int64]:
        """[k, count]: the blocks that the budget may depend on. The newest is none of them: it may be the one to be
        verified."""
        count = int(np.clip(_POOL // max(1, len(slots) * self.m), 1, _HISTORY - 2))
        out: NDArray[np.int64] = self.blocks[slots][:, None] - 2 - np.arange(count)
        return out

    def _at_best(self, sequences: int) -> float:
        """Speed with drafts that are all right over speed without."""
        found = self._most_speed.get(sequences)
        if found is None and sequences:
            found = self._most_speed[sequences] = self._speed_up(sequences, np.ones(self.m))
        return found or 0.0

    def _speed_up(self, sequences: int, likely: NDArray[np.float64]) -> float:
        """The same with drafts that stay together with those before them with probabilities ``likely`` [m]."""
        tokens = sequences + np.concatenate(((0.0,), np.cumsum(np.repeat(likely[: self.limit], sequences))))
        steps = self._seconds[sequences : sequences + len(tokens)]
        return float((tokens / (steps + self.curve.draft(sequences))).max() * steps[0] / sequences)

    def _weigh(self, advantage: float, sequences: int) -> None:
        """Stop all drafts where the best step with them is no faster than one without."""
        self.awake += 1
        tried = self.awake - _WARM
        if tried <= 0:
            return
        self.advantage += max(_WEIGHT, 1 / tried) * (advantage - self.advantage)
        if tried < (_TRIED if sequences < _MANY else 1):
            return
        if self.advantage < _LEAST:
            self.all_off_until = self.now + self.all_pause
            self.all_pause = min(2 * self.all_pause, _LONGEST_PAUSE)
            self.awake = 0
        elif self.advantage > _CLEAR:
            self.all_pause = _FIRST_PAUSE

    def _judge(self, slots: Slots, verified: Counts, accepted: Counts) -> None:
        """Stop the drafts of sequences for which they bring too little."""
        weight = np.maximum(_SLOW, 1 / (self.tried[slots] + 1))
        self.gain[slots] += weight * (accepted - self.gain[slots])
        self.spent[slots] += weight * (verified - self.spent[slots])
        self.tried[slots] += 1
        at = slots[self.tried[slots] >= 3 * _TRIED]
        if not len(at) or not self.speed:
            return
        likely = self.gain[at] + _DOUBT * np.sqrt((self.gain[at] + _FEW) * np.maximum(_SLOW, 1 / self.tried[at]))
        loses = likely / self.speed < _SHARE * (self.spent[at] * self.row + self.block)
        off, on = at[loses], at[~loses]
        self.off_until[off] = self.now + self.pause[off]
        self.pause[off] = np.minimum(2 * self.pause[off], _LONGEST_PAUSE)
        self.pause[on] = _FIRST_PAUSE
        self.tried[off] = 0
