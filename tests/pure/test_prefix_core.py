"""The prefix cache under the real loops: conversations that come back, with drafts, aborts, forks and preemption."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prefix_core import answered, check, core, ids, params, plan_for
from prefix_loop import expected

from deepinfer.runtime.clock import KEPT, STEP
from deepinfer.runtime.plan import EnginePlan
from deepinfer.runtime.prefix.road import must_be_exact
from deepinfer.runtime.sequence import Request
from deepinfer.runtime.session import Session


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("drafts", [0, 5])
def test_every_turn_of_a_conversation_finds_the_one_before(lag: int, drafts: int) -> None:
    plan = plan_for(lag, drafts)
    c = core(plan, lag=lag)
    texts = [ids(i, 40) for i in range(3)]
    for turn in range(4):
        for i, out in enumerate(answered(c, [(text, params(8)) for text in texts])):
            known = len(out.prompt_token_ids) - 13 - 1  # what the turn before computed
            assert out.num_cached_tokens == (known // 16 * 16 if turn else 0)
            assert [r.axis for r in out.replay_log] == [KEPT]
            check(plan, out, 8)
            texts[i] = out.prompt_token_ids + out.token_ids + ids(turn, 13)
    assert c.metrics.prefix_hits.value == sum(c.metrics.prefix_tiers.values.values())  # type: ignore[attr-defined]


def test_both_loops_leave_the_same_blocks_and_windows() -> None:
    kept = []
    for lag in (0, 1):
        plan = plan_for(1, 5)
        c = core(plan, lag=lag)
        answered(c, [(ids(i, 45 + i), params(8, 30)) for i in range(4)])
        tree = c.prefix.tree  # type: ignore[attr-defined]
        kept.append(sorted((n.key != b"", n.number, n.ids, n.windows >= 0) for n in tree))
    assert kept[0] == kept[1] and any(k[-1] for k in kept[0])


class Conversations:
    """Random requests that continue or repeat earlier ones, some of them aborted, at a pool of few blocks."""

    def __init__(self, plan: EnginePlan, seed: int, blocks: int, snapshots: int, lag: int, spill: int) -> None:
        self.rng, self.plan = random.Random(seed), plan
        self.core = core(plan, blocks, snapshots, lag, spill)
        self.texts = [ids(seed, 30), ids(seed, 20) + ids(seed + 1, 30)]
        self.open: list[tuple[Request, Any]] = []
        self.number = self.preempted = 0

    def run(self, steps: int) -> None:
        for _ in range(steps):
            if len(self.open) < 6 and self.rng.random() < 0.3:
                self.ask()
            if self.open and self.rng.random() < 0.03:
                self.core.abort(self.rng.choice(self.open)[0].request_id)
            if not self.core.step() and not self.open:
                self.ask()
            self.collect()
        while self.core.step():
            pass
        self.collect()
        self.core.memory.check()
        self.core.prefix.clear()  # type: ignore[attr-defined]
        self.core.memory.check()
        assert self.core.memory.blocks.free == self.core.memory.blocks.size

    def ask(self) -> None:
        rng, plan = self.rng, self.plan
        text = rng.choice(self.texts)
        prompt = [*text[: rng.choice((len(text), rng.randrange(1, len(text) + 1)))], *ids(rng.randrange(3), 11)][:150]
        replay = rng.choice(("off", "exact", plan.window, plan.window + 5))
        n = rng.choice((1, 1, 1, 2))
        p = params(replay, rng.choice((1, 9, 30))) if n == 1 else params(
            replay, 9, n=2, temperature=1.0, seed=rng.randrange(99))
        request = self.core.make(str(self.number), prompt, p)
        self.number += 1
        self.core.add(request)
        self.open.append((request, replay))

    def collect(self) -> None:
        for request, replay in [x for x in self.open if x[0].finished]:
            self.open.remove((request, replay))
            out = request.updates[-1]
            lost = self.core.metrics.restarted.value
            if out.outputs[0].finish_reason == "length" and request.params.greedy and not (
                    lost and request.metrics.num_preemptions):
                check(self.plan, out, replay)
            elif lost and must_be_exact(self.plan, replay) and request.params.greedy:
                assert out.token_ids == expected(self.plan, out.prompt_token_ids, len(out.token_ids))
            self.preempted += request.metrics.num_preemptions
            self.texts.append((out.prompt_token_ids + out.token_ids)[:150])
            self.texts = self.texts[-6:]


@settings(max_examples=10)
@given(st.integers(0, 10**6), st.sampled_from((0, 1)), st.sampled_from((0, 5)), st.sampled_from((18, 30, 80)),
       st.sampled_from((0, 2, 30)), st.sampled_from((0, 1 << 30)))
def test_answers_are_those_of_their_logs_whatever_runs_beside_them(seed: int, lag: int, drafts: int, blocks: int,
                                                                 snapshots: int, spill: int) -> None:
    Conversations(plan_for(lag, drafts), seed, blocks, snapshots, lag, spill).run(60)


def test_sessions_take_blocks_that_only_the_cache_holds() -> None:
    plan = plan_for()
    c = core(plan, blocks=16)
    answered(c, [(ids(1, 150), params("off", 1))])
    assert c.memory.free_blocks < 8
    with Session(c) as s:
        s.feed(ids(2, 200))
        c.memory.check()


def test_what_a_request_found_is_told() -> None:
    plan = plan_for()
    c = core(plan, snapshots=0)
    whole = ids(3, 200)
    answered(c, [(whole[:100], params("off", 1))])
    out = answered(c, [(whole[:150], params(8, 1))])[0]
    assert out.num_cached_tokens == 96 and [(r.axis, r.start, r.floor) for r in out.replay_log] == [
        (STEP, 88, 96), (KEPT, 142, 0)]
    text = c.metrics.text()
    for line in ("vllm:prefix_cache_queries_total 250", "vllm:prefix_cache_hits_total 96",
                 'deepinfer:prefix_hits_total{windows="replay"} 1', "deepinfer:replayed_rows_total 8",
                 'deepinfer:prefix_hit_tokens_total{tier="memory"} 96',
                 'deepinfer:prefix_published_blocks_total{lineage="exact"} 6',
                 'deepinfer:prefix_published_blocks_total{lineage="replayed"} 3', "deepinfer:prefix_blocks 9"):
        assert line in text.splitlines(), line


@pytest.mark.parametrize("lag", [0, 1])
def test_a_prompt_that_ends_in_no_numbers_ends_no_other_request(lag: int) -> None:
    """In the overlapped loop a decode step of that sequence is in flight when the host learns of it."""
    c = core(plan_for(lag), lag=lag)
    c.engine.broken_ids = {60}  # type: ignore[attr-defined]
    bad, good = answered(c, [([*range(1, 20), 60], params("off", 5)), ([*range(1, 30)], params("off", 5))])
    assert bad.outputs[0].finish_reason == "error" and good.outputs[0].finish_reason == "length"


def test_a_cache_that_never_helps_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    plan = plan_for(window=16, block=16, max_len=60)
    c = core(replace(plan, exact_keep=60), snapshots=0)  # an exact row hangs on more rows than there are
    for i in range(120):
        answered(c, [([*ids(1, 58), i % 60], params("exact", 1))])
    assert c.metrics.prefix_hits.value == 0
    warned = [r.getMessage() for r in caplog.records if "prefix_cache_unused" in r.getMessage()]
    assert len(warned) == 1 and "exact_keep=60" in warned[0]
