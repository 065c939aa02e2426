"""Memory of an engine's device, as the host sees it: weights go there once, states are copied back and forth."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

BOUNDARY = 256  # of a parameter's tensors on a device
Copy = Callable[[int, int, int], None]  # to, from, bytes


class SizedBinding(Protocol):
    """A binding that says how long its tensors are."""

    def addresses(self) -> Iterator[list[tuple[int, int]]]: ...

    def sizes(self) -> Iterator[list[tuple[int, int]]]:
        """Bytes of (data, scale) of each tensor, in the order of ``addresses``."""
        ...


class Placement:
    """Where the tensors of all parameters lie in one block: data of a stack one after the other, then its scales.

    ``end``: bytes of the block. ``places``: for each parameter one (data, scale) offset per tensor, -1 for none.
    """

    def __init__(self, binding: SizedBinding) -> None:
        self.places: list[list[tuple[int, int]]] = []
        self.sizes = list(binding.sizes())
        self.end = 0
        for tensors in self.sizes:
            data = [self._room(size, first=i == 0) for i, (size, _) in enumerate(tensors)]
            scale = [self._room(size, first=i == 0) if size else -1 for i, (_, size) in enumerate(tensors)]
            self.places.append(list(zip(data, scale, strict=True)))

    def _room(self, size: int, first: bool) -> int:
        if first:
            self.end += -self.end % BOUNDARY
        self.end += size
        return self.end - size


class DeviceBytes:
    """Bytes of a slot or block on a device; reading copies them to the host, assigning copies there.

    It stands where an engine of the host gives a writable view: whole reads and writes are one copy, others bring
    everything over.
    """

    def __init__(self, copy: Copy, address: int, shape: tuple[int, ...]) -> None:
        self._copy, self.address, self.shape = copy, address, shape
        self.dtype = np.dtype(np.uint8)

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape))

    def __len__(self) -> int:
        return self.shape[0]

    def copy(self) -> NDArray[np.uint8]:
        out = np.empty(self.shape, np.uint8)
        self._copy(out.ctypes.data, self.address, self.nbytes)
        return out

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return self.copy() if dtype is None else self.copy().astype(dtype)

    def view(self, dtype: Any) -> NDArray[Any]:
        return self.copy().view(dtype)

    def tolist(self) -> Any:
        return self.copy().tolist()

    def reshape(self, *shape: int) -> DeviceBytes:
        return DeviceBytes(self._copy, self.address, shape)

    def __getitem__(self, key: Any) -> Any:
        return self.copy()[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        if isinstance(key, slice) and key == slice(None):
            if isinstance(value, DeviceBytes):
                if value.nbytes != self.nbytes:
                    raise ValueError(f"{value.nbytes} bytes for {self.nbytes}")
                self._copy(self.address, value.address, self.nbytes)
                return
            whole = np.ascontiguousarray(np.broadcast_to(value, self.shape), np.uint8)
        else:
            whole = self.copy()
            whole[key] = value
        self._copy(self.address, whole.ctypes.data, self.nbytes)
