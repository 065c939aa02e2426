"""The native runner behind a thin class: one call runs a step, results are views of the arena."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from deepinfer.errors import ArtifactError, InternalError, PlanError, ToolchainError
from deepinfer.runtime.batch import Batch
from deepinfer.runtime.device_memory import DeviceBytes
from deepinfer.runtime.device_memory import Placement as Placed
from deepinfer.runtime.placement import Placement, processors

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from deepinfer.codegen.package.interface import Interface
    from deepinfer.runtime.executor import Executor
    from deepinfer.runtime.plan import EnginePlan

# Error codes of runtime/native/abi.h
_BAD_TABLE, _BAD_KERNELS, _NO_MEMORY, _OVER_LIMIT, _DEVICE = 1, 2, 3, 4, 7
SEQUENCE = "sequence"  # state of draws, which lies with the host
_NUMPY = {"f32": np.float32, "i64": np.int64, "i32": np.int32, "u8": np.uint8, "bool": np.uint8, "bf16": np.uint16}

_POINTER, _I32, _I64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
_SIGNATURES: dict[str, list[Any]] = {
    "di_open": [ctypes.c_char_p, ctypes.POINTER(_POINTER)],
    "di_memory": [_POINTER, _I32, _I32, _I32, ctypes.POINTER(_I64)],
    "di_allocate": [_POINTER, _I32, _I32, _I32],
    "di_bind": [_POINTER, _I32, _I32, _POINTER, _POINTER],
    "di_tables": [_POINTER, _I32],
    "di_run": [_POINTER, ctypes.c_char_p, _I32, _POINTER, _POINTER, _POINTER, _POINTER],
    "di_output": [_POINTER, ctypes.c_char_p, ctypes.c_char_p, ctypes.POINTER(_POINTER), ctypes.POINTER(_I64),
                  ctypes.POINTER(_I64)],
    "di_state": [_POINTER, ctypes.c_char_p, _I32, ctypes.POINTER(_POINTER), ctypes.POINTER(_I64)],
    "di_begin": [_POINTER, _I32, _POINTER, _POINTER, _I64, _POINTER, _I64],
    "di_step": [_POINTER, _POINTER, _POINTER],
    "di_submit": [_POINTER, _POINTER, _POINTER],
    "di_finish": [_POINTER],
    "di_sends_ahead": [_POINTER, ctypes.POINTER(_I32)],
    "di_device": [_POINTER, ctypes.POINTER(ctypes.c_char_p), ctypes.POINTER(_I64)],
    "di_room": [_POINTER, _I64, ctypes.POINTER(_POINTER)],
    "di_copy": [_POINTER, _POINTER, _POINTER, _I64],
    "di_warm": [_POINTER],
    "di_place": [_POINTER, ctypes.POINTER(_I32), _I32],
    "di_memory_policy": [_I32, ctypes.POINTER(_I32)],
    "di_profile": [_POINTER, _I32, ctypes.POINTER(ctypes.POINTER(ctypes.c_double)), ctypes.POINTER(_I32)],
}


@dataclass(frozen=True)
class Memory:
    """Bytes the runner allocates: ``arena`` (values of a step), ``scratch`` (all threads), ``rings`` (all slots),
    ``pages`` (all cache blocks), ``drawing`` (all slots: token counts, drafts and their logits). Weights are the
    checkpoint's and not counted."""

    arena: int
    scratch: int
    rings: int
    pages: int
    drawing: int

    @property
    def total(self) -> int:
        return self.arena + self.scratch + self.rings + self.pages + self.drawing

    @property
    def on_device(self) -> int:
        """Of a device that the engine runs on; what draws keep lies with the host."""
        return self.total - self.drawing


@dataclass(frozen=True)
class Device:
    """What an engine runs on besides this host: ``memory`` and ``free`` bytes."""

    name: str
    memory: int
    free: int


