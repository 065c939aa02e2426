"""Whole engines on the GPU of this machine: the golden tests of compiled engines, on engines for its target.

    python tests/cuda/device_engines.py RESULT.json ENGINES [-k EXPRESSION]

ENGINES: folder for the engines. Those that are there are used as they are, so that they can be compiled on a machine
without a GPU; the others are compiled first, side by side. What has a meaning on a CPU only (instruction sets, numbers
of threads) is left out.
"""

from __future__ import annotations

import io
import json
import os
import platform
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ["DEEPINFER_ACCELERATOR"] = "nvidia"
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import compiled
import pytest
from golden.cases import V4, V41, load_case
from rich.console import Console

from deepinfer.accelerator import resolve_target
from deepinfer.backends.cuda_sm100 import toolchain
from deepinfer.backends.cuda_sm100.source import Stage
from deepinfer.codegen.compile import compile_engine
from deepinfer.dsl.model import EngineOptions
from deepinfer.runtime.native_engine import Runner

TESTS = Path(__file__).resolve().parents[1]
LIMITS = {"max_num_seqs": 8, "max_num_batched_tokens": 768, "max_model_len": 768}
FILES = ("test_engine_v41.py", "test_engine_v4.py", "test_engine_bf16.py", "test_engine_rows.py")
_WORKERS, _JOBS = 6, 4
Key = tuple[str, int | None, tuple[tuple[str, Any], ...]]


def key(name: str, workspace: int | None = None, **options: Any) -> Key:
    return name, workspace, tuple(sorted((load_case(name).formats | LIMITS | options).items()))


def engines() -> list[Key]:
    """What the golden tests ask for."""
    out = [key(name, profile="wide") for name in (*V41, *V4, "v4_mtp")]
    out += [key(name, profile="bf16") for name in (*V41, *V4)]
    out.append(key("v41_c_quant", profile="wide", wo_a_input="production"))
    out += [key("v4_case_d", profile="wide", cache_format="spec", act_format=f) for f in ("f32", "spec")]
    out += [key(name, 1, profile=p) for name, p in (("v41_a_f32", "wide"), ("v41_c_quant", "bf16"),
                                                    ("v4_case_d", "bf16"))]
    return out


def folder_of(root: Path, k: Key) -> Path:
    name, workspace, options = k
    other = {o: v for o, v in options if o not in LIMITS and o != "profile" and load_case(name).formats.get(o) != v}
    parts = [name, str(dict(options)["profile"]), *(f"{o}_{v}" for o, v in sorted(other.items()))]
    return root / "_".join([*parts, *(["tiles"] if workspace is not None else [])])


def tolerate_spills() -> list[str]:
    """Golden shapes are for what is right: kernels that keep registers in memory are listed, not refused."""
    found: list[str] = []
    strict = toolchain.Toolchain._check

    def check(self: toolchain.Toolchain, stage: Stage, made: dict[str, Any]) -> None:
        if stage.hot and made["spills"]:
            found.append(f"{stage.function}: {made['spills']} bytes")
        strict(self, replace(stage, hot=False), made)

    toolchain.Toolchain._check = check  # type: ignore[method-assign]
    return found


def make(root: Path, k: Key, target: str) -> tuple[str, float, list[str]]:
    """Compiles an engine that is not there; its folder's name, the seconds, and kernels that spill."""
    folder, start, spilling = folder_of(root, k), time.monotonic(), tolerate_spills()
    if not folder.is_dir():
        compile_engine(model=str(compiled.checkpoint_of(k[0])), out=folder, target=target, workspace_bytes=k[1],
                       options=EngineOptions(**dict(k[2])), jobs=_JOBS, console=Console(file=io.StringIO()))
    return folder.name, time.monotonic() - start, spilling


class Results:
    """Outcomes by test, the last line of what failed."""

    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}
        self.failures: dict[str, str] = {}
        self.seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.rsplit("/", 1)[-1]
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[name] = report.outcome
            self.seconds[name] = round(report.duration, 2)
        if report.failed:
            self.failures[name] = " | ".join(report.longreprtext.strip().splitlines()[-12:])[-1500:]


def main(out: str, root: str, *arguments: str) -> int:
    target, start = resolve_target().target, time.monotonic()
    place = Path(root).absolute()
    place.mkdir(parents=True, exist_ok=True)
    broken: dict[str, str] = {}
    made: dict[str, float] = {}
    spilling: set[str] = set()
    wanted = engines()
    for name in {k[0] for k in wanted}:
        compiled.checkpoint_of(name)  # before there are several processes
    with ProcessPoolExecutor(_WORKERS) as pool:
        for k, found in [(k, pool.submit(make, place, k, target)) for k in wanted]:
            try:
                name, seconds, spills = found.result()
                made[name] = round(seconds, 1)
                spilling.update(spills)
            except Exception as error:
                broken[folder_of(place, k).name] = f"{type(error).__name__}: {error}"[-600:]
    compiling = time.monotonic() - start
    print(f"{len(made)} engines in {compiling:.0f} s; broken: {broken}", flush=True)

    def ready(name: str, isa: str = "", workspace_bytes: int | None = None, **options: Any) -> Path:
        folder = folder_of(place, (name, workspace_bytes, tuple(sorted((load_case(name).formats | options).items()))))
        if not folder.is_dir():
            raise AssertionError(f"no engine {folder.name}: {broken.get(folder.name, 'not compiled')}")
        return folder

    compiled.engine_of = ready
    results = Results()
    files = [str(TESTS / "golden" / f) for f in FILES]
    code = pytest.main([*files, "-q", "-p", "no:cacheprovider", "--tb=short", "-k", "not threads_change", *arguments],
                       plugins=[results])
    device = None
    for k in wanted:
        if folder_of(place, k).is_dir():
            device = Runner(folder_of(place, k) / "lib").device()
            break
    import triton

    summary = {"device": getattr(device, "name", None), "target": target, "triton": triton.__version__,
               "python": platform.python_version(), "counts": dict(Counter(results.outcomes.values())),
               "engines": made, "broken": broken, "spilling": sorted(spilling), "compile_seconds": round(compiling, 1),
               "seconds": round(time.monotonic() - start, 1), "outcomes": results.outcomes,
               "failures": results.failures, "slowest": dict(sorted(results.seconds.items(), key=lambda x: -x[1])[:15])}
    Path(out).write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    print(summary["counts"], f"{summary['seconds']} s")
    return int(code)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
