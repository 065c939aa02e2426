"""Attention, its scores and its state in the reference interpreter, against values worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from pure.small_graphs import attend, run, traced

from deepinfer.dsl import (
    GroupTail,
    Paged,
    Source,
    States,
    Window,
    bf16,
    block_max,
    concat,
    const,
    f32,
    flatten,
    index_score,
    output,
    positions,
    reshape,
    to_float,
    token_ids,
    top_k,
    within_blocks,
)
from deepinfer.dsl.interpreter import Interpreter, SequenceState, StepRows
from deepinfer.errors import InternalError


def softmax_sum(scores: list[float], values: list[float], sink: float | None = None) -> float:
    below = sum(map(math.exp, scores)) + (0.0 if sink is None else math.exp(sink))
    return sum(math.exp(s) * v for s, v in zip(scores, values, strict=True)) / below


def window_entry(rows: int, sink: float | None = None) -> Callable[[], None]:
    def entry() -> None:
        window = States().add(Window("w", f32[1], rows=rows, slack=1))
        view = window.extend(reshape(to_float(token_ids()), 1))
        operand = None if sink is None else const([sink])
        output("o", attend(const([1.0], dims=(1, 1)) * reshape(to_float(positions()) * 0.0 + 1.0, 1, 1),
                           [Source("window", rows, view)], 0.5, sink=operand))
    return entry


def test_a_window_holds_the_last_rows_and_the_sink_only_divides() -> None:
    ids = [3, 1, 4, 1, 5]
    out = run(window_entry(3, sink=0.7), StepRows(ids))["o"].flatten()
    for i in range(5):
        held = [float(v) for v in ids[max(0, i - 2): i + 1]]
        assert out[i].item() == pytest.approx(softmax_sum([v / 2 for v in held], held, 0.7), rel=1e-14)


def test_steps_continue_a_window_and_its_start_cuts_it() -> None:
    graph = {"step": traced(window_entry(3))}
    ids = [3, 1, 4, 1, 5, 9]
    whole = Interpreter(graph, {}).step(SequenceState(), StepRows(ids)).outputs["o"]
    interpreter, state = Interpreter(graph, {}), SequenceState()
    interpreter.step(state, StepRows(ids[:4]))
    second = StepRows(ids[4:], start=4)
    assert torch.allclose(interpreter.step(state.fork(), second).outputs["o"], whole[4:], atol=1e-15)
    cut = StepRows(ids[4:], start=4, window_start={"w": 3})
    expected = softmax_sum([0.5, 2.5], [1.0, 5.0])
    assert interpreter.step(state.fork(), cut).outputs["o"][0].item() == pytest.approx(expected, rel=1e-14)
    gap = StepRows([2], start=10)  # rows 4..9 never ran: nothing before the gap is seen
    assert interpreter.step(state, gap).outputs["o"].item() == 2.0


def test_a_block_sees_its_context_and_all_of_itself() -> None:
    ids, block = [3.0, 1.0, 4.0, 1.0], [2.0, 7.0]
    window = States().add(Window("w", f32[1], rows=3, slack=1))

    def draft() -> None:
        x = reshape(to_float(token_ids()), 1)
        q = reshape(x * 0.0 + 1.0, 1, 1)
        output("o", attend(q, [Source("context", 3, window.handle()), Source("block", 0, x)], 1.0))

    graphs = {"step": traced(lambda: window.extend(reshape(to_float(token_ids()), 1))), "draft": traced(draft)}
    interpreter, state = Interpreter(graphs, {}), SequenceState()
    interpreter.step(state, StepRows([int(v) for v in ids]))
    out = interpreter.draft(state, [int(v) for v in block], 4).outputs["o"].flatten()
    expected = softmax_sum(ids[1:] + block, ids[1:] + block)
    assert out.tolist() == pytest.approx([expected, expected], rel=1e-14)
    rejected = interpreter.draft(state, [int(v) for v in block], 2).outputs["o"].flatten()  # rows 2, 3 taken back
    assert rejected[0].item() == pytest.approx(softmax_sum(ids[:2] + block, ids[:2] + block), rel=1e-14)


def test_entries_are_visible_once_their_group_is_complete() -> None:
    """Dense and selected reads of the same entries agree; scores beyond what is visible are -inf."""
    s = States()
    kv = s.add(Paged("kv", f32[1], tokens_per_entry=2))
    tail = s.add(GroupTail("t", f32[2], group=2, slack=1))

    def entry() -> None:
        x = reshape(to_float(token_ids()), 1)
        entries = kv.append(tail.pool(x, x * 0.0))  # equal gates: the mean of two rows
        q = reshape(x * 0.0 + 1.0, 1, 1)
        scores = index_score(q, entries, const([2.0]), 2)
        output("scores", scores)
        output("dense", attend(q, [Source("dense", 2, entries)], 1.0, sink=const([0.0])))
        chosen = top_k(scores, 5)
        output("picked", attend(q, [Source("selected", 2, entries, picked=chosen)], 1.0, sink=const([0.0])))

    ids, means = [3, 1, 4, 2, 9], [2.0, 3.0]
    out = run(entry, StepRows(ids))
    inf = math.inf
    assert out["scores"].tolist() == [[-inf, -inf], [4.0, -inf], [4.0, -inf], [4.0, 6.0], [4.0, 6.0]]
    for i, seen in enumerate([0, 1, 1, 2, 2]):
        assert out["dense"][i].item() == pytest.approx(softmax_sum(means[:seen], means[:seen], 0.0), rel=1e-14)
    assert torch.allclose(out["picked"], out["dense"], atol=1e-15)


def test_no_entry_below_the_write_floor_changes() -> None:
    kv = States().add(Paged("kv", f32[1], tokens_per_entry=2))
    tail = States().add(GroupTail("t", f32[2], group=2, slack=1))
    graph = traced(lambda: kv.append(tail.pool(reshape(to_float(token_ids()), 1), reshape(to_float(token_ids()), 1))))
    interpreter, state = Interpreter({"step": graph}, {}), SequenceState()
    interpreter.step(state, StepRows([3, 3, 5, 5]))
    prefix = state.only_entries(interpreter.states, 4)
    interpreter.step(prefix, StepRows([7, 7, 7, 7], start=2, write_floor=4))
    assert prefix.values["kv"].rows.flatten().tolist() == [3.0, 5.0, 7.0]
    with pytest.raises(InternalError, match="rows that are not there"):
        interpreter.step(state.only_entries(interpreter.states, 4), StepRows([7], start=5, write_floor=4))
    with pytest.raises(InternalError, match="cuts an entry"):
        interpreter.step(state.fork(), StepRows([7], start=4, write_floor=3))


def test_an_overlapping_pool_reads_the_lower_half_before_and_the_upper_half_of_its_group() -> None:
    tail = States().add(GroupTail("t", f32[4], group=2, overlap=True, slack=1))

    def entry() -> None:
        x = reshape(to_float(token_ids()), 1)
        output("e", tail.pool(concat(x, x * 10.0), concat(x * 0.0, x * 0.0)))

    out = run(entry, StepRows([1, 2, 3, 4]))["e"].flatten().tolist()
    assert out == pytest.approx([(10 + 20) / 2, (1 + 2 + 30 + 40) / 4])


def test_blocks_of_scores_keep_their_best_and_the_newest_comes_first() -> None:
    kv = States().add(Paged("kv", f32[1], tokens_per_entry=1))

    def entry() -> None:
        x = reshape(to_float(token_ids()), 1)
        scores = index_score(reshape(x * 0.0 + 1.0, 1, 1), kv.append(x), const([1.0]), 1)
        output("best", block_max(scores, 2))
        picked = top_k(block_max(scores, 2), 2, "blocks")
        output("picked", picked)
        output("within", within_blocks(scores, picked, 2))

    out = run(entry, StepRows([5, 1, 2, 3, 4]))
    inf = math.inf
    assert out["best"][4].tolist() == [5.0, 3.0, inf]
    assert out["picked"].tolist() == [[0, -1], [0, -1], [1, 0], [1, 0], [2, 0]]
    assert out["within"][4].tolist() == [5.0, 1.0, -inf, -inf, 4.0]
    assert out["within"][0].tolist() == [5.0, -inf, -inf, -inf, -inf]


def test_heads_read_their_own_key_head_and_values_may_be_another_state() -> None:
    s = States()
    k, v = s.add(Paged("k", f32[4])), s.add(Paged("v", f32[6]))

    def entry() -> None:
        x = reshape(to_float(token_ids()), 1)
        keys = k.append(flatten(reshape(x * const([1.0, 0.0, 0.0, 2.0]), 2, 2)))
        values = v.append(x * const([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]))
        q = reshape(x * 0.0 + const([1.0] * 8), 4, 2)
        output("o", attend(q, [Source("dense", 1, keys, values)], 1.0, kv_heads=2, value_dim=3))

    out = run(entry, StepRows([1, 2]))["o"][1]
    for head in range(4):
        slope, first = ((1.0, 1.0), (2.0, 4.0))[head // 2]
        expected = [softmax_sum([slope, 2 * slope], [f, 2 * f]) for f in (first, first + 1, first + 2)]
        assert out[head].tolist() == pytest.approx(expected, rel=1e-14)


def test_index_scores_round_each_dot_each_product_and_the_sum() -> None:
    kv = States().add(Paged("kv", f32[1]))

    def entry(rounds: bool) -> Callable[[], None]:
        def build() -> None:
            x = reshape(to_float(token_ids()), 1)
            q = reshape(x * 0.0 + const([1.0 + 2.0**-9, -1.0, 1.0 + 2.0**-7]), 3, 1)
            scores = index_score(q, kv.append(x), const([1.0, 5.0, -3.0]), 1, bf16 if rounds else None)
            output("s", scores)
        return build

    exact = (1 + 2.0**-9) - 3 * (1 + 2.0**-7)
    assert run(entry(False), StepRows([1]))["s"].item() == exact
    product = torch.tensor(-3 * (1 + 2.0**-7)).bfloat16().float()
    assert run(entry(True), StepRows([1]))["s"].item() == (1.0 + product).bfloat16().float().item()
