"""The runner for NVIDIA devices on a driver without a device: what it launches, with which values, and how it fails."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compiled import checkpoint_of
from cuda import fake
from cuda.stub_binaries import stub_engine
from golden.cases import load_case

from deepinfer import LLM, SamplingParams
from deepinfer.backends.cuda_sm100.driver import blocks_of, variant_for
from deepinfer.codegen.compile import Compiled
from deepinfer.dsl import EngineOptions
from deepinfer.errors import PlanError, ToolchainError

CASE = "v41_c_quant"
ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.usefixtures("fake_device")


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """An engine with every kind of kernel, state and entry; its kernels are launched and do nothing."""
    options = EngineOptions(**(load_case(CASE).formats | {"max_num_seqs": 4, "max_num_batched_tokens": 96,
                                                          "max_model_len": 512}))
    return stub_engine(tmp_path_factory.mktemp("quantised"), checkpoint_of(CASE), options=options)


def started(done: Compiled, name: str = CASE, **how: Any) -> LLM:
    return LLM(done.folder, checkpoint_of(name), progress=False, num_speculative_tokens=0, schedule_drafts=False,
               prefix_cache=False, **how)


# ---- what is launched -----------------------------------------------------------------------------------------------
class Book:
    """Launches of an engine against its tables."""

    def __init__(self, done: Compiled) -> None:
        self.table = json.loads((done.folder / "lib" / "kernels.json").read_text())["kernels"]
        self.by_function: dict[str, list[tuple[str, int, dict[str, Any]]]] = {}
        for symbol, kernel in self.table.items():
            for v in kernel["variants"]:
                for stage in v["stages"]:
                    self.by_function.setdefault(stage["function"], []).append((symbol, v["rows"], stage))

    def check(self, launch: fake.Launch) -> str:
        """The kernel's symbol; every parameter has the size, and every address the memory, that its kernel expects."""
        found = self.by_function[launch.function.decode()]
        symbol = found[0][0]
        parameters = self.table[symbol]["parameters"]
        sizes = [8 if kind[0] == "*" or kind == "i64" else 4 for _, kind, _ in parameters]
        assert launch.sizes == [*sizes, 8, 8], symbol
        values = launch.numbers()
        assert values[-2:] == [0, 0]
        named = {tuple(where): n for (_, _, where), n in zip(parameters, values[:-2], strict=True)}
        rows = named["launch", "row_stop"] - named["launch", "row_first"]
        assert rows > 0
        stages = variant_for(self.table[symbol], rows)["stages"]
        assert any(launch.blocks == blocks_of(s["grid"], rows) and launch.threads == 32 * s["warps"]
                   and launch.shared == s["shared"] and s["function"] == launch.function.decode() for s in stages)
        for (name, kind, where), value in zip(parameters, values[:-2], strict=True):
            if kind[0] == "*":
                assert value % 16 == 0, (symbol, name)
                assert fake.library().fake_inside(value, 16), (symbol, name)
            elif where[-1] == "stride":
                assert value > 0 and value % 16 == 0, (symbol, name)
        return str(symbol)


@pytest.fixture
def llm(quantised: Compiled) -> Iterator[LLM]:
    made = started(quantised)
    yield made
    made.close()


def test_every_launch_has_the_parameters_of_its_kernel(quantised: Compiled, llm: LLM) -> None:
    book, seen = Book(quantised), set()
    ids = load_case(CASE).ids
    with llm.session() as s:
        s.feed(ids[:70])
        s.feed(ids[70:71])
        s.draft(7)
    llm.generate([ids[:3]], SamplingParams(max_tokens=1), progress=False)
    for launch in fake.launches():
        seen.add(book.check(launch))
    assert seen >= {k.symbol for k in quantised.plan.lowered.table.kernels} | {"di_commit"}


