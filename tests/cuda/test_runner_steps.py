"""Steps of a whole engine for NVIDIA devices, on a driver without a device whose launches Triton's interpreter runs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from cuda import fake
from cuda.stub_binaries import stub_engine
from golden.test_dense_gqa import TOLERANCE, config, random_weights, twin
from safetensors.torch import save_file
from specs import dense_gqa

from deepinfer import LLM, SamplingParams
from deepinfer.codegen.compile import Compiled
from deepinfer.dsl import Config, EngineOptions, trace
from deepinfer.dsl.model import expected_tensors
from deepinfer.model_specs.registry import build_model

IDS = torch.randint(0, 90, (40,), generator=torch.Generator().manual_seed(5))
pytestmark = pytest.mark.usefixtures("fake_device")


@dataclass(frozen=True)
class Dense:
    """A small model whose kernels are run."""

    done: Compiled
    checkpoint: Path
    config: dict[str, object]
    weights: dict[str, torch.Tensor]

    @property
    def table(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.done.folder / "lib" / "kernels.json").read_text())
        return found

    def twin(self, ids: torch.Tensor) -> np.ndarray:
        return twin(self.config, self.weights, ids).numpy()


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Dense:
    folder, shape = tmp_path_factory.mktemp("dense"), config("grouped")
    options = EngineOptions(profile="wide", cache_format="f32", act_format="f32", max_num_seqs=4,
                            max_num_batched_tokens=64, max_model_len=256, host_lag=1)
    weights = random_weights(expected_tensors(trace(build_model(Config(shape), options, spec=dense_gqa)).model))
    (folder / "config.json").write_text(json.dumps(shape))
    save_file(weights, folder / "model.safetensors")
    return Dense(stub_engine(folder, folder, options=options, spec="specs.dense_gqa"), folder, shape, weights)


def tokens_are_drawn_on_the_device(llm: LLM, prompts: list[list[int]]) -> None:
    """The host waits once a step, for tokens alone; they are those that it draws itself where a request wants more."""
    names, answers = ("cuStreamSynchronize", "cuMemcpyDtoHAsync_v2"), []
    for more in ({}, {"logprobs": 2}, {"logit_bias": {0: 0.0}}):
        before = [fake.calls(name) for name in names]
        options = SamplingParams(temperature=1.2, top_p=0.9, top_k=40, seed=3, max_tokens=2, ignore_eos=True, **more)
        made = llm.generate(prompts, options, progress=False)
        answers.append([a.outputs[0].token_ids for a in made])
        waits, copies = (fake.calls(name) - n for name, n in zip(names, before, strict=True))
        rows = sum(map(len, answers[-1])) if more else 0
        assert (waits, copies) == (2 + rows, 2 + rows), more
    assert answers[0] == answers[1] == answers[2]


def test_an_engine_on_the_driver_gives_the_rows_of_its_torch_twin(dense: Dense) -> None:
    work = fake.Interpreted(dense.table, dense.done.plan.lowered.sources)
    with fake.running(work):
        llm = LLM(dense.done.folder, dense.checkpoint, progress=False, num_blocks=8, loop="plain")
        expected = dense.twin(IDS[:12])
        with llm.session() as s:
            found = np.concatenate([s.feed(IDS[:9].tolist()), s.feed(IDS[9:10].tolist()), s.feed(IDS[10:12].tolist())])
        assert not work.failed
        assert np.abs(found - expected).max() < TOLERANCE
        taken, graphs = fake.calls("cuMemAlloc_v2"), fake.calls("cuGraphInstantiateWithFlags")
        prompts = [IDS[:3].tolist(), IDS[5:9].tolist()]
        answers = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=2, ignore_eos=True), progress=False)
        for prompt, answer in zip(prompts, answers, strict=True):
            rows = dense.twin(torch.tensor([*prompt, *answer.outputs[0].token_ids]))[len(prompt) - 1: -1]
            assert rows.argmax(-1).tolist() == answer.outputs[0].token_ids
        tokens_are_drawn_on_the_device(llm, prompts)
        assert (taken, graphs) == (fake.calls("cuMemAlloc_v2"), fake.calls("cuGraphInstantiateWithFlags"))
        llm.close()
    assert fake.library().fake_taken() == 0


def test_steps_are_sent_while_one_runs_and_give_the_same_tokens(dense: Dense) -> None:
    """The host waits for the event of each step, after the next one was sent, and for nothing else."""
    work = fake.Interpreted(dense.table, dense.done.plan.lowered.sources)
    prompts, names = [IDS[:3].tolist(), IDS[5:9].tolist()], ("cuStreamSynchronize", "cuEventSynchronize")
    options = [SamplingParams(temperature=1.2, seed=3, max_tokens=n, ignore_eos=True) for n in (2, 4)]
    answers, waits = {}, []
    with fake.running(work), fake.late():
        for loop in ("plain", "overlapped"):
            with LLM(dense.done.folder, dense.checkpoint, progress=False, num_blocks=8, loop=loop) as llm:
                executor, begun = llm.core.loop.executor, [fake.calls(name) for name in names]
                submit = executor.submit

                def watched(step: Any, submit: Any = submit) -> int:
                    waits.append([fake.calls(name) for name in names])
                    return int(submit(step))

                with patch.object(executor, "submit", watched):
                    made = llm.generate(prompts, options, progress=False)
                answers[loop] = [a.outputs[0].token_ids for a in made]
                if loop == "overlapped":
                    assert [[n - m for n, m in zip(row, begun, strict=True)] for row in waits] == [
                        [0, max(0, i - 1)] for i in range(len(waits))]
                waits.clear()
    assert not work.failed
    assert answers["plain"] == answers["overlapped"]
