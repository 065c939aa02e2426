"""The CUDA driver by ctypes: enough to load cubins, launch them, and time graphs of launches. Needs numpy alone."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

_MAX_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_WORDS = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int32


class Driver:
    """The first device, in its primary context."""

    def __init__(self) -> None:
        self.cu = ctypes.CDLL("libcuda.so.1")
        self("cuInit", 0)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self("cuDeviceGet", ctypes.byref(device), 0)
        self.device = device
        self("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self("cuCtxSetCurrent", context)
        self.stream = ctypes.c_void_p()
        self("cuStreamCreate", ctypes.byref(self.stream), 0)  # it waits for copies and fills of the null stream
        self._functions: dict[Any, Any] = {}

    def __call__(self, name: str, *arguments: Any) -> None:
        status = getattr(self.cu, name)(*arguments)
        if status:
            raise RuntimeError(f"{name} answers {status}")

    def name(self) -> str:
        """Name of the device, as the driver gives it."""
        text = ctypes.create_string_buffer(256)
        self("cuDeviceGetName", text, 256, self.device)
        return text.value.decode()

    def version(self) -> int:
        """Highest version of CUDA that the driver serves, 13010 for 13.1."""
        number = ctypes.c_int()
        self("cuDriverGetVersion", ctypes.byref(number))
        return number.value

    # ---- memory ----------------------------------------------------------------------------------------------------
    def alloc(self, size: int) -> int:
        at = ctypes.c_uint64()
        self("cuMemAlloc_v2", ctypes.byref(at), ctypes.c_size_t(max(256, size)))
        return at.value

    def free(self, at: int) -> None:
        self("cuMemFree_v2", ctypes.c_uint64(at))

    def upload(self, x: np.ndarray) -> int:
        x = np.ascontiguousarray(x)
        at = self.alloc(x.nbytes)
        if x.nbytes:
            self("cuMemcpyHtoD_v2", ctypes.c_uint64(at), ctypes.c_void_p(x.ctypes.data), ctypes.c_size_t(x.nbytes))
        return at

    def download(self, at: int, like: np.ndarray) -> np.ndarray:
        out = np.empty_like(np.ascontiguousarray(like))
        if out.nbytes:
            self("cuMemcpyDtoH_v2", ctypes.c_void_p(out.ctypes.data), ctypes.c_uint64(at), ctypes.c_size_t(out.nbytes))
        return out

    def synchronize(self) -> None:
        self("cuCtxSynchronize")

    # ---- kernels ---------------------------------------------------------------------------------------------------
    def function(self, blob: bytes, stage: dict[str, Any]) -> Any:
        """The function of a stage (an entry of kernels.json)."""
        key = stage["sha256"], stage["function"]
        if key not in self._functions:
            module, function = ctypes.c_void_p(), ctypes.c_void_p()
            image = blob[stage["offset"]: stage["offset"] + stage["bytes"]]
            self("cuModuleLoadData", ctypes.byref(module), image)
            self("cuModuleGetFunction", ctypes.byref(function), module, stage["function"].encode())
            if stage["shared"] > 48 << 10:
                self("cuFuncSetAttribute", function, _MAX_SHARED, stage["shared"])
            self._functions[key] = function
        return self._functions[key]

    def launch(self, function: Any, blocks: int, stage: dict[str, Any], values: list[Any]) -> None:
        """``values``: ctypes values of the listed parameters."""
        whole = [*values, ctypes.c_uint64(0), ctypes.c_uint64(0)]
        pointers = (ctypes.c_void_p * len(whole))(*(ctypes.addressof(v) for v in whole))
        threads = 32 * stage["warps"]
        self("cuLaunchKernel", function, blocks, 1, 1, threads, 1, 1, stage["shared"], self.stream, pointers, None)

    # ---- time ------------------------------------------------------------------------------------------------------
    def capture(self, work: Any) -> Any:
        """A graph of what ``work()`` launches."""
        graph, made = ctypes.c_void_p(), ctypes.c_void_p()
        self("cuStreamBeginCapture_v2", self.stream, 0)
        work()
        self("cuStreamEndCapture", self.stream, ctypes.byref(graph))
        self("cuGraphInstantiateWithFlags", ctypes.byref(made), graph, ctypes.c_uint64(0))
        self("cuGraphDestroy", graph)
        return made

    def timed(self, graph: Any, flush: tuple[int, int], repeats: int) -> float:
        """Median microseconds of a replay, the cache filled with other bytes before each."""
        start, stop = ctypes.c_void_p(), ctypes.c_void_p()
        self("cuEventCreate", ctypes.byref(start), 0)
        self("cuEventCreate", ctypes.byref(stop), 0)
        taken = []
        for _ in range(repeats):
            self("cuMemsetD32Async", ctypes.c_uint64(flush[0]), 1, ctypes.c_size_t(flush[1] // 4), self.stream)
            self("cuEventRecord", start, self.stream)
            self("cuGraphLaunch", graph, self.stream)
            self("cuEventRecord", stop, self.stream)
            self("cuEventSynchronize", stop)
            ms = ctypes.c_float()
            self("cuEventElapsedTime", ctypes.byref(ms), start, stop)
            taken.append(ms.value * 1e3)
        return float(np.median(taken))


def blocks_of(grid: dict[str, int], n: int) -> int:
    """Blocks of a stage for n rows (README.md of the backend)."""
    if "fixed" in grid:
        return grid["fixed"]
    return min(n * grid["of"], -(-n * grid["of"] // grid["per"]) + grid["plus"]) * grid["times"]


def variant_for(kernel: dict[str, Any], rows: int) -> dict[str, Any]:
    return next(v for v in kernel["variants"] if not v["rows"] or rows <= v["rows"])