def test_values_lie_inside_the_arena_for_all_their_rows(quantised: Compiled, llm: LLM) -> None:
    book = Book(quantised)
    widths = {k: [s.operands for s in quantised.plan.lowered.specs if s.symbol == k] for k in book.table}
    backend_sizes = {"*bf16": 2, "*f32": 4, "*i64": 8, "*i32": 4, "*u8": 1}
    with llm.session() as s:
        s.feed(load_case(CASE).ids[:70])
    checked = 0
    for launch in fake.launches():
        symbol = book.by_function[launch.function.decode()][0][0]
        if not widths[symbol]:
            continue
        operands, values = widths[symbol][0], launch.numbers()
        rows = values[1] - values[0]
        for (_, kind, where), value in zip(book.table[symbol]["parameters"], values[:-2], strict=True):
            if where[0] == "value" and operands[where[1]].rows == "T":
                size = operands[where[1]].size // int(operands[where[1]].get("by_sequence", 1)) * backend_sizes[kind]
                assert fake.library().fake_inside(value + size * values[0], size * rows), (symbol, where)
                checked += 1
    assert checked > 100


def test_a_decode_is_one_recording_and_waits_once(llm: LLM) -> None:
    ids = load_case(CASE).ids
    with llm.session() as s:
        s.feed(ids[:70])
        before = {name: fake.calls(name) for name in ("cuGraphLaunch", "cuStreamSynchronize", "cuMemAlloc_v2",
                                                      "cuMemHostAlloc", "cuGraphInstantiateWithFlags")}
        for i in ids[70:75]:
            s.feed([i])
        after = {name: fake.calls(name) - n for name, n in before.items()}
    assert after == {"cuGraphLaunch": 5, "cuStreamSynchronize": 5, "cuMemAlloc_v2": 0, "cuMemHostAlloc": 0,
                     "cuGraphInstantiateWithFlags": 0}


@pytest.mark.parametrize("rows", [96, 95, 48, 41])
def test_a_chunk_of_a_prompt_is_one_recording(llm: LLM, rows: int) -> None:
    names = "cuGraphLaunch", "cuLaunchKernel", "cuStreamSynchronize"
    with llm.session() as s:
        before = [fake.calls(name) for name in names]
        s.feed(load_case(CASE).ids[:rows])
        assert [fake.calls(name) - n for name, n in zip(names, before, strict=True)] == [1, 0, 1]


def test_memory_is_what_the_plan_says(quantised: Compiled) -> None:
    before = int(fake.library().fake_taken())
    with started(quantised) as llm:
        engine = llm.core.engine
        weights = sum(d + s for tensors in _sizes(quantised) for d, s in tensors)
        taken = int(fake.library().fake_taken()) - before
        assert engine.memory.on_device + weights <= taken <= 1.02 * (engine.memory.on_device + weights) + (1 << 16)


def _sizes(done: Compiled) -> Iterator[list[tuple[int, int]]]:
    from deepinfer.codegen.package import load_engine
    from deepinfer.runtime.checkpoint.bind import bind_weights

    package = load_engine(done.folder)
    return bind_weights(package.checkpoint(checkpoint_of(CASE)), package.interface.params, package.manifest["model"],
                        progress=False, depth="off").sizes()


