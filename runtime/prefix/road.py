"""Where a request starts to run when a prefix of it is cached: with windows or without, exactly or by replay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deepinfer.runtime.plan import EXACT, OFF, EnginePlan, Replay, ReplayOption


@dataclass(frozen=True)
class Road:
    """Entries below ``floor`` are adopted and rows from ``start`` on run, those below ``floor`` write none.

    ``windows``: a snapshot at ``start`` fills the rings; otherwise the windows begin at ``start``. ``whole``: it fills
    those of kept rows too.
    """

    floor: int
    start: int
    windows: bool
    whole: bool = False


def must_be_exact(plan: EnginePlan, option: ReplayOption) -> bool:
    """Whether a request's answer may not depend on what the cache holds: always, unless it asks for bounded replay by
    its number of rows and the model was trained for that."""
    chosen = plan.replay if option is None else option
    return chosen in (OFF, EXACT) or not plan.licensed


def replay_of(plan: EnginePlan, option: ReplayOption, wanted: int = 1) -> Replay:
    """What the option means for a prompt behind a hit: all rows that run are kept with ``off``, and enough of them
    run that the result is that of a cold run."""
    replay = plan.replay_rows(option, wanted)
    if not must_be_exact(plan, option):
        return replay
    exact = plan.replay_rows(EXACT, wanted)
    return Replay(replay.keep, exact.rerun, exact.depth)


def kept_rows(plan: EnginePlan, replay: Replay, exact: bool, wanted: int = 1) -> int:
    """Rows at the end of the prompt that have to run at least."""
    least = plan.exact_keep + wanted - 1
    return least if replay.keep is None or exact else replay.keep


def choose(plan: EnginePlan, known: int, blocks: int, edges: Sequence[int], replay: Replay, exact: bool,
           whole: Sequence[int] = ()) -> Road | None:
    """The road of a request with ``known`` ids of which ``blocks`` leading blocks are cached; None: a cold run.

    Args:
        edges: rising positions with a window snapshot, at the ends of those blocks. ``whole``: those of them with a
            snapshot of all rings.
        replay: from ``replay_of``. ``exact``: from ``must_be_exact``.

    With windows, rows in front of the hit run again exactly, as many blocks as the kept rows reach back; the start of
    the text needs none. Without, ``rerun`` rows in front of it do. A snapshot further back is taken when that is no
    dearer. A hit that saves no row is none: then the cold run is as cheap, and exact. Behind a whole snapshot nothing
    has to run but what is new.
    """
    block = plan.block_tokens
    floor = block * min(blocks, (known - 1) // block)
    if floor == 0:
        return None
    keep = kept_rows(plan, replay, exact)
    limit = min(floor, known - keep)
    windowed = max((at for at in edges if 0 < at <= limit), default=0)
    bare = max(0, min(floor - replay.rerun, known - max(replay.depth, keep)))
    near = windowed >= limit // block * block
    road = Road(floor, windowed, True) if near or windowed >= bare else Road(floor, bare, False)
    best = max((at for at in whole if at <= floor), default=0)
    if best >= road.start:
        road = Road(floor, best, True, True)
    return road if road.start > 0 else None


def edges_to_keep(plan: EnginePlan, known: int, keep: int) -> tuple[int, ...]:
    """Edges of blocks at which the end of a prompt leaves snapshots: the last two, for the next turn and for a short
    suffix, and the last one that the kept rows of the same prompt reach back to."""
    block = plan.block_tokens
    last = known // block * block
    found = {last, last - block, max(0, known - keep) // block * block}
    return tuple(sorted(at for at in found if at > 0))