class Binding(Protocol):
    """Where a checkpoint's tensors lie: for each table parameter, in order, one (data, scale) address pair per tensor
    (scale 0: none). The memory stays valid as long as the object lives."""

    def addresses(self) -> Iterator[list[tuple[int, int]]]: ...


def _memory(address: int, size: int) -> NDArray[np.uint8]:
    """Writable view of ``size`` bytes that the runner owns."""
    return np.frombuffer(memoryview((ctypes.c_uint8 * size).from_address(address)).cast("B"), np.uint8)


class Runner:
    """``lib/runner.so`` of an engine, opened; every failing call raises what its code stands for."""

    def __init__(self, lib: Path) -> None:
        self.lib = lib
        try:
            self._dll = ctypes.CDLL(str(lib / "runner.so"))
        except OSError as error:
            raise ArtifactError("the runner of the engine cannot be loaded", where=str(lib), found=str(error),
                                next_step="compile the engine again on this kind of machine") from None
        for name, arguments in _SIGNATURES.items():
            getattr(self._dll, name).argtypes = arguments
        self._dll.di_error.restype = ctypes.c_char_p
        self._dll.di_close.argtypes = [_POINTER]
        self._dll.di_close.restype = None
        self._engine = _POINTER()
        self.call("di_open", str(lib).encode(), ctypes.byref(self._engine), opened=False)

    def call(self, function: str, *arguments: Any, opened: bool = True) -> None:
        head = (self._engine,) if opened else ()
        code = getattr(self._dll, function)(*head, *arguments)
        if code == 0:
            return
        sentence = self._dll.di_error().decode(errors="replace")
        if code in (_BAD_TABLE, _BAD_KERNELS):
            raise ArtifactError(sentence, next_step="compile the engine again")
        if code in (_NO_MEMORY, _OVER_LIMIT):
            raise PlanError(sentence)
        if code == _DEVICE:
            raise ToolchainError(sentence, next_step="`deepinfer doctor` says what this machine has")
        raise InternalError(f"{function}: {sentence}")

    @property
    def abi(self) -> int:
        return int(self._dll.di_abi())

    def memory(self, slots: int, blocks: int, threads: int) -> Memory:
        out = (_I64 * 5)()
        self.call("di_memory", slots, blocks, threads, out)
        return Memory(*out)

    def device(self) -> Device | None:
        """The device that the engine runs on, with its memory as it is now; None for this host."""
        name, memory = ctypes.c_char_p(), (_I64 * 2)()
        self.call("di_device", ctypes.byref(name), memory)
        text = (name.value or b"").decode(errors="replace")
        return Device(text, memory[0], memory[1]) if text else None

    def close(self) -> None:
        if self._engine:
            self._dll.di_close(self._engine)
            self._engine = _POINTER()

    def __del__(self) -> None:
        if hasattr(self, "_engine"):
            self.close()


