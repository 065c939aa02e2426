"""A model that only a test describes goes through compiler, backend and runtime as it is."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from golden.test_dense_gqa import ROWS as TWIN_ROWS
from golden.test_dense_gqa import SHAPES, TOLERANCE, config, random_weights, twin
from rich.console import Console
from safetensors.torch import save_file
from specs import dense_gqa
from torch import Tensor

from deepinfer import LLM, SamplingParams
from deepinfer.backends.base import HOST
from deepinfer.codegen.compile import compile_engine
from deepinfer.dsl import Config, EngineOptions, trace
from deepinfer.dsl.model import expected_tensors
from deepinfer.model_specs.registry import build_model

OPTIONS = {"cache_format": "f32", "act_format": "f32", "max_num_seqs": 4, "max_num_batched_tokens": 64,
           "max_model_len": 256}
ROWS = 150
CLOSE = TOLERANCE * ROWS / TWIN_ROWS  # it grows with the angles
IDS = torch.randint(0, 90, (ROWS,), generator=torch.Generator().manual_seed(5))


class Dense:
    """A checkpoint in a folder, its weights, and its engine in a profile."""

    def __init__(self, folder: Path, shape: str, profile: str) -> None:
        self.config = config(shape)
        options = EngineOptions(profile=profile, **OPTIONS)
        model = trace(build_model(Config(self.config), options, spec=dense_gqa)).model
        self.weights = random_weights(expected_tensors(model))
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(self.config))
        save_file(self.weights, folder / "model.safetensors")
        compile_engine(model=str(folder), out=folder / "engine", target="cpu", options=options, isa=HOST,
                       spec="specs.dense_gqa", console=Console(file=io.StringIO()))
        self.llm = LLM(folder / "engine", folder, threads=1, progress=False)

    def twin(self, ids: Tensor) -> np.ndarray:
        return twin(self.config, self.weights, ids).numpy()


@pytest.fixture(scope="module", params=SHAPES)
def dense(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dense]:
    made = Dense(tmp_path_factory.mktemp("dense") / "checkpoint", request.param, "wide")
    yield made
    made.llm.close()


@pytest.mark.parametrize("chunk", [None, 1, 7, [3, 16, 2]])
def test_a_compiled_dense_model_equals_its_torch_twin(dense: Dense, chunk: int | list[int] | None) -> None:
    with dense.llm.session() as s:
        assert np.abs(s.feed(IDS.tolist(), chunk=chunk) - dense.twin(IDS)).max() < CLOSE
    with dense.llm.session() as one, dense.llm.session() as other:
        assert np.array_equal(one.feed(IDS.tolist()), other.feed(IDS.tolist(), chunk=chunk))


def test_a_batch_of_dense_prompts_is_continued_as_the_twin_would(dense: Dense) -> None:
    prompts = [IDS[:n].tolist() for n in (1, 17, 64, 130)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    for prompt, output in zip(prompts, dense.llm.generate(prompts, params, progress=False), strict=True):
        found = output.outputs[0].token_ids
        logits = dense.twin(torch.tensor([*prompt, *found]))[len(prompt) - 1: -1]
        # Where two tokens lie closer than the tolerance either is right.
        assert (logits.max(-1) - logits[np.arange(len(found)), found]).max() < 2 * CLOSE


def test_dense_prefixes_are_shared_and_taken_back(dense: Dense) -> None:
    ids = IDS.tolist()
    with dense.llm.session() as s:
        expected = s.feed(ids)
        with s.fork() as other:
            other.rewind(140)
            assert np.array_equal(other.feed(ids[140:]), expected[140:])
            other.adopt(128)
            assert np.array_equal(other.feed(ids[128:]), expected[128:])


def test_a_dense_model_in_bf16_stays_near_its_twin(tmp_path: Path) -> None:
    dense = Dense(tmp_path / "checkpoint", "grouped", "bf16")
    with dense.llm, dense.llm.session() as s:
        found = s.feed(IDS.tolist())
    expected = dense.twin(IDS)
    # About twenty roundings of 2^-9 on the way to logits of size 10, in squares.
    assert np.median(np.abs(found - expected).max(-1)) < 2**-9 * 10 * 20**0.5
    assert (found.argmax(-1) == expected.argmax(-1)).mean() > 0.9
