"""Triton ahead of time, without a GPU: every stage through the cache, then one file of cubins and their table.

Equal sources give equal bytes in any folder: line information is off, and nothing of the machine is in the text.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from deepinfer.backends.base import ALL, Binary, Source
from deepinfer.backends.cuda_sm100.families import fixed
from deepinfer.backends.cuda_sm100.source import CudaSource, Stage, Variant
from deepinfer.backends.cuda_sm100.target import ARCHS, Arch
from deepinfer.codegen.cache import Cache, Entry, file_digest
from deepinfer.errors import InternalError, ToolchainError

CUBINS, TABLE = "kernels.bin", "kernels.json"
FORMAT = 1
_ALIGNMENT = 256
_HERE = Path(__file__).resolve().parent
_TEXTS = ("device.py", "expand.py", "records.py", "worker.py")  # what a binary is made from besides its own text
_DRAWS = "draws.py"  # the same of draws alone
Made = tuple[tuple[Stage, ...], list[Entry]]  # the stages that were taken, compiled
_SETTINGS = {"TRITON_DISABLE_LINE_INFO": "1", "TRITON_DEFAULT_FP_FUSION": "0"}


@lru_cache(maxsize=1)
def triton_version() -> str:
    """Version of the Triton that is installed; ToolchainError without one."""
    try:
        return version("triton")
    except PackageNotFoundError:
        raise ToolchainError("Triton, which compiles kernels for NVIDIA devices, is not installed", where="triton",
                             found="no such package", next_step="pip install 'deepinfer-aot[cuda]', or "
                             "DEEPINFER_ACCELERATOR=nvidia ./build.sh") from None


class Worker:
    """A process that compiles stages, one after the other."""

    def __init__(self, cache: Path) -> None:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_")}
        environment |= _SETTINGS | {"TRITON_CACHE_DIR": str(cache)}
        command = [sys.executable, "-m", "deepinfer.backends.cuda_sm100.worker"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                        env=environment, stderr=subprocess.PIPE)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The result of one stage; ToolchainError with the compiler's complaint."""
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            assert self.process.stderr is not None
            said = self.process.stderr.read().strip().splitlines() or ["nothing"]
            raise ToolchainError("the compiler of kernels ended", where=request["function"], found=said[-1][:300],
                                 next_step="install the extra `cuda` again; if it is whole, please report this")
        result: dict[str, Any] = json.loads(line)
        if "error" in result:
            raise ToolchainError("Triton does not compile a kernel", where=request["function"],
                                 found=" ".join(result["error"].split())[-300:], next_step="please report this")
        return result

    def close(self) -> None:
        self.process.communicate()


class Toolchain:
    """Compiles stages for one architecture."""

    def __init__(self, arch: Arch, jobs: int, cache: Cache | None = None) -> None:
        self.arch, self.jobs, self.cache = arch, max(1, jobs), cache or Cache()
        self.key = {"triton": triton_version(), "settings": _SETTINGS,
                    "texts": {name: file_digest(_HERE / name) for name in _TEXTS}}
        self._free: SimpleQueue[Worker] = SimpleQueue()
        self._made: list[Worker] = []
        self._folder = tempfile.TemporaryDirectory(prefix="deepinfer-triton-")

    def __enter__(self) -> Toolchain:
        return self

    def __exit__(self, *_: object) -> None:
        for w in self._made:
            w.close()
        self._folder.cleanup()

    def variant(self, source: CudaSource, variant: Variant) -> Made:
        """Its stages compiled, or those of what takes its place where one of them spills."""
        if variant.otherwise is not None:
            made = [self._best(source, s) for s in variant.stages]
            if any(s.hot and _about(e)["spills"] for s, e in zip(variant.stages, made, strict=True)):
                return self.variant(source, variant.otherwise)
        return variant.stages, [self.stage(source, s) for s in variant.stages]

    def stage(self, source: CudaSource, stage: Stage) -> Entry:
        """``kernel.cubin`` and ``kernel.json`` of a stage that kept the promises of its skeleton."""
        made = self._best(source, stage)
        self._check(stage, _about(made))
        return made

    def _best(self, source: CudaSource, stage: Stage) -> Entry:
        request = {"target": self.arch.target, "symbol": source.symbol, "text": source.text,
                   "function": stage.function, "parameters": [p.as_json() for p in source.parameters],
                   "constants": [list(c) for c in stage.constants], "warps": stage.warps, "pipeline": stage.pipeline}

        def make(folder: Path) -> None:
            result = self._compiled(request)
            for change in stage.otherwise:
                if result["spills"]:
                    other = self._compiled(_changed(request, change))
                    result = min(result, other, key=lambda r: int(r["spills"]))
            (folder / "kernel.cubin").write_bytes(base64.b64decode(result.pop("cubin")))
            (folder / "kernel.json").write_text(json.dumps(result, sort_keys=True), encoding="utf-8")

        key = {"kind": "cuda stage", **self.key, **request, "hot": stage.hot, "matrix": stage.matrix,
               "otherwise": stage.otherwise}
        if source.family == "draw":
            key["draws"] = file_digest(_HERE / _DRAWS)
        return self.cache.fetch(key, make)

    def _compiled(self, request: dict[str, Any]) -> dict[str, Any]:
        worker = self._worker()
        try:
            return worker.ask(request)
        finally:
            self._free.put(worker)

    def _worker(self) -> Worker:
        if self._free.empty() and len(self._made) < self.jobs:
            self._made.append(Worker(Path(self._folder.name) / str(len(self._made))))
            return self._made[-1]
        return self._free.get()

    def _check(self, stage: Stage, made: dict[str, Any]) -> None:
        """A compiler that falls back says nothing: what was asked for has to be seen in the binary."""
        if stage.matrix and (made["fallback"] or not made["matrix"]):
            raise ToolchainError("a kernel does not use the tensor cores it was written for", where=stage.function,
                                 found=f"{made['matrix']} of {'/'.join(self.arch.matrix)}, {made['fallback']} of "
                                 f"{'/'.join(self.arch.fallback)}", next_step="please report this")
        if stage.hot and made["spills"]:
            raise ToolchainError("a kernel keeps registers in memory", where=stage.function,
                                 found=f"{made['spills']} bytes", allowed="0", next_step="please report this")


