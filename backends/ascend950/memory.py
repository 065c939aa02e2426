"""Absolute offsets of a kernel's buffers in the memories of a core."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from deepinfer.backends.ascend950.target import CAPACITY, VECTOR_BYTES
from deepinfer.errors import PlanError


def padded(n: int, to: int = VECTOR_BYTES) -> int:
    return -(-n // to) * to


@dataclass
class Buffer:
    """``first`` .. ``last``: steps of the kernel's text between which it holds something; (0, forever) for those that
    other pipes than V touch."""

    name: str
    size: int
    first: int = 0
    last: int = 1 << 30
    copies: int = 1
    offset: int = -1
    turn: str = "io"  # variable that says which copy is meant

    @property
    def stride(self) -> int:
        """Bytes from one copy to the next."""
        return padded(self.size)


@dataclass
class Memory:
    """The plan of one memory. Buffers are laid out first fit; those that never live at the same time share bytes."""

    space: str
    kernel: str
    buffers: dict[str, Buffer] = field(default_factory=dict)

    def add(self, b: Buffer) -> Buffer:
        self.buffers[b.name] = b
        return b

    def new(self, name: str, size: int, copies: int = 1) -> Buffer:
        return self.add(Buffer(name, size, copies=copies))

    def place(self) -> int:
        """Sets all offsets and returns the bytes used; PlanError naming the buffer that does not fit."""
        capacity = CAPACITY[self.space]
        done: list[Buffer] = []
        used = 0
        for b in sorted(self.buffers.values(), key=lambda b: (b.first, -b.stride * b.copies)):
            need, at = b.stride * b.copies, 0
            for other in sorted((o for o in done if o.first <= b.last and b.first <= o.last), key=lambda o: o.offset):
                if at + need <= other.offset:
                    break
                at = max(at, other.offset + other.stride * other.copies)
            if at + need > capacity:
                raise PlanError(f"{self.kernel}: buffer {b.name} does not fit into {self.space}",
                                found=f"{need} bytes at {at}", allowed=f"{capacity} bytes",
                                next_step="keep to the defaults of --profile and --cache-format, whose values are the "
                                "shortest; a model too wide with these is not for this target yet")
            b.offset = at
            done.append(b)
            used = max(used, at + need)
        return used

    def table(self) -> list[str]:
        """One line for each buffer, for the head of a source."""
        return [f"{self.space} {b.offset:>7} {b.stride * b.copies:>7} {b.name} x {b.copies}"
                for b in sorted(self.buffers.values(), key=lambda b: b.offset)]

    def declared(self) -> list[str]:
        """One statement for each buffer; they make nothing on a device and let the twin tell buffers apart."""
        return [f'DI_BUFFER({self.space}, "{b.name}", {b.offset + n * b.stride}, {b.stride});'
                for b in sorted(self.buffers.values(), key=lambda b: b.offset) for n in range(b.copies)]


def single(buffers: Iterable[Buffer]) -> None:
    """Gives up the second copies."""
    for b in buffers:
        b.copies = 1
