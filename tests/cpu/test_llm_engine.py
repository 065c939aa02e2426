"""`LLM` and sessions on a compiled engine: nothing that runs beside a sequence, and nothing that happens to its memory,
changes a bit of its results."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from compiled import checkpoint_of, engine_of

from deepinfer.runtime.llm import LLM
from deepinfer.runtime.outputs import RequestOutput
from deepinfer.runtime.sampling_params import SamplingParams
from deepinfer.runtime.session import Session

CASE = "v41_a_f32"
VOCABULARY = 336
LENGTHS = (*range(1, 21), 31, 32, 33, 127, 128, 129, 255, 256, 257)


def start(threads: int = 1, **options: Any) -> LLM:
    engine = engine_of(CASE, profile="wide", max_num_seqs=6, max_num_batched_tokens=64, max_model_len=640, host_lag=1)
    return LLM(engine, checkpoint_of(CASE), threads=threads, progress=False, **options)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with start() as running:
        yield running


def ids(seed: int, length: int) -> list[int]:
    out: list[int] = np.random.default_rng(seed).integers(3, VOCABULARY - 2, length).tolist()
    return out


def told(output: RequestOutput) -> list[Any]:
    """Ids and log-probabilities, every bit of them."""
    return [(o.token_ids, [x[t].logprob for x, t in zip(o.logprobs or (), o.token_ids, strict=True)])
            for o in output.outputs]


def params(i: int) -> SamplingParams:
    return SamplingParams(temperature=(0, 0.8)[i % 2], seed=i, n=1 + i % 2 * (i % 3), max_tokens=12, ignore_eos=True,
                          logprobs=0, replay=("off", 32, "exact")[i % 3], repetition_penalty=(1.0, 1.2)[i % 2])


def test_answers_in_a_batch_are_bit_equal_to_those_alone(llm: LLM) -> None:
    prompts = [ids(i, length) for i, length in enumerate((1, 2, 33, 150, 7, 64, 129, 257))]
    each = [params(i) for i in range(len(prompts))]
    alone = [told(llm.generate([p], q, progress=False)[0]) for p, q in zip(prompts, each, strict=True)]
    assert [told(o) for o in llm.generate(prompts, each, progress=False)] == alone
    assert [told(o) for o in llm.generate(prompts[::-1], each[::-1], progress=False)] == alone[::-1]


@pytest.mark.parametrize(("spill", "how"), [(1 << 30, "spilled"), (0, "restarted")])
def test_a_preempted_answer_is_bit_equal_to_an_undisturbed_one(llm: LLM, spill: int, how: str) -> None:
    prompts, each = [ids(i, 250 + i) for i in range(6)], [params(i) for i in range(6)]
    p = [SamplingParams(**{f: getattr(q, f) for f in ("temperature", "seed", "replay", "repetition_penalty")},
                        max_tokens=140, ignore_eos=True, logprobs=0) for q in each]
    undisturbed = [told(o) for o in llm.generate(prompts, p, progress=False)]
    with start(num_blocks=8, spill_bytes=spill) as small:
        assert [told(o) for o in small.generate(prompts, p, progress=False)] == undisturbed
        assert getattr(small.metrics, how).value > 0


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_change_no_bit(llm: LLM, threads: int) -> None:
    prompt = ids(3, 20)
    with llm.session() as one, start(threads=threads) as other, other.session() as two:
        assert np.array_equal(one.feed(prompt), two.feed(prompt))


def test_decoding_equals_prefilling_at_every_length(llm: LLM) -> None:
    prompt = ids(4, max(LENGTHS))
    with llm.session() as one, llm.session() as whole:
        rows = whole.feed(prompt)
        assert np.array_equal(np.concatenate([one.feed([i]) for i in prompt]), rows)
    for length in LENGTHS:
        with llm.session() as s:
            assert np.array_equal(s.feed(prompt[:length]), rows[:length])


@pytest.mark.parametrize("replay", ["off", 32, "exact"])
@pytest.mark.parametrize("chunk", [1, 7, 16, 64, 128, [31, 2, 64]])
def test_chunking_changes_no_bit(llm: LLM, chunk: Any, replay: Any) -> None:
    prompt = ids(5, 150)
    with llm.session(replay) as one, llm.session(replay) as other:
        assert np.array_equal(one.feed(prompt), other.feed(prompt, chunk=chunk))
        assert np.array_equal(one.draft(9).logits, other.draft(9).logits)


def test_random_histories_end_where_plain_ones_do(llm: LLM) -> None:
    """Feeds, verifies with rejected drafts, drafts and forks on three sequences at a time; then every sequence is fed
    again in one piece."""
    rng = random.Random(1)
    sessions: list[Session] = []
    for _ in range(120):
        if len(sessions) < 1 or (len(sessions) < 3 and rng.random() < 0.1):
            sessions.append(llm.session())
        s = rng.choice(sessions)
        what = rng.random()
        if what < 0.5 or len(s) == 0:
            s.feed(ids(rng.randrange(10**6), rng.choice((1, 1, 2, 5, 40))), chunk=rng.choice((None, 3, 17)))
        elif what < 0.7:
            s.feed(ids(rng.randrange(10**6), 6))
            s.rewind(len(s) - rng.randrange(6))
        elif what < 0.8:
            s.draft(rng.randrange(VOCABULARY))
        elif what < 0.9 and len(sessions) < 4:
            sessions.append(s.fork())
        if len(s) > 500 or what > 0.97:
            sessions.remove(s)
            check_plain(llm, s)
    for s in sessions:
        check_plain(llm, s)
    llm.core.memory.check()


def check_plain(llm: LLM, s: Session) -> None:
    history = s.token_ids
    row, draft = s.feed([7])[-1], s.draft(9)
    s.close()
    with llm.session() as plain:
        assert np.array_equal(plain.feed([*history, 7])[-1], row)
        assert np.array_equal(plain.draft(9).logits, draft.logits)
        assert np.array_equal(plain.draft(9).confidence, draft.confidence)
