"""Steps that are sent while one runs, interpreted: how far sequences came, and going on from there."""

from __future__ import annotations

from typing import Any

import numpy as np
from cuda.interpreted import mend_interpreter, module_of, tensor
from numpy.typing import NDArray

from deepinfer.backends.cuda_sm100.families import follow

M, WIDTH, FILLER, RATIOS = 3, 3, 777, (4, 2)
AXES = 4 + len(RATIOS)
Ids = NDArray[np.int64]


class Block:
    """Integers of a step: arrays by name, and the table that says where they lie."""

    source: Ids
    draft: Ids
    verified: Ids
    c: Ids
    from_step: Ids
    from_kept: Ids
    token_ids: Ids
    lookback: Ids

    def __init__(self, rows: list[int], wanted: list[int]) -> None:
        self.seqs, self.words = len(rows), np.full(4096, -99, np.int64)
        self._end = 0
        total, s = sum(rows), self.seqs
        self.table = np.zeros(follow.word_of("rows") + AXES * follow.AXIS_WORDS, np.int64)
        for name, size in (("source", s), ("draft", s), ("verified", s), ("c", s), ("from_step", s), ("from_kept", s),
                           ("token_ids", total), ("lookback", total * WIDTH)):
            setattr(self, name, self._room(name, size))
        self.table[follow.word("axes")] = AXES
        self.axes = [{n: self._axis(a, n, s, total) for n in ("rows", "seq", "step_row", "first", "pos")}
                     for a in range(AXES)]
        for a, ratio in enumerate(RATIOS):
            self.table[follow.word_of("ratio") + (4 + a) * follow.AXIS_WORDS] = ratio
        for a, count in enumerate((rows, rows, wanted)):
            self.axes[a]["first"][: s + 1] = [0, *np.cumsum(count)]
        self.axes[3]["first"][: s + 1] = range(s + 1)

    def _room(self, name: str, size: int) -> Ids:
        at, self._end = self._end, self._end + size + 1
        self.table[follow.word(name)] = at
        return self.words[at: at + size]

    def _axis(self, a: int, name: str, seqs: int, total: int) -> Any:
        at, self._end = self._end, self._end + total + seqs + 2
        self.table[follow.word_of(name) + a * follow.AXIS_WORDS] = at if name == "pos" else 2 * at
        whole = self.words[at: self._end]
        return whole if name == "pos" else whole.view(np.int32)

    def run(self, source: Any, after: tuple[Ids, Ids], *more: Any) -> None:
        mend_interpreter()
        values = [self.words, self.words.view(np.int32), self.table, *after]
        kernel = getattr(module_of(source), source.symbol)
        kernel[(1,)](0, self.seqs, *map(tensor, values), WIDTH, *more, **dict(source.variants[0].stages[0].constants))


def test_how_far_sequences_came_is_what_the_host_would_have_found() -> None:
    rng = np.random.default_rng(1)
    verified = [3, 0, 2, 1, 3, 0, 3]
    rows, wanted = [v + 1 for v in verified], [v + 1 for v in verified]
    rows[5], wanted[5] = 6, 2  # a prompt; the token behind its last row counts
    at = Block(rows, wanted)
    at.c[:] = rng.integers(0, 50, at.seqs)
    at.verified[:] = verified
    at.token_ids[:], at.lookback[:] = rng.integers(0, 90, sum(rows)), rng.integers(0, 90, sum(rows) * WIDTH)
    tokens = rng.integers(100, 190, sum(wanted))
    after = np.zeros(at.seqs, np.int64), np.zeros(at.seqs * WIDTH, np.int64)
    stays = [3, 0, 1, 0, 2, 0, 1]  # so many drafts are what their rows gave
    step, want = at.axes[0]["first"], at.axes[2]["first"]
    for s, n in enumerate(stays):
        tokens[want[s]: want[s] + n] = at.token_ids[step[s] + 1: step[s] + 1 + n]
    tokens[want[4] + 2] = -1  # no numbers behind two drafts: the second is the last token
    tokens[want[3]] = -1  # nothing is chosen
    at.run(follow.accept(), after, tensor(tokens))
    for s, n in enumerate([3, 0, 1, 0, 1, 0, 1]):
        last = step[s + 1] - 1 - verified[s] + n
        assert after[0][s] == at.c[s] + last - step[s] + 1
        assert after[1][s * WIDTH: (s + 1) * WIDTH].tolist() == [
            tokens[want[s + 1] - 1 - verified[s] + n], *at.lookback[last * WIDTH: last * WIDTH + WIDTH - 1]]


def test_a_step_goes_on_from_where_its_sequences_came() -> None:
    rng = np.random.default_rng(2)
    rows, source, draft = [4, 5, 1, 3, 2], [2, -1, 0, 3, 1], [1, -1, -1, -1, 0]
    at = Block(rows, rows)
    at.c[:] = at.from_step[:] = at.from_kept[:] = 11
    at.source[:], at.draft[:] = source, draft
    n, ids, drafts = rng.integers(20, 60, 4), rng.integers(0, 90, (4, WIDTH)), rng.integers(0, 90, (2, M))
    ids[3, 0] = -1  # of a sequence that failed
    before = at.words.copy()
    at.run(follow.follow(), (n, ids.reshape(-1)), tensor(drafts.reshape(-1)), M, FILLER)
    c, first = [int(n[k]) if k >= 0 else 11 for k in source], at.axes[0]["first"]
    assert at.c.tolist() == at.from_step.tolist() == at.from_kept.tolist() == c
    for s, k in enumerate(source):
        if k < 0:
            assert (at.token_ids[first[s]: first[s + 1]] == -99).all() and at.axes[0]["pos"][first[s]] == -99
            continue
        line = [*ids[k, ::-1].tolist(), *(drafts[draft[s]].tolist() if draft[s] >= 0 else [FILLER] * M)]
        for j in range(rows[s]):
            newest = WIDTH - 1 + j
            assert at.token_ids[first[s] + j] == max(line[newest], 0)
            row = (first[s] + j) * WIDTH
            assert at.lookback[row: row + WIDTH].tolist() == [line[newest - b] for b in range(WIDTH)]
            assert [at.axes[a]["pos"][first[s] + j] for a in range(3)] == [c[s] + j] * 3
        assert at.axes[3]["pos"][s] == c[s]
    for a, ratio in enumerate(RATIOS):
        axis = at.axes[4 + a]
        groups = [(s, j * ratio, first[s] + ratio * (j + 1) - 1 - c[s]) for s in range(len(rows))
                  for j in range(c[s] // ratio, (c[s] + rows[s]) // ratio)]
        assert axis["rows"][0] == len(groups)
        assert [(axis["seq"][i], axis["pos"][i], axis["step_row"][i]) for i in range(len(groups))] == groups
        assert axis["first"][: len(rows) + 1].tolist() == [sum(g[0] < s for g in groups) for s in range(len(rows) + 1)]
    assert (at.words[at._end:] == before[at._end:]).all()
