"""Engines that CANN compiled, from the compiler's first call to tokens, on a stand-in for CANN."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ascend.cann import VERSION, install
from compiled import checkpoint_of
from golden.cases import load_case
from golden.engines import LIMITS
from rich.console import Console

from deepinfer.backends.ascend950 import bisheng
from deepinfer.codegen.cache import Cache
from deepinfer.codegen.compile import compile_engine
from deepinfer.codegen.package import load_engine
from deepinfer.devices import ascend_device
from deepinfer.dsl.model import EngineOptions
from deepinfer.errors import ArtifactError

CASE, PROMPT, TOKENS = "v41_a_f32", 9, 3
RUN = f"""
import json, sys
from deepinfer import LLM, SamplingParams
llm = LLM(sys.argv[1], sys.argv[2], threads=1, progress=False)
params = SamplingParams(temperature=0, max_tokens={TOKENS}, ignore_eos=True)
print(json.dumps(llm.generate([json.loads(sys.argv[3])], params, progress=False)[0].outputs[0].token_ids))
"""


@pytest.fixture(scope="module")
def cann(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cann") / "toolkit"
    install(folder)
    return folder


@pytest.fixture(scope="module")
def engine(cann: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiled where CANN is."""
    folder = tmp_path_factory.mktemp("engines") / "compiled"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ASCEND_HOME_PATH", str(cann))
        options = EngineOptions(**(load_case(CASE).formats | LIMITS | {"profile": "wide"}))
        done = compile_engine(model=str(checkpoint_of(CASE)), out=folder, target="ascend950", options=options,
                              console=Console(file=io.StringIO()))
    assert done.for_device
    return folder


def run(engine: Path, prompt: list[int], **variables: str) -> subprocess.CompletedProcess[str]:
    """Generates in a process of its own, which finds the library of the runtime as any other does."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("DEEPINFER_A", "LD_"))}
    return subprocess.run([sys.executable, "-c", RUN, str(engine), str(checkpoint_of(CASE)), json.dumps(prompt)],
                          env=kept | variables, capture_output=True, text=True, check=False)


def test_a_compiled_engine_says_so_and_every_kernel_had_the_pinned_flags(engine: Path, cann: Path,
                                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_HOME_PATH", str(cann))
    manifest = json.loads((engine / "manifest.json").read_text())
    assert manifest["compiled"] is True and manifest["compilers"]["bisheng"] == VERSION
    tools = bisheng.find()
    assert tools is not None
    for kernel in manifest["kernels"]:
        made = bisheng._object(tools, kernel["symbol"], (engine / kernel["source"]).read_text(), Cache()).read_text()
        assert set(bisheng.FLAGS) <= set(made.split("\n", 1)[0].split())
    assert "distinct kernels compiled" in (engine / "report.html").read_text(encoding="utf-8").replace("<span>", "")


def test_a_compiled_engine_generates_on_the_device_that_the_runtime_shows(engine: Path, cann: Path) -> None:
    prompt = list(load_case(CASE).ids[:PROMPT])
    done = run(engine, prompt, LD_LIBRARY_PATH=str(cann / "lib64"))
    assert not done.returncode, done.stderr
    reference, wanted = load_case(CASE).session(torch.float64, profile="wide"), list[int]()
    row = reference.feed(prompt)[-1]
    for _ in range(TOKENS):
        wanted.append(int(row.argmax()))
        row = reference.feed(wanted[-1:])[-1]
    assert json.loads(done.stdout) == wanted


def test_without_a_runtime_a_compiled_engine_is_refused_in_one_sentence(engine: Path,
                                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DEEPINFER_ASCEND_TWIN", raising=False)
    ascend_device.cache_clear()
    with pytest.raises(ArtifactError, match=r"for another target than this machine.*found an engine for ascend950"):
        load_engine(engine)
    ascend_device.cache_clear()
    done = run(engine, [1], DEEPINFER_ACCELERATOR="ascend")
    assert done.returncode and "no Ascend runtime (libascendcl.so) is installed here" in done.stderr.splitlines()[-1]


def test_the_twin_does_not_run_what_was_compiled_for_a_device(engine: Path) -> None:
    done = run(engine, [1], DEEPINFER_ASCEND_TWIN="1")
    assert done.returncode and "were compiled for a device, the CPU twin runs their sources" in done.stderr
