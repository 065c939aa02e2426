"""A CUDA driver without a device: built from fake_driver.cpp, found by the runner in place of the real one.

What it launches is recorded, checked, and can be run in Triton's interpreter on the same memory.
"""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from cuda.interpreted import mend_interpreter, module_of, tensor

from deepinfer.backends.cuda_sm100.families import fixed
from deepinfer.backends.cuda_sm100.source import CudaSource, Stage
from deepinfer.machine import cxx_compiler

_NUMPY = {"*f32": np.float32, "*bf16": np.uint16, "*i64": np.int64, "*i32": np.int32, "*u8": np.uint8}
_TOTAL = 8 << 30
_WINDOW = 16  # bytes that a tensor says it has


class Launch(ctypes.Structure):
    """``Launch`` of fake_driver.cpp."""

    _fields_ = (("function", ctypes.c_char_p), ("blocks", ctypes.c_uint32), ("threads", ctypes.c_uint32),
                ("shared", ctypes.c_uint32), ("parameters", ctypes.c_uint32),
                ("values", ctypes.POINTER(ctypes.c_uint8)), ("places", ctypes.POINTER(ctypes.c_uint16)),
                ("image", ctypes.POINTER(ctypes.c_uint8)), ("image_bytes", ctypes.c_uint64))

    @property
    def sizes(self) -> list[int]:
        """Bytes of each parameter."""
        return [self.places[2 * i + 1] for i in range(self.parameters)]

    def numbers(self) -> list[int]:
        """Parameters as integers without a sign."""
        packed = bytes(self.values[: max(self.places[2 * i] + self.places[2 * i + 1] for i in range(self.parameters))])
        return [int.from_bytes(packed[self.places[2 * i]: self.places[2 * i] + self.places[2 * i + 1]], "little")
                for i in range(self.parameters)]


_RUNNER = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(Launch))


@cache
def library() -> ctypes.CDLL:
    """The fake, loaded under the driver's name: whoever opens ``libcuda.so.1`` in this process gets it."""
    folder = Path(tempfile.mkdtemp(prefix="di-fake-driver-"))
    source = Path(__file__).with_name("fake_driver.cpp")
    subprocess.run([cxx_compiler(), "-std=c++17", "-O1", "-fPIC", "-shared", "-Wl,-soname,libcuda.so.1", str(source),
                    "-o", str(folder / "libcuda.so.1")], check=True)
    dll = ctypes.CDLL(str(folder / "libcuda.so.1"), mode=ctypes.RTLD_GLOBAL)
    dll.fake_calls.restype = dll.fake_launches.restype = ctypes.c_int64
    dll.fake_taken.restype = ctypes.c_uint64
    dll.fake_inside.argtypes = [ctypes.c_uint64, ctypes.c_uint64]
    dll.fake_fail.argtypes = [ctypes.c_char_p, ctypes.c_int64, ctypes.c_int]
    dll.fake_machine.argtypes = [ctypes.c_int] * 4 + [ctypes.c_uint64]
    return dll


def calls(function: str) -> int:
    return int(library().fake_calls(function.encode()))


def launches() -> Iterator[Launch]:
    """What was launched since ``forget``."""
    for i in range(library().fake_launches()):
        out = Launch()
        library().fake_launch(ctypes.c_int64(i), ctypes.byref(out))
        yield out


def forget() -> None:
    library().fake_forget()


@contextmanager
def machine(version: int = 13000, capability: tuple[int, int] = (9, 0), devices: int = 1,
            total: int = _TOTAL) -> Iterator[None]:
    """The machine that the driver shows."""
    library().fake_machine(version, *capability, devices, total)
    try:
        yield
    finally:
        library().fake_machine(13000, 9, 0, 1, _TOTAL)


@contextmanager
def failing(function: str, code: int, after: int = 0) -> Iterator[None]:
    """A function of the driver that answers ``code`` from its call number ``after`` on."""
    library().fake_fail(function.encode(), after, code)
    try:
        yield
    finally:
        library().fake_fail(b"", 0, 0)


@contextmanager
def late() -> Iterator[None]:
    """Copies and launches happen when somebody waits for them, so that what is read or written too early shows."""
    library().fake_late(1)
    try:
        yield
    finally:
        library().fake_late(0)


@dataclass(frozen=True)
class Function:
    """What a binary was compiled from."""

    source: CudaSource
    stage: Stage
    run: Any


class Interpreted:
    """Runs launches in Triton's interpreter. ``table``: kernels.json; ``sources``: of the engine's kernels."""

    def __init__(self, table: dict[str, Any], sources: Iterable[CudaSource]) -> None:
        mend_interpreter()
        self.failed: list[BaseException] = []
        self._functions: dict[str, Function] = {}
        for source in [*sources, *fixed.sources()]:
            module = module_of(source)
            for v, made in zip(source.variants, table["kernels"][source.symbol]["variants"], strict=True):
                for stage, entry in zip(v.stages, made["stages"], strict=True):
                    self._functions[entry["sha256"]] = Function(source, stage, getattr(module, stage.function))
        self._digests: dict[int, str] = {}

    def function(self, launch: Launch) -> Function:
        address = ctypes.addressof(launch.image.contents)
        if address not in self._digests:
            image = ctypes.string_at(launch.image, launch.image_bytes)
            self._digests[address] = hashlib.sha256(image).hexdigest()
        return self._functions[self._digests[address]]

    def __call__(self, pointer: Any) -> int:
        try:
            launch = pointer.contents
            f = self.function(launch)
            numbers = launch.numbers()
            values = [_value(p.type, n) for p, n in zip(f.source.parameters, numbers, strict=False)]
            with np.errstate(all="ignore"):
                f.run[(launch.blocks,)](*values, **dict(f.stage.constants))
            return 0
        except BaseException as error:  # it must not cross the C border
            self.failed.append(error)
            return 700


def _value(kind: str, number: int) -> Any:
    if kind[0] != "*":
        bits = 64 if kind == "i64" else 32
        return number - (1 << bits) if number >> (bits - 1) else number
    # The interpreter wants equal storages behind equal addresses; kernels go beyond them all the same.
    return tensor(np.frombuffer((ctypes.c_uint8 * _WINDOW).from_address(number), _NUMPY[kind]))


@contextmanager
def running(work: Callable[[Any], int]) -> Iterator[None]:
    """Every launch calls ``work``."""
    callback = _RUNNER(work)
    library().fake_runner(callback)
    try:
        yield
    finally:
        library().fake_runner(ctypes.cast(None, _RUNNER))