def _changed(request: dict[str, Any], change: int | tuple[tuple[str, int], ...]) -> dict[str, Any]:
    """A request with another number of warps, or with other numbers by name."""
    named = {"warps": change} if isinstance(change, int) else dict(change)
    constants = [[name, named.get(name, value)] for name, value in request["constants"]]
    return {**request, "constants": constants, **{k: v for k, v in named.items() if k in ("warps", "pipeline")}}


def compile_sources(target: str, sources: Sequence[Source], *, jobs: int, isa: str = ALL,
                    progress: Callable[[str], None] | None = None, cache: Cache | None = None) -> Binary:
    """``kernels.bin`` and ``kernels.json`` of the sources. ``progress`` is told each symbol that is ready."""
    kernels = [s for s in sources if isinstance(s, CudaSource)]
    if len(kernels) != len(sources):
        raise InternalError("a source of another backend")
    common = fixed.sources()
    kernels.extend(common)
    with Toolchain(ARCHS[target], jobs, cache) as tools, ThreadPoolExecutor(max(1, jobs)) as pool:
        def whole(source: CudaSource) -> list[Made]:
            made = [tools.variant(source, v) for v in source.variants]
            if progress is not None and source not in common:
                progress(source.symbol)
            return made

        queue = sorted(kernels, key=lambda s: (-len(s.text), s.symbol))
        entries = dict(zip((s.symbol for s in queue), pool.map(whole, queue), strict=True))
        packed = _pack(tools, kernels, entries)
    stages = [e for variants in entries.values() for _, made in variants for e in made]
    hits = sum(e.hit for e in stages) + packed.hit
    return Binary({CUBINS: packed.files[CUBINS], TABLE: packed.files[TABLE]}, {"triton": triton_version()}, hits,
                  len(stages) + 1 - hits, isa, (ARCHS[target].suffix,))


def _pack(tools: Toolchain, kernels: Sequence[CudaSource], entries: dict[str, list[Made]]) -> Entry:
    """One file of all distinct cubins, and the table of kernels."""
    blob, places = bytearray(), dict[str, tuple[int, int]]()
    table: dict[str, Any] = {}
    for source in sorted(kernels, key=lambda s: s.symbol):
        variants = []
        for v, (stages, made) in zip(source.variants, entries[source.symbol], strict=True):
            variants.append({"rows": v.rows, "stages": [
                {"grid": s.grid.as_json(), **placed(e, blob, places)} for s, e in zip(stages, made, strict=True)]})
        table[source.symbol] = {
            "family": source.family, "parameters": [p.as_json() for p in source.parameters],
            "scratch": source.scratch_json(), "variants": variants, "schedule": source.schedule}
    text = json.dumps({"format": FORMAT, "target": tools.arch.target, "arch": tools.arch.suffix, "kernels": table},
                      indent=1, sort_keys=True) + "\n"
    key = {"kind": "cuda kernels", "table": hashlib.sha256(text.encode()).hexdigest(),
           "cubins": hashlib.sha256(blob).hexdigest()}

    def make(folder: Path) -> None:
        (folder / CUBINS).write_bytes(blob)
        (folder / TABLE).write_text(text, encoding="utf-8")

    return tools.cache.fetch(key, make)


def placed(entry: Entry, blob: bytearray, places: dict[str, tuple[int, int]]) -> dict[str, Any]:
    """What the table says of a stage; its cubin is appended unless it is there."""
    digest = file_digest(entry.files["kernel.cubin"])
    if digest not in places:
        blob += b"\0" * (-len(blob) % _ALIGNMENT)
        cubin = entry.files["kernel.cubin"].read_bytes()
        places[digest] = len(blob), len(cubin)
        blob += cubin
    offset, size = places[digest]
    return {"offset": offset, "bytes": size, "sha256": digest, **_about(entry)}


def _about(entry: Entry) -> dict[str, Any]:
    about: dict[str, Any] = json.loads(entry.files["kernel.json"].read_text(encoding="utf-8"))
    return about
