"""`deepinfer drift`: what is compared with what, and the multiplications that are counted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from compiled import checkpoint_of, engine_of

from deepinfer.cli import main as command
from deepinfer.cli.drift import Work, savings
from deepinfer.errors import PlanError, RequestError
from deepinfer.runtime.llm import LLM
from deepinfer.runtime.replay_drift import SCORED, check_plan, measure, turn_ends

CASE = "v41_a_f32"
LIMITS = {"profile": "wide", "max_num_seqs": 6, "max_num_batched_tokens": 64, "max_model_len": 640}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(engine_of(CASE, **LIMITS), checkpoint_of(CASE), threads=1, progress=False, prefix_cache=False) as running:
        yield running


def test_turns_are_compared_with_a_run_of_all_rows(llm: LLM) -> None:
    ids = np.random.default_rng(3).integers(3, 330, 500).tolist()
    drift = measure(llm, ids, 4)
    assert drift.keep == llm.plan.least_keep and drift.ends == (123, 246, 369, 492)
    assert drift.hits == (0, 0, 128, 256)  # blocks of 128
    kl = {name: np.array(way.kl) for name, way in drift.ways.items()}
    assert all(values.shape == (4, SCORED) and (values > -1e-9).all() for values in kl.values())
    for turn in (0, 1):  # no hit: the three ways are one
        assert kl["decoder"][turn].tolist() == kl["replay"][turn].tolist() == kl["again"][turn].tolist()
    assert kl["replay"][2].tolist() == kl["again"][2].tolist()  # the first hit lies on exact entries in both
    assert kl["replay"][3].tolist() != kl["again"][3].tolist()
    assert not np.array_equal(kl["decoder"][2], kl["replay"][2])
    assert kl["window"].mean() > kl["again"].mean()


def test_keeping_the_exact_halo_moves_nothing_but_behind_hits(llm: LLM) -> None:
    ids = np.random.default_rng(4).integers(3, 330, 400).tolist()
    drift = measure(llm, ids, 2, keep=llm.plan.exact_keep + SCORED)
    assert np.abs(drift.ways["decoder"].kl).max() < 1e-9
    assert not np.array(drift.ways["decoder"].changed).any()


def test_operations_are_those_of_the_narrowed_graph(llm: LLM) -> None:
    work = Work.of(engine_of(CASE, **LIMITS), checkpoint_of(CASE))
    assert min(work.step, work.kept, work.wanted) > 0
    saved = savings(work, 32, 32, (300, 600), (0, 256))
    full = sum(n * (work.step + work.kept) + work.wanted for n in (300, 600))
    spent = 300 * work.step + 32 * work.kept + work.wanted + (600 - 256 + 32) * work.step + 32 * work.kept + work.wanted
    assert saved["replay"] == pytest.approx(1 - spent / full)
    assert saved["decoder"] < saved["replay"] < saved["windows"] < 1


def test_what_cannot_be_measured_is_said_in_a_sentence(llm: LLM) -> None:
    plan = llm.plan
    with pytest.raises(RequestError, match="the text is too short for so many turns; found 100 tokens for 33 turns"):
        turn_ends(plan, 100, 33)
    with pytest.raises(RequestError, match="was not trained for bounded replay"):
        check_plan(replace(plan, least_keep=plan.exact_keep), 500)
    with pytest.raises(RequestError, match="replay keeps too few rows"):
        check_plan(plan, 3)
    with pytest.raises(PlanError, match="three sequences"):
        check_plan(replace(plan, max_num_seqs=2), plan.least_keep)


def test_a_text_that_is_not_utf8_is_a_sentence_that_names_the_byte(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes("Zürich".encode("latin-1"))
    done = CliRunner().invoke(command, ["drift", str(tmp_path), "--text", str(tmp_path / "latin.txt")])
    assert done.exit_code == 5 and "latin.txt: the text cannot be read" in done.output
    assert "0xfc in position 1" in done.output and len(done.output.splitlines()) == 1


def test_the_command_prints_tables_or_one_json_object() -> None:
    arguments = ["drift", str(engine_of(CASE, **LIMITS)), "--checkpoint", str(checkpoint_of(CASE)), "--turns", "3",
                 "--max-model-len", "450", "--threads", "1"]
    found = CliRunner().invoke(command, [*arguments, "--json"])
    assert found.exit_code == 0, found.output
    told = json.loads(found.stdout)
    assert set(told["ways"]) == {"decoder", "replay", "again", "window"} and told["turns"] == 3
    text = CliRunner().invoke(command, arguments).stdout
    assert "replay upon replay" in text and "multiplications with weights that are not done" in text