def test_an_engine_of_the_first_layers_runs_a_whole_checkpoint_and_says_so(
        tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = EngineOptions(layers=3, max_num_batched_tokens=64, max_model_len=256, **load_case(CASE).formats)
    with started(stub_engine(tmp_path, checkpoint_of(CASE), options=options)) as llm:
        assert "reduced_depth engine=engine layers=3" in caplog.text
        with llm.session() as s:
            assert s.feed([5, 6, 7]).shape == (3, llm.plan.vocab_size)


# ---- states ---------------------------------------------------------------------------------------------------------
def test_states_of_a_device_are_read_and_written_as_views_are(llm: LLM) -> None:
    state = next(s for s in llm.plan.states if s.kind == "paged")
    here, there = (llm.core.engine.state(state.name, i) for i in (0, 1))
    values = np.arange(len(here), dtype=np.int64).astype(np.uint8)
    here[:] = values
    there[:] = here
    there[3:7] = 9
    expected = values.copy()
    expected[3:7] = 9
    assert np.array_equal(here.copy(), values) and np.array_equal(np.array(there), expected)
    rows = here.reshape(state.rows, state.record_bytes)
    rows[1] = 5
    assert set(here[state.record_bytes: 2 * state.record_bytes].tolist()) == {5}


# ---- how it fails ---------------------------------------------------------------------------------------------------
def test_a_machine_without_a_driver_is_one_sentence(quantised: Compiled) -> None:
    lines = ("import ctypes, sys", "from pathlib import Path", "from deepinfer.runtime.native_engine import Runner",
             "try:", "    ctypes.CDLL('libcuda.so.1')", "except OSError:", "    try:",
             "        Runner(Path(sys.argv[1]))", "    except Exception as e:", "        print(type(e).__name__, e)",
             "else:", "    print('a driver')")
    done = subprocess.run([sys.executable, "-c", "\n".join(lines), str(quantised.folder / "lib")], cwd=ROOT,
                          capture_output=True, text=True)
    if done.stdout == "a driver\n":
        pytest.skip("this machine has a driver")
    assert done.stdout.startswith("ToolchainError no NVIDIA driver (libcuda.so.1) is installed here"), done.stderr


@pytest.mark.parametrize(("shown", "sentence"), [
    ({"version": 11080}, r"driver is too old: it is for CUDA 11.8, engines for sm_90a need a driver for CUDA 12.0"),
    ({"capability": (8, 0)}, r"kernels are for sm_90a, the device here is a Fake H200 of sm_80a"),
    ({"devices": 0}, r"the NVIDIA driver shows no device")])
def test_a_machine_that_does_not_fit_is_one_sentence(quantised: Compiled, shown: dict[str, Any], sentence: str) -> None:
    with fake.machine(**shown), pytest.raises(ToolchainError, match=sentence):
        started(quantised)


def test_a_device_that_is_too_small_is_refused_before_memory_is_taken(quantised: Compiled) -> None:
    before = fake.calls("cuMemAlloc_v2")
    with fake.machine(total=4 << 20), pytest.raises(
            PlanError, match=r"Fake H200: the engine does not fit into the memory of the device; found .* of weights, "
                             r".* for values and caches; allowed 4.2 MB free"):
        started(quantised)
    assert fake.calls("cuMemAlloc_v2") == before


@pytest.mark.parametrize(("function", "sentence"), [
    ("cuGraphLaunch", "failed while launching a step: CUDA_ERROR_ILLEGAL_ADDRESS"),
    ("cuStreamSynchronize", "failed while running a step: CUDA_ERROR_ILLEGAL_ADDRESS")])
def test_a_device_that_fails_in_a_step_is_one_sentence(llm: LLM, function: str, sentence: str) -> None:
    with llm.session() as s:
        s.feed(load_case(CASE).ids[:3])
        with fake.failing(function, 700), pytest.raises(ToolchainError, match=sentence):
            s.feed([5])


def test_a_refused_binary_names_its_kernel(quantised: Compiled) -> None:
    with fake.failing("cuModuleLoadData", 200), pytest.raises(ToolchainError, match="while loading the kernel di_"):
        started(quantised)


def test_blocks_of_a_device_go_to_a_store_and_come_back(quantised: Compiled, tmp_path: Path) -> None:
    """Kernels that do nothing leave what was written into a block before."""
    prompt, marks = load_case(CASE).ids[:300], {}
    for turn in range(2):
        with LLM(quantised.folder, checkpoint_of(CASE), progress=False, num_speculative_tokens=0, schedule_drafts=False,
                 prefix_store=tmp_path / "store") as llm:
            states = [s for s in llm.plan.states if s.kind == "paged"]
            if not turn:
                for s in states:
                    for block in range(llm.core.memory.blocks.size):
                        llm.core.engine.state(s.name, block)[:] = (block + 3) % 250
            params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
            assert len(llm.generate([prompt], params, progress=False)[0].outputs[0].token_ids) == 2
            marks[turn] = {(s.name, int(v)) for s in states for b in range(llm.core.memory.blocks.size)
                           for v in np.unique(np.array(llm.core.engine.state(s.name, b))) if v}
    assert marks[1] and marks[1] <= marks[0]
