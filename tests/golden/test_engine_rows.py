"""On a compiled engine the bits of a row depend on the rows before it and on nothing else: not on chunks, on what runs
beside it, on threads, on drafts or on histories that were taken back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from compiled import checkpoint_of, engine_of
from golden.engines import LIMITS, Run, drafted_together, fed, lengths, llm_of, longer_prompt, run_of, together

from deepinfer import LLM

CHUNKS: tuple[Any, ...] = (1, 7, 16, 64, 128, [13, 1, 127])
# Every case in f32; in bf16 those whose kernels differ most: packed weights and activations, and the second spec.
RUNS = [("v41_a_f32", "wide"), ("v41_b_bf16", "wide"), ("v41_c_quant", "wide"), ("v41_b_bf16", "bf16"),
        ("v41_c_quant", "bf16"), ("v4_case_a", "wide"), ("v4_case_b", "wide"), ("v4_case_d", "wide"),
        ("v4_case_b", "bf16"), ("v4_case_d", "bf16")]


@pytest.fixture(params=RUNS, ids="-".join)
def run(request: pytest.FixtureRequest) -> Run:
    return run_of(*request.param)


def test_chunks_change_no_bit(run: Run) -> None:
    for chunk in CHUNKS:
        assert np.array_equal(fed(run.llm, run.case.ids, chunk=chunk), run.logits), chunk


def test_a_row_in_a_batch_is_bit_equal_to_the_row_alone(run: Run) -> None:
    ids = longer_prompt(run.case)
    parts = [ids[:1], ids[100:133], ids[7:9], ids[:128], ids[30:250], ids[3:20], ids[:33]]
    for prompt, rows in zip(parts, together(run.llm, parts), strict=True):
        assert np.array_equal(rows, fed(run.llm, prompt)), len(prompt)


@pytest.mark.parametrize("name", ["v41_a_f32", "v41_c_quant", "v4_case_d", "v4_mtp"])
def test_a_draft_in_a_batch_is_bit_equal_to_the_draft_alone(name: str) -> None:
    run = run_of(name)
    with run.after_prompt() as a, run.llm.session() as b, run.llm.session() as c:
        b.feed(run.case.ids[:1])
        c.feed(run.case.ids[5:138])
        alone = [s.draft(anchor).logits for s, anchor in ((a, 9), (b, 8), (c, 7))]
        for order in ((0, 1, 2), (2, 0), (1,)):
            found = drafted_together(run.llm, [(a, b, c)[i] for i in order], [(9, 8, 7)[i] for i in order])
            for i, logits in zip(order, found, strict=True):
                assert np.array_equal(logits, alone[i]), (order, i)


def test_threads_change_no_bit(run: Run) -> None:
    for threads in (2, 3):
        llm = llm_of(run.case.name, run.profile, threads)
        assert np.array_equal(fed(llm, run.case.ids[:150]), run.logits[:150]), threads


@pytest.mark.parametrize(("name", "profile"), [("v41_a_f32", "wide"), ("v41_c_quant", "bf16"), ("v4_case_d", "bf16")])
def test_tiles_of_row_loops_change_no_bit(name: str, profile: str) -> None:
    """With little room inside a loop it takes some rows at a time; in all other tests a step is one tile."""
    run = run_of(name, profile)
    engine = engine_of(run.case.name, workspace_bytes=1, profile=run.profile, **LIMITS)
    ids = longer_prompt(run.case, 700)
    lines = (engine / "lib" / "launch.txt").read_text().splitlines()
    loops = [int(line.split()[2]) for line in lines if line.startswith("loop ")]
    assert loops and max(loops) < len(ids)
    expected = fed(run.llm, ids)
    for threads in (1, 2):
        with LLM(engine, checkpoint_of(run.case.name), threads=threads, progress=False) as llm:
            assert np.array_equal(fed(llm, ids), expected), threads
            assert np.array_equal(fed(llm, ids, chunk=[530, 1, 67]), expected), threads
            parts = [ids[:150], ids[40:41], ids[:540]]
            for prompt, rows in zip(parts, together(llm, parts), strict=True):
                assert np.array_equal(rows, fed(run.llm, prompt)), (threads, len(prompt))


def test_every_length_gives_the_rows_of_a_longer_prompt(run: Run) -> None:
    ids = longer_prompt(run.case)
    whole = fed(run.llm, ids)
    shared = min(len(whole), len(run.logits))
    assert np.array_equal(whole[:shared], run.logits[:shared])
    for length in lengths():
        assert np.array_equal(fed(run.llm, ids[:length]), whole[:length]), length


def test_decoding_equals_prefilling(run: Run) -> None:
    tail = longer_prompt(run.case)[-40:]
    with run.after_prompt() as s:
        one_by_one = np.concatenate([s.feed([i]) for i in tail])
    assert np.array_equal(one_by_one, fed(run.llm, [*run.case.ids, *tail])[-40:])


def test_what_was_taken_back_or_forked_leaves_nothing_behind(run: Run) -> None:
    tail = longer_prompt(run.case)[-30:]
    rejected = [5, 6][: run.llm.plan.rewind_rows]  # none where nothing drafts
    with run.after_prompt() as plain, run.after_prompt() as other:
        expected = plain.feed(tail)
        for at in range(0, 30, 3):
            if "draft" in run.llm.plan.entries:
                other.draft(tail[at])
            other.feed([tail[at], *rejected])
            other.rewind(len(other) - len(rejected))
            with other.fork() as side:
                side.feed([9, 8, 7])
            assert np.array_equal(other.feed(tail[at + 1: at + 3]), expected[at + 1: at + 3]), at
        if "draft" in run.llm.plan.entries:
            assert np.array_equal(plain.draft(4).logits, other.draft(4).logits)
