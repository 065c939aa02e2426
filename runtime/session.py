"""One sequence driven by hand: the surface for tests, evaluation and researchers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from deepinfer.errors import ArtifactError, PlanError, RequestError
from deepinfer.runtime.backend import Outputs
from deepinfer.runtime.clock import Clock, Part, Replayed
from deepinfer.runtime.engine_core import EngineCore, fill
from deepinfer.runtime.memory import Holding
from deepinfer.runtime.plan import EXACT, OFF, ReplayOption
from deepinfer.runtime.sampling import NOT_FINITE, bad_logits
from deepinfer.runtime.sampling_params import is_whole, require_whole
from deepinfer.runtime.sequence import TokenIds

Pins = Mapping[str, ArrayLike]
_AXES = {"T": "rows", "T_kept": "kept", "T_wanted": "wanted"}


class Draft(NamedTuple):
    """A block of draft tokens: ids [m]; logits [m, V] that chose them; logits before the correction by the previous
    token; confidence [m] before the sigmoid (None: the model's draft head states none)."""

    tokens: NDArray[np.int64]
    logits: NDArray[np.float32]
    base_logits: NDArray[np.float32]
    confidence: NDArray[np.float32] | None


class Session:
    """A sequence of token ids and its state in the engine. Close it, or use ``with``, to give its memory back.

    What one ``feed`` brings is a prompt: with ``replay=K`` all layers compute only its last K rows. Neither the sizes
    of chunks nor other requests of the engine change a result.
    """

    def __init__(self, core: EngineCore, replay: ReplayOption = OFF) -> None:
        self._core = core
        self.replay: str | int = core.plan.replay if replay is None else replay
        core.plan.replay_rows(replay)  # refuses a bad option before any memory is taken
        self._clock = Clock(core.plan)
        self._ids = TokenIds((), 0)
        self._holding: Holding | None = self._open()

    # ---- what is known ------------------------------------------------------------------------------------------
    @property
    def token_ids(self) -> list[int]:
        """Ids fed so far."""
        return [int(i) for i in self._ids[:]]

    def __len__(self) -> int:
        return self._ids.count

    @property
    def replay_log(self) -> tuple[Replayed, ...]:
        """Where windows were cut or run again."""
        return tuple(self._clock.log)

    # ---- rows ---------------------------------------------------------------------------------------------------
    def feed(self, ids: Sequence[int] | NDArray[np.int64], *, wanted: int | None = None, pins: Pins | None = None,
             chunk: int | Sequence[int] | None = None) -> NDArray[np.float32]:
        """Run ``ids`` behind what was fed before.

        Args:
            wanted: how many of the last rows' logits come back; None: of all kept rows of ``ids`` (one row when
                replay is ``exact``, because only as many rows are kept as make that one exact).
            pins: selections from outside by name, int [rows, k], a row for every row that runs: for ``ids``, and
                after ``adopt`` also for the rows in front of them that run again.
            chunk: most rows of a step, a number or numbers that are cycled through. The engine's own limits hold
                besides.

        Returns:
            Logits [rows, V] f32, the last row for the token after ``ids``.

        Raises:
            RequestError: bad ids, pins or sizes; nothing has run then. PlanError: no cache blocks are free.
            ArtifactError: logits that are not finite numbers; this session has the rows all the same, no other one is
            touched.
        """
        with self._core.exclusive():
            holding, clock, plan = self._alive(), self._clock, self._core.plan
            new = self._checked(ids)
            first_new = clock.t
            back = self._wanted(wanted, len(new))
            replay = plan.replay_rows(self.replay, back)
            start, stop = clock.first_row(len(new), replay, back), clock.t + len(new)
            held = self._check_pins(pins, stop - start)
            sizes = self._sizes(chunk)
            if wanted is not None and replay.keep is not None and wanted > min(replay.keep, len(new)):
                raise RequestError("logits of rows that are not kept", where="wanted", found=wanted,
                                   allowed=f"0..{min(replay.keep, len(new))}",
                                   next_step="open the session with replay=off")
            written, memory = max(start, clock.h), self._core.memory
            if not self._core.residence.free(memory.need(holding, written, stop)) or not memory.prepare(
                    holding, written, stop):
                raise PlanError("no cache blocks are free for these rows", where="feed", found=f"{len(new)} rows",
                                next_step="close other sessions, or give LLM more num_blocks")
            self._ids.extend(new)
            clock.prompt(len(new), replay, back)
            first = max(first_new, clock.first_kept)
            if wanted is not None or self.replay == EXACT:
                first = stop - (back if wanted is None else wanted)
            out = [self._step(part, held, start) for part in self._parts(first, sizes)]
            logits = np.concatenate(out) if out else np.zeros((0, plan.vocab_size), dtype=np.float32)
            _require_finite(logits, stop - len(logits))
            return logits

    def draft(self, anchor: int, *, pins: Pins | None = None) -> Draft:
        """The draft block behind the rows fed so far; ``anchor`` is the token chosen for the next position.

        Raises RequestError and ArtifactError as ``feed`` does.
        """
        with self._core.exclusive():
            holding, plan = self._alive(), self._core.plan
            if "draft" not in plan.entries:
                raise RequestError("the engine has no draft head", where="draft")
            if self._clock.adopted:
                raise RequestError("rows in front of the prefix have not run again yet", where="draft",
                                   next_step="feed at least one token after adopt")
            m = plan.draft_tokens
            block = self._checked([anchor, *[plan.draft_filler] * (m - 1)], beyond=m)
            part = self._clock.draft(m)
            batch = self._core.batch
            batch.clear()
            batch.add(block, slot=holding.slot, c=part.c, blocks=holding.blocks, kept=part.kept, wanted=part.wanted,
                      floor=part.floor, start_step=part.start_step, start_kept=part.start_kept,
                      before=self._ids[max(0, part.c - plan.lookback):part.c])
            held = self._check_pins(pins, m)
            got = self._core.engine.run("draft", batch, held or None)
            tokens, logits, base = (np.array(got[name][0]) for name in ("tokens", "draft_logits", "base_logits"))
            _require_finite(logits, part.c)
            return Draft(tokens, logits, base, np.array(got["confidence"][0]) if "confidence" in got else None)

    # ---- history ------------------------------------------------------------------------------------------------
    def adopt(self, tokens: int, *, rerun: int | None = None) -> None:
        """A prefix hit: of what was fed keep the cache entries of the first ``tokens`` positions and nothing else.

        The next ``feed`` runs the ``rerun`` rows in front of its ids again (None: as many as the model's training
        allows, or as make the result exact); they write no entries and their logits do not come back.
        """
        with self._core.lock:
            holding = self._alive()
            if rerun is not None:
                require_whole("rerun", rerun)
            if rerun is not None and rerun < self._core.plan.window:
                raise RequestError("a row reads a whole window", where="rerun", found=rerun,
                                   allowed=f">= {self._core.plan.window}")
            require_whole("adopt", tokens)
            self._clock.adopt(tokens, rerun)
            self._ids.cut(tokens)
            self._core.memory.shorten(holding, tokens)

    def rewind(self, tokens: int) -> None:
        """Take back everything from position ``tokens`` on, a few rows at most (what a rejected draft may be)."""
        with self._core.lock:
            self._alive()
            require_whole("rewind", tokens)
            self._clock.rewind(tokens)
            self._ids.cut(tokens)

    def fork(self) -> Session:
        """An independent copy: full cache blocks are shared, the rest is copied."""
        with self._core.lock:
            holding, memory = self._alive(), self._core.memory
            rows = self._clock.w
            if memory.free_slots < 1 or not self._core.residence.free(memory.fork_need(rows)):
                raise _no_room(self._core)
            other = Session.__new__(Session)
            other._core, other.replay = self._core, self.replay
            other._clock, other._ids = self._clock.fork(), self._ids.copy()
            other._holding = memory.fork(holding, rows)
            return other

    def close(self) -> None:
        """Give slot and blocks back. Closing twice is fine."""
        with self._core.lock:
            if self._holding is not None:
                self._clock.finish()
                self._core.memory.close(self._holding)
                self._holding = None

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_holding", None) is not None:
            self.close()

    # ---- inside -------------------------------------------------------------------------------------------------
    def _open(self) -> Holding:
        with self._core.lock:
            self._core.require_open()
            if self._core.memory.free_slots < 1:
                raise _no_room(self._core)
            return self._core.memory.open()

    def _alive(self) -> Holding:
        self._core.require_open()
        if self._holding is None:
            raise RequestError("the session is closed", where="session", next_step="open another one")
        return self._holding

    def _wanted(self, wanted: int | None, new: int) -> int:
        """Last rows whose logits have to be what the replay option promises."""
        if wanted is not None:
            require_whole("wanted", wanted)
        if wanted is not None and not 0 <= wanted <= new:
            raise RequestError("logits of rows that do not run", where="wanted", found=wanted, allowed=f"0..{new}")
        return new if wanted is None and self.replay == OFF else max(1, wanted or 1)

    def _checked(self, ids: Sequence[int] | NDArray[np.int64], beyond: int = 0) -> NDArray[np.int64]:
        plan = self._core.plan
        try:
            new = np.asarray(ids)
        except ValueError:  # rows of unequal lengths
            raise RequestError("a list of at least one token id is needed", where="feed",
                               found="lists inside the list") from None
        if isinstance(ids, list | tuple) and any(isinstance(i, bool) for i in ids):
            raise RequestError("token ids are whole numbers", where="feed", found="bool")
        if new.ndim != 1 or not len(new):
            raise RequestError("a list of at least one token id is needed", where="feed", found=f"shape {new.shape}")
        if not np.issubdtype(new.dtype, np.integer):
            raise RequestError("token ids are whole numbers", where="feed", found=new.dtype)
        wrong = np.flatnonzero((new < 0) | (new >= plan.vocab_size))
        if len(wrong):
            raise RequestError("token id out of range", where=f"position {self._clock.t + int(wrong[0])}",
                               found=int(new[wrong[0]]), allowed=f"0..{plan.vocab_size - 1}")
        if self._clock.t + len(new) > plan.max_model_len + beyond:
            raise RequestError("the sequence becomes longer than the engine was compiled for", where="feed",
                               found=self._clock.t + len(new), allowed=f"at most {plan.max_model_len}",
                               next_step="compile with a larger --max-model-len")
        return new.astype(np.int64)

    def _check_pins(self, pins: Pins | None, rows: int) -> dict[str, NDArray[np.int32]]:
        held: dict[str, NDArray[np.int32]] = {}
        if pins is not None and not isinstance(pins, Mapping):
            raise RequestError("a mapping from names to arrays is needed", where="pins", found=type(pins).__name__)
        for name, values in (pins or {}).items():
            pin = self._core.plan.pins.get(name)
            if pin is None:
                raise RequestError("the engine has no such selection", where="pins", found=name,
                                   allowed=sorted(self._core.plan.pins))
            array = np.ascontiguousarray(values, dtype=np.int32)
            if array.shape != (rows, pin.k):
                raise RequestError("a pinned selection has the wrong shape", where=f"pins[{name}]",
                                   found=array.shape, allowed=f"({rows}, {pin.k})")
            held[name] = array
        return held

    def _sizes(self, chunk: int | Sequence[int] | None) -> list[int]:
        if chunk is None:
            return [self._core.plan.limits["step"]]
        sizes = list(chunk) if isinstance(chunk, Sequence) else [chunk]
        if not sizes or any(not is_whole(size) or size < 1 for size in sizes):
            raise RequestError("chunks have at least one row", where="chunk", found=chunk)
        return sizes

    def _parts(self, first_wanted: int, sizes: Sequence[int]) -> Iterator[Part]:
        """Parts of the pending rows, each to be run before the next is asked for, with logits from position
        ``first_wanted`` on."""
        limits, clock = self._core.plan.limits, self._clock
        turn = 0
        while clock.pending:
            rows = min(clock.pending, sizes[turn % len(sizes)], limits["step"])
            rows = clock.rows_within(rows, limits["kept"])
            rows = min(rows, max(0, first_wanted - clock.row) + limits["wanted"])
            yield clock.part(rows, min(rows, max(0, clock.row + rows - first_wanted)))
            turn += 1

    def _step(self, part: Part, pins: dict[str, NDArray[np.int32]], start: int) -> NDArray[np.float32]:
        """Logits of the wanted rows of one part. ``start``: position of the first row that ``pins`` speak of."""
        core, holding = self._core, self._alive()
        core.batch.clear()
        fill(core.batch, part, self._ids, holding.slot, holding.blocks, core.plan.lookback)
        held: dict[str, Any] = {}
        for name, array in pins.items():
            rows = getattr(part, _AXES[core.plan.pins[name].axis])
            held[name] = np.ascontiguousarray(array[part.stop - rows - start:part.stop - start])
        got: Outputs = core.engine.run("step", core.batch, held or None)
        self._clock.ran(part)
        return np.array(got["logits"], dtype=np.float32)


def _require_finite(logits: NDArray[np.float32], first: int) -> None:
    """Raises ArtifactError that names the first position, counted from ``first``, without logits to choose from."""
    broken = np.flatnonzero(bad_logits(logits))
    if len(broken):
        raise ArtifactError(NOT_FINITE, where=f"position {first + int(broken[0])}",
                            next_step="fetch the checkpoint again")


def _no_room(core: EngineCore) -> PlanError:
    return PlanError("no slot or cache block is free for another sequence", where="session",
                     found=f"{core.memory.free_slots} slots and {core.memory.free_blocks} blocks free",
                     next_step="close other sessions, or give LLM more slots and num_blocks")
