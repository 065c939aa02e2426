"""Compiles stages of kernels in a process of its own: requests as JSON lines in, results as JSON lines out.

Triton reads its settings from the environment once, and holds the interpreter lock while it works: hence processes,
with an environment that the toolchain fixes.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

from deepinfer.backends.cuda_sm100.cubin import inspect, parameter_sizes
from deepinfer.backends.cuda_sm100.target import ARCHS
from deepinfer.errors import DeepInferError, ToolchainError

_TYPES = {"*f32": "*fp32", "*bf16": "*bf16", "*i64": "*i64", "*i32": "*i32", "*u8": "*u8", "i32": "i32", "i64": "i64"}
_ALIGNED = [["tt.divisibility", 16]]


def tools_folder() -> Path:
    """Where Triton keeps NVIDIA's tools."""
    import triton

    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def compile_stage(request: dict[str, Any], folder: Path) -> dict[str, Any]:
    """One stage -> cubin and what it is. Pipelines are shortened until the shared memory suffices."""
    arch = ARCHS[request["target"]]
    function = getattr(_module(request["symbol"], request["text"], folder), request["function"])
    parameters, constants = request["parameters"], request["constants"]
    pipeline = request["pipeline"]
    while True:
        made = _compile(function, parameters, constants, arch.capability, request["warps"], pipeline)
        if made.metadata.shared <= arch.shared:
            break
        if pipeline == 1:
            raise ToolchainError("a kernel needs more shared memory than there is", where=request["function"],
                                 found=f"{made.metadata.shared} bytes", allowed=f"<= {arch.shared}",
                                 next_step="please report this")
        pipeline -= 1
    return _described(made, request, pipeline, folder)


def _compile(function: Any, parameters: list[list[Any]], constants: list[list[Any]], capability: int, warps: int,
             pipeline: int) -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    n = len(parameters)
    signature = {name: _TYPES[kind] for name, kind, _ in parameters} | {name: "constexpr" for name, _ in constants}
    # Addresses and strides are multiples of 16 (README.md).
    attrs = {(i,): _ALIGNED for i, (_, kind, where) in enumerate(parameters)
             if kind.startswith("*") or where[-1] == "stride"}
    source = ASTSource(fn=function, signature=signature, attrs=attrs,
                       constexprs={(n + i,): value for i, (_, value) in enumerate(constants)})
    return compile(source, target=GPUTarget("cuda", capability, 32),
                   options={"num_warps": warps, "num_stages": pipeline, "enable_fp_fusion": False})


def _described(made: Any, request: dict[str, Any], pipeline: int, folder: Path) -> dict[str, Any]:
    arch, function, cubin = ARCHS[request["target"]], request["function"], made.asm["cubin"]
    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    seen = inspect(file, function, arch, tools_folder())
    sizes = [8 if kind.startswith("*") or kind == "i64" else 4 for _, kind, _ in request["parameters"]] + [8, 8]
    if parameter_sizes(cubin, function) != sizes:
        raise ToolchainError("a cubin has other parameters than its kernel", where=function,
                             found=parameter_sizes(cubin, function), allowed=sizes, next_step="please report this")
    if made.metadata.global_scratch_size:
        raise ToolchainError("a cubin wants memory of its own", where=function,
                             found=made.metadata.global_scratch_size, next_step="please report this")
    depot = re.search(r"__local_depot\d+\[(\d+)\]", made.asm["ptx"])
    arrays = -(-int(depot[1]) // 8) * 8 if depot else 0  # arrays of the text itself: the tables of sin and cos
    return {"cubin": base64.b64encode(cubin).decode(), "function": made.metadata.name, "warps": made.metadata.num_warps,
            "shared": made.metadata.shared, "tensor_memory": made.metadata.tmem_size or 0, "pipeline": pipeline,
            "spills": max(0, seen.stack - arrays), **asdict(seen)}


def _module(symbol: str, text: str, folder: Path) -> ModuleType:
    file = folder / f"{symbol}.py"
    file.write_text(text, encoding="utf-8")
    found = importlib.util.spec_from_file_location(symbol, file)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def serve(lines: Any, answer: Callable[[str], None]) -> None:
    """Answers every request until the input ends."""
    with tempfile.TemporaryDirectory(prefix="deepinfer-cuda-") as folder:
        for line in lines:
            try:
                result = compile_stage(json.loads(line), Path(folder))
            except DeepInferError as error:
                result = {"error": str(error)}
            except Exception as error:
                result = {"error": f"{type(error).__name__}: {error}"}
            answer(json.dumps(result))


if __name__ == "__main__":
    out = sys.stdout
    sys.stdout = sys.stderr  # what a compiler prints is no answer
    serve(sys.stdin, lambda text: print(text, file=out, flush=True))
