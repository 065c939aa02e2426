"""How far bounded replay moves the next-token distribution, measured on a checkpoint and a text.

A text is taken as a conversation: turn k ends at position k * g. At each end the distributions of the next tokens are
compared with those of a run that computes every row (``exact``):

| way | the prompt of the turn |
|---|---|
| ``decoder`` | decoder layers run for the last K rows only, as in every cold prompt |
| ``replay`` | besides, the turns before are a hit whose windows are gone, on exact entries |
| ``again`` | the same, and every turn before was computed that way: replay upon replay |
| ``window`` | nothing but the last W tokens, what one would have without a cache |

Figures are KL(exact || way) in nats and how often the most probable token is another one, over the row that ends the
prompt and the rows of the text behind it, fed one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from deepinfer.errors import PlanError, RequestError
from deepinfer.runtime.plan import OFF, EnginePlan
from deepinfer.runtime.sampling import log_softmax

if TYPE_CHECKING:
    from deepinfer.runtime.llm import LLM
    from deepinfer.runtime.session import Session

WAYS = ("decoder", "replay", "again", "window")
SCORED = 8  # rows compared at the end of a turn
Logits = NDArray[np.float32]


@dataclass
class Way:
    """KL in nats [turns, rows], and whether the most probable token changed [turns, rows]."""

    kl: list[list[float]] = field(default_factory=list)
    changed: list[list[bool]] = field(default_factory=list)

    def add(self, exact: Logits, found: Logits) -> None:
        """One turn's rows [rows, V]."""
        p, q = (np.stack([log_softmax(row) for row in rows]) for rows in (exact, found))
        self.kl.append((np.exp(p) * (p - q)).sum(axis=1).tolist())
        self.changed.append((exact.argmax(axis=1) != found.argmax(axis=1)).tolist())

    def summary(self, first: int = 0, stop: int | None = None) -> dict[str, float]:
        """Over turns first .. stop - 1."""
        kl, changed = np.array(self.kl[first:stop]), np.array(self.changed[first:stop])
        return {"mean_kl": float(kl.mean()), "median_kl": float(np.median(kl)), "max_kl": float(kl.max()),
                "top1_changed": float(changed.mean()), "rows": int(kl.size)}


@dataclass(frozen=True)
class Drift:
    """``ends``: positions where turns end; ``hits``: where the hit of each lay (0: none); ``ways``: by name."""

    keep: int
    window: int
    ends: tuple[int, ...]
    hits: tuple[int, ...]
    ways: dict[str, Way]

    def groups(self) -> list[tuple[int, int]]:
        """Turns in groups that double: how replay upon replay adds up."""
        out, first = [], 1
        while first < len(self.ends):
            stop = min(len(self.ends), 2 * first)
            out.append((first, stop))
            first = stop
        return out


def check_plan(plan: EnginePlan, keep: int) -> None:
    """PlanError or RequestError when an engine cannot be measured."""
    if not plan.licensed:
        raise RequestError("this model was not trained for bounded replay: its prefix hits are exact", where=plan.model,
                           next_step="there is nothing to measure")
    plan.replay_rows(keep)
    if plan.max_num_seqs < 3:
        raise PlanError("three sequences are held at the same time", where="max_num_seqs", found=plan.max_num_seqs,
                        allowed=">= 3", next_step="compile with --max-num-seqs 3")


def turn_ends(plan: EnginePlan, tokens: int, turns: int) -> tuple[int, ...]:
    """Positions where turns end: all equally long, the scored rows of the last one inside the text."""
    length = (min(tokens, plan.max_model_len) - SCORED) // turns
    if length < SCORED or length * turns <= plan.block_tokens + plan.window:
        raise RequestError("the text is too short for so many turns", where="--text",
                           found=f"{min(tokens, plan.max_model_len)} tokens for {turns} turns",
                           allowed=f">= {max(SCORED * (turns + 1), plan.block_tokens + plan.window + SCORED + turns)}",
                           next_step="give a longer text, fewer turns, or an engine with a larger --max-model-len")
    return tuple(length * (turn + 1) for turn in range(turns))


def measure(llm: LLM, ids: Sequence[int], turns: int, keep: int | None = None,
            progress: Callable[[range], Iterable[int]] = iter) -> Drift:
    """Run all ways over a text.

    Args:
        ids: the text. ``keep``: K, None for the fewest rows that the model was trained for.
        progress: wraps the turns.

    Raises RequestError and PlanError in one sentence.
    """
    plan = llm.plan
    rows = plan.least_keep if keep is None else keep
    check_plan(plan, rows)
    ends = turn_ends(plan, len(ids), turns)
    hits = tuple(_hit(plan, end) for end in (0, *ends[:-1]))
    ways = {name: Way() for name in WAYS}
    with llm.session(OFF) as exact, llm.session(rows) as chain:
        for turn in progress(range(turns)):
            end, hit = ends[turn], hits[turn]
            prompt, more = ids[:end], ids[end : end + SCORED - 1]
            truth = exact.feed(ids[len(exact) : end + SCORED - 1], wanted=SCORED)
            chain.adopt(hit)
            first = chain.feed(prompt[hit:], wanted=1)
            with chain.fork() as s:
                ways["again"].add(truth, np.concatenate((first, s.feed(more, wanted=len(more)))))
            with _behind(exact, rows, (end - 1) // plan.block_tokens * plan.block_tokens, plan.exact_rerun + rows) as s:
                ways["decoder"].add(truth, _scored(s, prompt, more))
            with _behind(exact, rows, hit, None) if hit else _behind(exact, rows, 0, plan.window) as s:
                ways["replay"].add(truth, _scored(s, prompt, more))
            with llm.session(OFF) as s:
                ways["window"].add(truth, _scored(s, prompt[-plan.window :], more))
    return Drift(rows, plan.window, ends, hits, ways)


def _hit(plan: EnginePlan, end: int) -> int:
    """Where the hit of a turn lies when the one before ended at ``end``; one no longer than what runs again is none."""
    floor = end // plan.block_tokens * plan.block_tokens
    return floor if floor > plan.rerun else 0


def _behind(exact: Session, keep: int, hit: int, rerun: int | None) -> Session:
    """A copy of an exact sequence of which the entries below ``hit`` stay, with bounded replay from there on."""
    s = exact.fork()
    s.replay = keep
    s.adopt(hit, rerun=rerun)
    return s


def _scored(s: Session, prompt: Sequence[int], more: Sequence[int]) -> Logits:
    """The row that ends the prompt and those of the text behind it, [rows, V]."""
    first = s.feed(prompt[len(s):], wanted=1)
    return np.concatenate((first, s.feed(more, wanted=len(more))))
