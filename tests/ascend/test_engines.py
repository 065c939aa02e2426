"""Whole engines on the CPU twin: prefill, chunks, decode, drafts and generation, through the runner and libascendcl."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from compiled import checkpoint_of, engine_of
from golden.cases import load_case, row_errors
from golden.engines import LIMITS, fed
from golden.gates import GATES
from rich.console import Console

from deepinfer import LLM, SamplingParams
from deepinfer.cli import profile
from deepinfer.codegen.compile import compile_engine
from deepinfer.codegen.package import load_engine
from deepinfer.devices import ascend_device
from deepinfer.dsl.model import EngineOptions
from deepinfer.errors import ArtifactError, DeepInferError, SpecError

CASE = "v41_a_f32"
ROWS = 28  # of the prompt: more than two blocks of selections, fewer than the window
GATE = GATES[CASE].largest


@pytest.fixture(scope="module")
def on_twin() -> Iterator[None]:
    """The user asked for the twin."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DEEPINFER_ASCEND_TWIN", "1")
        ascend_device.cache_clear()
        yield
    ascend_device.cache_clear()


@pytest.fixture(scope="module")
def engine() -> Path:
    return engine_of(CASE, target="ascend950", profile="wide", **LIMITS)


@pytest.fixture(scope="module")
def llm(engine: Path, on_twin: None) -> LLM:
    return LLM(engine, checkpoint_of(CASE), threads=1, progress=False)


@pytest.fixture(scope="module")
def ids() -> list[int]:
    return list(load_case(CASE).ids[:ROWS])


def test_an_engine_of_sources_is_refused_without_the_twin(engine: Path) -> None:
    manifest = json.loads((engine / "manifest.json").read_text())
    assert manifest["compiled"] is False
    report = (engine / "report.html").read_text(encoding="utf-8")
    assert "printed, not compiled for a device" in report
    for said in ("Cycles of their pipes", "<th>MTE2</th>", "bounded by", "950PR", "950DT"):
        assert said in report
    with pytest.raises(ArtifactError, match=r"sources only.*CPU twin.*set DEEPINFER_ASCEND_TWIN=1"):
        load_engine(engine)


def test_compiling_says_that_nothing_was_compiled_for_a_device(engine: Path, tmp_path: Path) -> None:
    said = Console(file=io.StringIO(), width=300)
    formats = load_case(CASE).formats | LIMITS | {"profile": "wide"}
    done = compile_engine(model=str(checkpoint_of(CASE)), out=tmp_path / "again", target="ascend950", console=said,
                          options=EngineOptions(**formats))
    assert not done.for_device and done.cache_misses == 0
    assert isinstance(said.file, io.StringIO)
    assert "not compiled for ascend950" in said.file.getvalue() and "DEEPINFER_ASCEND_TWIN=1" in said.file.getvalue()


def test_profile_refuses_an_engine_whose_launches_the_host_cannot_time(engine: Path) -> None:
    said = CliRunner().invoke(profile.main, [str(engine)])
    assert said.exit_code == SpecError.exit_code and "found an engine for ascend950" in said.output


def test_the_sources_of_an_engine_are_those_that_the_twin_ran(engine: Path) -> None:
    kernels = json.loads((engine / "manifest.json").read_text())["kernels"]
    listed = json.loads((engine / "lib" / "kernels.json").read_text())["kernels"]
    assert {k["symbol"] for k in kernels} == set(listed) - {"di_commit"}
    for k in kernels:
        text = (engine / k["source"]).read_text()
        assert all(f" void {s['function']}(" in text for s in listed[k["symbol"]]["variants"][0]["stages"])


def test_rows_are_those_of_the_interpreter_in_one_piece_and_bit_equal_in_chunks(llm: LLM, ids: list[int]) -> None:
    whole = fed(llm, ids)
    reference = load_case(CASE).session(torch.float64, profile="wide").feed(ids)
    assert float(row_errors(torch.from_numpy(whole), reference.float()).max()) < GATE
    assert np.array_equal(fed(llm, ids, chunk=[17, 1, 2, 8]), whole)


def test_decodes_and_drafts_are_those_of_the_interpreter(llm: LLM, ids: list[int]) -> None:
    reference = load_case(CASE).session(torch.float64, profile="wide")
    expected = reference.feed(ids)[-1]
    with llm.session() as s:
        row = s.feed(ids)[-1]
        for _ in range(2):
            token = int(row.argmax())
            assert token == int(expected.argmax())
            drafted = reference.draft(token).outputs["draft_logits"].float()
            assert float(row_errors(torch.from_numpy(s.draft(token).logits), drafted).max()) < GATE
            row, expected = s.feed([token])[-1], reference.feed([token])[-1]
            assert float(row_errors(torch.from_numpy(row[None]), expected[None].float()).max()) < GATE


def test_generation_with_drafts_gives_the_tokens_of_single_steps(llm: LLM, ids: list[int]) -> None:
    prompts = [ids[:9], ids[:20]]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    outputs = [o.outputs[0].token_ids for o in llm.generate(prompts, params, progress=False)]
    for prompt, found in zip(prompts, outputs, strict=True):
        rows = fed(llm, [*prompt, *found[:-1]])[len(prompt) - 1:]
        assert rows.argmax(-1).tolist() == list(found)


def test_sampled_tokens_are_those_of_the_cpu_engine(llm: LLM, ids: list[int]) -> None:
    options = [{"temperature": 0.9}, {"temperature": 0.7, "top_k": 9}, {"top_p": 0.8}, {"min_p": 0.05},
               {"temperature": 1.2, "top_k": 40, "top_p": 0.9}, {"logit_bias": {7: 3.0}}]
    params = [SamplingParams(max_tokens=3, ignore_eos=True, seed=n, **o) for n, o in enumerate(options)]
    prompts = [ids[: 5 + n] for n in range(len(options))]
    cpu = LLM(engine_of(CASE, profile="wide", target="cpu", **LIMITS), checkpoint_of(CASE), threads=1, progress=False)
    found, wanted = ([o.outputs[0].token_ids for o in engine.generate(prompts, params, progress=False)]
                     for engine in (llm, cpu))
    assert found == wanted


def test_an_engine_whose_binary_lacks_a_kernel_does_not_start(engine: Path, on_twin: None, tmp_path: Path) -> None:
    copy = tmp_path / "broken"
    shutil.copytree(engine, copy)
    table = json.loads((copy / "lib" / "kernels.json").read_text())
    symbol = next(s for s in table["kernels"] if s != "di_commit")
    table["kernels"][symbol]["variants"][0]["stages"][-1]["function"] += "_gone"
    (copy / "lib" / "kernels.json").write_text(json.dumps(table))
    with pytest.raises(DeepInferError, match=f"{symbol}|damaged"):
        LLM(copy, checkpoint_of(CASE), threads=1, progress=False)
