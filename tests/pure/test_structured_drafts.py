"""Forms, penalties and bans in a loop with drafts: every row sees the drafts before it, in both loops.

The draft head proposes what the model would say if nothing were asked of it, so that its drafts are right where
nothing forbids them and break form, bans and penalties elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from server.scripted_engine import VOCABULARY, ScriptedPackage
from server.soak import write_checkpoint

from deepinfer.recipe import RecipeTokenizer
from deepinfer.runtime.batch import Batch
from deepinfer.runtime.llm import LLM
from deepinfer.runtime.plan import StatePlan
from deepinfer.runtime.sampling_params import SamplingParams

M, END, THINK_END = 5, 1, "</think>"
NOISE = np.random.default_rng(8).standard_normal(VOCABULARY).astype(np.float32)
SOME: dict[str, Any] = {"type": "object", "required": ["id", "tags"], "additionalProperties": False,
                        "properties": {"id": {"enum": [12, 34, 56]},
                                       "tags": {"type": "array", "maxItems": 3, "items": {"enum": ["red", "blue"]}}}}


class DraftingEngine:
    """Logits are a function of position and last id; some tokens are dear to it."""

    checkpoint: Path | None = None
    likes: tuple[int, ...] = ()

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint

    def logits(self, position: int, last: int) -> NDArray[np.float32]:
        seed = position * 7919 + last * 104_729
        out = np.roll(NOISE, seed % VOCABULARY)
        for place, token in enumerate(self.likes):
            out[token] += 14 + 2 * ((seed >> place) % 3)
        return out

    def run(self, entry: str, batch: Batch, pins: Any = None) -> dict[str, Any]:
        logits: list[NDArray[np.float32]] = []
        blocks: list[list[int]] = []
        stop = 0
        for s in batch.sequences[: batch.count]:
            c, rows = int(s["c"]), int(s["rows"])
            ids = batch.token_ids[stop : stop + rows].tolist()
            stop += rows
            if entry == "step":
                wanted = int(s["wanted"])
                logits += [self.logits(c + row + 1, ids[row]) for row in range(rows - wanted, rows)]
            else:
                block = [int(ids[0])]
                for j in range(M):
                    block.append(int(self.logits(c + 1 + j, block[-1]).argmax()))
                blocks.append(block[1:])
        if entry == "draft":
            return {"tokens": np.array(blocks, np.int64)}
        return {"logits": np.stack(logits) if logits else np.zeros((0, VOCABULARY), np.float32)}

    def state(self, name: str, unit: int) -> NDArray[np.uint8]:
        return np.zeros((64, 8), np.uint8)

    def close(self) -> None:
        pass


class DraftingPackage(ScriptedPackage):
    def __init__(self) -> None:
        super().__init__()
        states = (StatePlan("window", "ring", 8 + M + M + 1, 8, "T", reach=8), *self.plan.states[1:])
        self.plan = replace(self.plan, states=states, entries=("step", "draft"), draft_tokens=M, draft_filler=2,
                            host_lag=1, exact_keep=8)

    def start(self, checkpoint: Any, **_: Any) -> Any:
        return DraftingEngine(Path(checkpoint))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> Iterator[RecipeTokenizer]:
    found = RecipeTokenizer.from_file(checkpoint)
    likes = [*found.encode('{"id": 12, "tags": ["red", "blue"]} yes no'), found.special_id(THINK_END)]
    DraftingEngine.likes = tuple(dict.fromkeys(likes))
    yield found
    DraftingEngine.likes = ()


def requests(tokenizer: RecipeTokenizer) -> list[SamplingParams]:
    """Forms from the first token and behind a marker, penalties, bans, lower bounds, and somebody who wants nothing."""
    think_end = tokenizer.special_id(THINK_END)
    dear, behind = list(DraftingEngine.likes), {"start_after": [think_end]}
    common: dict[str, Any] = {"max_tokens": 24, "detokenize": False}
    return [
        SamplingParams(temperature=0, structured_outputs={"json": SOME}, **common),
        SamplingParams(temperature=0.7, seed=1, structured_outputs={"json": SOME, **behind}, **common),
        SamplingParams(temperature=0, structured_outputs={"regex": "(yes|no| )+", **behind}, **common),
        SamplingParams(temperature=0, repetition_penalty=1.6, presence_penalty=0.7, ignore_eos=True, **common),
        SamplingParams(temperature=1, seed=2, frequency_penalty=1.5, min_tokens=20, **common),
        SamplingParams(temperature=0, bad_words=["yes no", " tags"], ignore_eos=True, logit_bias={dear[2]: -4},
                       **common),
        SamplingParams(temperature=0, allowed_token_ids=[*dear, END], min_tokens=9, **common),
        SamplingParams(temperature=0, ignore_eos=True, **common),
    ]


def answers(checkpoint: Path, params: list[SamplingParams], **options: Any) -> tuple[list[list[int]], LLM]:
    with LLM(DraftingPackage(), checkpoint, seed=1, progress=False, schedule_drafts=False, prefix_cache=False,
             max_num_seqs=4, **options) as llm:
        prompts = [[10 + i, 20, 30] for i in range(len(params))]
        return [o.token_ids for o in llm.generate(prompts, params, progress=False)], llm


@pytest.fixture(scope="module")
def expected(checkpoint: Path, tokenizer: RecipeTokenizer) -> list[list[int]]:
    return answers(checkpoint, requests(tokenizer), loop="plain", num_speculative_tokens=0)[0]


def test_the_answers_keep_what_was_asked(expected: list[list[int]], tokenizer: RecipeTokenizer) -> None:
    assert json.loads(tokenizer.decode(expected[0])).keys() == {"id", "tags"}
    for place in (1, 2):
        assert tokenizer.special_id(THINK_END) in expected[place]
    assert "yes no" not in tokenizer.decode(expected[5]) and len(expected[4]) >= 20


@pytest.mark.parametrize(("loop", "drafts"), [("plain", 5), ("overlapped", 5), ("overlapped", 2)])
def test_drafts_change_no_answer_that_has_a_form_penalties_or_bans(
        checkpoint: Path, tokenizer: RecipeTokenizer, expected: list[list[int]], loop: str, drafts: int) -> None:
    found, llm = answers(checkpoint, requests(tokenizer), loop=loop, num_speculative_tokens=drafts)
    assert found == expected
    m = llm.metrics
    assert 0 < sum(m.accepted_tokens.values.values()) < sum(m.draft_tokens.values.values())
    assert bool(sum(m.held_up.values.values())) == (loop == "overlapped")


def test_only_rows_with_a_form_ever_wait_a_step(checkpoint: Path, tokenizer: RecipeTokenizer) -> None:
    _, llm = answers(checkpoint, requests(tokenizer)[3:], loop="overlapped")
    assert not sum(llm.metrics.held_up.values.values())


def test_a_draft_outside_the_form_is_rejected_for_a_legal_token(checkpoint: Path, tokenizer: RecipeTokenizer) -> None:
    """The model loves one token and always drafts it; the form forbids it except at one place."""
    loved = tokenizer.encode("yes")[0]
    likes, DraftingEngine.likes = DraftingEngine.likes, (loved,) * 8
    try:
        form = {"regex": "(no ){2}yes(no){3}"}
        for loop in ("plain", "overlapped"):
            found, llm = answers(checkpoint, [SamplingParams(temperature=0, structured_outputs=form, max_tokens=20,
                                                             detokenize=False)], loop=loop)
            assert tokenizer.decode(found[0]) == "no no yesnonono"
            assert sum(llm.metrics.draft_tokens.values.values()) > 0
    finally:
        DraftingEngine.likes = likes
