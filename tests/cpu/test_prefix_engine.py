"""The prefix cache on a compiled engine: turns of a conversation, bit by bit."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compiled import checkpoint_of, engine_of
from golden.cases import load_case
from golden.gates import row_errors
from soak_engine import by_log

from deepinfer.errors import PlanError
from deepinfer.runtime.clock import STEP
from deepinfer.runtime.llm import LLM
from deepinfer.runtime.outputs import RequestOutput
from deepinfer.runtime.sampling_params import SamplingParams
from deepinfer.runtime.store.settings import StoreSettings

CASE = "v41_a_f32"
VOCABULARY = 336


def start(**options: Any) -> LLM:
    engine = engine_of(CASE, profile="wide", max_num_seqs=6, max_num_batched_tokens=64, max_model_len=640)
    return LLM(engine, checkpoint_of(CASE), threads=1, progress=False, **options)


@pytest.fixture(scope="module")
def cold() -> Iterator[LLM]:
    with start(prefix_cache=False) as running:
        yield running


def ids(seed: int, length: int) -> list[int]:
    out: list[int] = np.random.default_rng(seed).integers(3, VOCABULARY - 2, length).tolist()
    return out


def params(replay: Any, count: int = 12) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, logprobs=0, replay=replay)


def told(output: RequestOutput) -> list[Any]:
    """Ids and log-probabilities, every bit of them."""
    return [(o.token_ids, [x[t].logprob for x, t in zip(o.logprobs or (), o.token_ids, strict=True)])
            for o in output.outputs]


def turns(llm: LLM, replay: Any, lengths: Sequence[int] = (150, 120, 100)) -> list[RequestOutput]:
    """A conversation: each turn is all before it, the answer, and something new."""
    out, text = [], list[int]()
    for turn, length in enumerate(lengths):
        text += ids(turn, length)
        out.append(llm.generate([text], params(replay), progress=False)[0])
        text += out[-1].token_ids
    return out


@pytest.mark.parametrize("replay", ["off", "exact"])
def test_exact_turns_are_bit_equal_to_cold_ones(cold: LLM, replay: Any) -> None:
    with start() as llm:
        found = turns(llm, replay)
        assert [told(o) for o in found] == [told(o) for o in turns(cold, replay)]
        # Snapshots of runs that keep every row hold all windows: only the last block is not full yet.
        assert [o.num_cached_tokens for o in found] == [0, 128, 256] if replay == "off" else [0, 0, 256]


def test_with_windows_a_bounded_turn_is_bit_equal_to_a_cold_one(cold: LLM) -> None:
    with start() as llm:
        found = turns(llm, 32)
        assert [told(o) for o in found] == [told(o) for o in turns(cold, 32)]
        assert [o.num_cached_tokens for o in found] == [0, 128, 256]
        assert 'deepinfer:prefix_hits_total{windows="snapshot"} 2' in llm.metrics.text().splitlines()


def test_without_windows_the_tokens_are_those_of_the_replay_log(cold: LLM) -> None:
    with start(prefix_snapshots=0) as llm:
        found = turns(llm, 32)
    assert [[r.floor for r in o.replay_log if r.axis == STEP] for o in found] == [[], [128], [128, 256]]
    for o in found:
        assert o.token_ids == by_log(cold, o.prompt_token_ids, o.replay_log, 32, len(o.token_ids))
    assert told(found[2]) != told(turns(cold, 32)[2])  # the replay is there


def test_replay_upon_replay_is_the_interpreters() -> None:
    with start(prefix_snapshots=0) as llm:
        found = turns(llm, 32)[2]
        prompt = found.prompt_token_ids
        session = load_case(CASE).session(torch.float64, narrowed=True)
        with llm.session(32) as s:
            for r in found.replay_log:
                if r.axis == STEP:
                    s.feed(prompt[len(s):r.floor], wanted=1)
                    s.adopt(r.floor, rerun=r.floor - r.start)
                    session.feed(prompt[len(session.ids):r.floor], keep=32)
                    session.adopt(r.floor, replay=r.floor - r.start)
            rows = torch.from_numpy(s.feed(prompt[len(s):], wanted=8))
        expected = session.feed(prompt[len(session.ids):], keep=32)[-8:]
    assert float(row_errors(rows, expected).max()) < 1e-4
    assert int(expected[-1].argmax()) == found.token_ids[0]


@pytest.mark.parametrize("suffix", [1, 31, 32, 33])
def test_short_suffixes_behind_a_hit_are_bit_equal_to_cold_runs(cold: LLM, suffix: int) -> None:
    whole = ids(9, 256 + suffix)
    with start() as llm:
        llm.generate([whole[:256]], params(32, 1), progress=False)
        found = llm.generate([whole], params(32, 3), progress=False)[0]
    assert found.num_cached_tokens == 256
    assert told(found) == told(cold.generate([whole], params(32, 3), progress=False)[0])


def test_a_store_serves_the_next_engine_and_another_tenant_finds_nothing_of_it(cold: LLM, tmp_path: Path) -> None:
    text = ids(3, 300)
    for turn in range(2):
        with start(prefix_store=StoreSettings(tmp_path / "store", index=tmp_path / "index")) as llm:
            found = llm.generate([text], params(32), progress=False)[0]
            assert found.num_cached_tokens == (256 if turn else 0)
            assert found.token_ids == by_log(cold, text, found.replay_log, 32, len(found.token_ids))
            if not turn:
                assert told(found) == told(cold.generate([text], params(32), progress=False)[0])
            salted = SamplingParams(temperature=0, max_tokens=2, replay=32, cache_salt=f"tenant {turn}")
            assert llm.generate([text], salted, progress=False)[0].num_cached_tokens == 0
            assert ('deepinfer:prefix_hit_tokens_total{tier="store"} 256' in llm.metrics.text()) == bool(turn)


def test_a_store_without_the_cache_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="prefix_store: it is a part of the prefix cache; found"):
        start(prefix_cache=False, prefix_store=tmp_path)


def test_random_conversations_end_as_their_logs_say(cold: LLM) -> None:
    """48 requests that share beginnings, six at a time in few blocks, some of them aborted."""
    rng = random.Random(5)
    texts = [ids(i, 300) for i in range(3)]
    with start(num_blocks=14, prefix_snapshots=6) as llm:
        core, waiting = llm.core, [("off", "exact", 32, 40)[i % 4] for i in range(48)]
        running: list[Any] = []
        while waiting or running:
            if waiting and len(running) < 8:
                text = rng.choice(texts)
                prompt = [*text[: rng.choice((len(text), rng.randrange(100, len(text))))], *ids(rng.randrange(3), 20)]
                running.append(core.make(str(len(waiting)), prompt[:480], params(waiting.pop(), rng.choice((3, 24)))))
                core.add(running[-1])
            if rng.random() < 0.01:
                core.abort(rng.choice(running).request_id)
            core.step()
            for request in [r for r in running if r.finished]:
                running.remove(request)
                out, replay = request.updates[-1], request.params.replay
                if out.outputs[0].finish_reason != "length" or request.metrics.num_preemptions:
                    continue
                count = len(out.token_ids)
                if replay in ("off", "exact"):
                    expected = cold.generate([out.prompt_token_ids], params(replay, count), progress=False)[0].token_ids
                else:
                    expected = by_log(cold, out.prompt_token_ids, out.replay_log, replay, count)
                assert out.token_ids == expected, (replay, out.replay_log)
                texts = [*texts[-5:], out.prompt_token_ids + out.token_ids]
        core.memory.check()
        told = llm.metrics.text()
        assert llm.metrics.prefix_hits.value >= 1_000, told
        assert "deepinfer:prefix_evicted_blocks_total 0" not in told