class NativeEngine:
    """An engine with its memory: ``slots`` sequences, ``blocks`` cache blocks, ``threads`` threads.

    ``lib``: the engine's ``lib`` folder; ``interface``: from its manifest; ``checkpoint``: the folder whose weights are
    bound; ``placement``: where threads and pages go, None: as the environment says. Everything is allocated here and
    nothing in ``run``. Not thread-safe: one ``run`` at a time. Raises ArtifactError for a damaged engine, PlanError
    when the memory cannot be had.
    """

    def __init__(self, lib: str | Path, interface: Interface, *, slots: int, blocks: int,
                 threads: int | None = None, placement: Placement | None = None) -> None:
        self.interface = interface
        place = placement or Placement.wanted()
        self.slots, self.blocks, self.threads = slots, blocks, threads or place.threads(None) or processors()
        self._runner = Runner(Path(lib))
        self.memory = self._runner.memory(slots, blocks, self.threads)
        self._device = self._runner.device()
        with place.memory(self._memory_policy):
            self._runner.call("di_allocate", slots, blocks, self.threads)
        if place.cpus:
            self._runner.call("di_place", (_I32 * len(place.cpus))(*place.cpus), len(place.cpus))
        self._bound: Binding | None = None
        self.checkpoint: Path | None = None
        self._pins = (_POINTER * (len(interface.pins) or 1))()
        self._pin_index = {name: i for i, (name, _) in enumerate(interface.pins)}
        self._pointer, self._rows, self._bytes = _POINTER(), _I64(), _I64()
        self._views: dict[tuple[str, str], NDArray[Any]] = {}
        self._names = {e: [(n, n.encode()) for n in outputs] for e, outputs in interface.outputs.items()}

    def _memory_policy(self, policy: int) -> int:
        """Sets the policy of pages that this thread touches first; memory nodes of the machine."""
        nodes = _I32()
        self._runner.call("di_memory_policy", policy, ctypes.byref(nodes), opened=False)
        return nodes.value

    def bind(self, binding: Binding, advance: Callable[[int], None] = lambda _: None, *,
             tables_in_memory: bool = False) -> None:
        """Points every parameter at its tensors and makes the first step as fast as any. On the host nothing is copied
        and ``binding`` is kept alive; a device gets the tensors once, and ``advance`` is told the bytes. Rows of lookup
        tables are asked for ahead of their use unless ``tables_in_memory``."""
        addresses = binding.addresses() if self._device is None else self._uploaded(binding, advance)
        for index, tensors in enumerate(addresses):
            for i, (data, scale) in enumerate(tensors):
                self._runner.call("di_bind", index, i, data, scale or None)
        if self._device is None:
            self._bound = binding
        self._runner.call("di_tables", int(tables_in_memory))
        self._runner.call("di_warm")

    def _uploaded(self, binding: Any, advance: Callable[[int], None]) -> Iterator[list[tuple[int, int]]]:
        placement = Placed(binding)
        self._runner.call("di_room", placement.end, ctypes.byref(self._pointer))
        base = self._pointer.value or 0
        for places, sizes, tensors in zip(placement.places, placement.sizes, binding.addresses(), strict=True):
            for place, size, address in zip(places, sizes, tensors, strict=True):
                for to, length, source in zip(place, size, address, strict=True):
                    if length:
                        self.copy(base + to, source, length)
                        advance(length)
            yield [(base + data, base + scale if scale >= 0 else 0) for data, scale in places]

    def copy(self, to: int, source: int, size: int) -> None:
        """Copies bytes between addresses of the host and of the device, in the order of the steps."""
        self._runner.call("di_copy", to, source, size)

    def run(self, entry: str, batch: Batch,
            pins: Mapping[str, NDArray[np.int32]] | None = None) -> dict[str, NDArray[Any]]:
        """Runs one entry over a batch; returns its outputs as views [rows, *dims] that are valid until the next run.

        ``pins``: selections given from outside by name, i32 [rows of their region, k], contiguous; other pins choose
        freely. Raises PlanError when the batch exceeds the limits.
        """
        self._runner.call("di_run", entry.encode(), batch.count, batch.sequences.ctypes.data,
                          batch.token_ids.ctypes.data, batch.lookback.ctypes.data, self._pinned(pins) if pins else None)
        return {name: self._output(entry, name, raw) for name, raw in self._names[entry]}

    def _pinned(self, pins: Mapping[str, NDArray[np.int32]]) -> Any:
        for i in range(len(self._pins)):
            self._pins[i] = None
        for name, picked in pins.items():
            if name not in self._pin_index:
                raise InternalError(f"the engine has no pinned selection {name}")
            i = self._pin_index[name]
            k = self.interface.pins[i][1]
            if picked.dtype != np.int32 or not picked.flags.c_contiguous or picked.shape[-1] != k:
                raise InternalError(f"the pinned selection {name} is not a contiguous int32 array [rows, {k}]")
            self._pins[i] = picked.ctypes.data
        return ctypes.cast(self._pins, _POINTER)

    def _output(self, entry: str, name: str, raw: bytes) -> NDArray[Any]:
        self._runner.call("di_output", entry.encode(), raw, ctypes.byref(self._pointer), ctypes.byref(self._rows),
                          ctypes.byref(self._bytes))
        value = self.interface.outputs[entry][name]
        kind = np.dtype(_NUMPY[value.dtype])
        size, row = self._rows.value * self._bytes.value, math.prod(value.dims) * kind.itemsize
        count, rest = divmod(size, row)
        if rest:
            raise ArtifactError("launch table and manifest of the engine contradict each other",
                                where=str(self._runner.lib), found=f"{size} bytes of the output {name}",
                                allowed=f"rows of {row} bytes", next_step="compile the engine again")
        view = self._views.get((entry, name))
        if view is None or len(view) < count:  # an output lies where it lay: only a longer one needs a longer view
            view = _memory(self._pointer.value or 0, size).view(kind).reshape(count, *value.dims)
            self._views[(entry, name)] = view
        return view[:count]

    def state(self, name: str, unit: int) -> NDArray[np.uint8]:
        """Bytes of one ring slot or one cache block of a state, as a writable view; on a device as ``DeviceBytes``,
        which is used in the same way."""
        self._runner.call("di_state", name.encode(), unit, ctypes.byref(self._pointer), ctypes.byref(self._bytes))
        if self._device is not None and name != SEQUENCE:
            there: Any = DeviceBytes(self.copy, self._pointer.value or 0, (self._bytes.value,))
            return there  # type: ignore[no-any-return]
        return _memory(self._pointer.value or 0, self._bytes.value)

    def begin(self, slot: int, how: NDArray[np.void], prompt: NDArray[np.int64], answer: NDArray[np.int64]) -> None:
        """A sequence takes a slot. ``how``: [1] DiSampling, whose lists live as long as the sequence has the slot;
        ``prompt``, ``answer``: its ids as far as they are known, i64, contiguous."""
        self._runner.call("di_begin", slot, how.ctypes.data, prompt.ctypes.data, len(prompt), answer.ctypes.data,
                          len(answer))

    def loop_step(self, work: ctypes.Structure, outcome: ctypes.Structure) -> None:
        """One step of a loop: DiWork and DiOutcome of runtime/native/abi.h."""
        self._runner.call("di_step", ctypes.addressof(work), ctypes.addressof(outcome))

    @property
    def sends_ahead(self) -> bool:
        """Whether a step can be submitted while one runs, and then runs by itself."""
        out = _I32()
        self._runner.call("di_sends_ahead", ctypes.byref(out))
        return bool(out.value)

    def submit(self, work: ctypes.Structure, outcome: ctypes.Structure) -> None:
        """``loop_step`` without waiting for it; ``finish`` waits for the oldest step that was submitted."""
        self._runner.call("di_submit", ctypes.addressof(work), ctypes.addressof(outcome))

    def finish(self) -> None:
        self._runner.call("di_finish")

    def executor(self, plan: EnginePlan, lag: int) -> Executor:
        """What runs the steps of a loop on this engine; ``lag``: steps that are planned ahead."""
        from deepinfer.runtime.host_executor import HostExecutor
        from deepinfer.runtime.native_executor import NativeExecutor

        return (NativeExecutor if "sample" in plan.entries else HostExecutor)(plan, self, lag=lag)

    def profile(self, on: bool = True) -> NDArray[np.float64]:
        """Switches timing on or off; returns microseconds of each launch and commit of the last timed run."""
        times, count = ctypes.POINTER(ctypes.c_double)(), _I32()
        self._runner.call("di_profile", int(on), ctypes.byref(times), ctypes.byref(count))
        return np.array(times[: count.value], np.float64)

    def close(self) -> None:
        """Frees the memory; views of it must not be used afterwards."""
        self._views.clear()
        self._runner.close()
        self._bound = None
