"""Conversations shorter than what an exact row hangs on: a turn begins behind all whole blocks of the one before."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from prefix_core import answered, check, core, ids, params, plan_for

from deepinfer.runtime.outputs import RequestOutput
from deepinfer.runtime.plan import EnginePlan
from deepinfer.runtime.prefix.cache import MemoryCache

FAR = 1000  # rows that an exact row hangs on, said to be more than any prompt here has


def _plan(lag: int = 0, drafts: int = 0) -> EnginePlan:
    return replace(plan_for(lag=lag, drafts=drafts), exact_keep=FAR)


def _chat(plan: EnginePlan, options: list[Any], lag: int = 0) -> list[RequestOutput]:
    """Each turn is the conversation so far and 9 tokens; answers are 20 tokens long."""
    c, found, text = core(plan, lag=lag), list[RequestOutput](), ids(1, 30)
    for turn, option in enumerate(options):
        found += answered(c, [(text, params(option, 20))])
        text = text + found[-1].token_ids + ids(2 + turn, 9)
    c.memory.check()
    return found


@pytest.mark.parametrize("drafts", [0, 5])
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("option", ["off", "exact"])
def test_the_next_turn_begins_behind_every_whole_block(option: str, lag: int, drafts: int) -> None:
    plan = _plan(lag, drafts)
    found = _chat(plan, [option] * 5, lag)
    for out in found:
        check(plan, out, option)
        assert out.replay_log == () and not any(d.replayed_rows > plan.block_tokens for d in out.debug)
    told = [len(a.prompt_token_ids) + len(a.token_ids) - 1 for a in found]  # the last token's row never ran
    assert [out.num_cached_tokens for out in found] == [0, *(n // 16 * 16 for n in told[:-1])]


def test_the_same_prompt_again_runs_its_last_block_only() -> None:
    plan = _plan()
    c, text = core(plan), ids(3, 75)
    first, again = (answered(c, [(text, params("off", 4))])[0] for _ in range(2))
    assert (first.token_ids, again.num_cached_tokens, again.debug[0].replayed_rows) == (again.token_ids, 64, 0)


def test_windows_of_a_run_that_kept_few_rows_serve_no_exact_request() -> None:
    plan = _plan()
    found = _chat(plan, [8, "off", 8, "off"])
    for out, option in zip(found, [8, "off", 8, "off"], strict=True):
        check(plan, out, option)
    assert found[1].num_cached_tokens == 0 and found[3].num_cached_tokens > 0


def test_windows_that_are_taken_for_whole_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryCache, "_kept_all", lambda self, clock, at: True)
    with pytest.raises(AssertionError):
        test_windows_of_a_run_that_kept_few_rows_serve_no_exact_request()


def test_an_image_is_part_of_the_prefix_it_stands_in() -> None:
    """The same ids: blocks before the first image that differs are shared, none behind it begins."""
    plan, text = plan_for(), ids(7, 90)

    def cached(first: Any, then: Any) -> int:
        c = core(plan)
        for i, images in enumerate((first, then)):
            c.add(r := c.make(str(i), text, params("off", 3), images=images))
            while c.step():
                pass
        return r.updates[-1].num_cached_tokens

    cat, dog = b"\1" * 16, b"\2" * 16
    assert cached([(40, cat)], [(40, cat)]) == cached([], []) == 80
    assert cached([(40, cat)], [(40, dog)]) == cached([(40, cat)], []) == cached([], [(33, cat)]) == 32
    assert cached([(40, cat)], [(41, cat)]) == 32  # elsewhere in the same block
    assert cached([(40, cat), (70, dog)], [(40, cat), (70, cat)]) == 64
    assert cached([(40, cat), (44, dog)], [(40, dog), (44, cat)]) == 32
