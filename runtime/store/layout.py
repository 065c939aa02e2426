"""Sizes of a record and of a segment, derived from the cache plan; docs/store.md draws them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from deepinfer.errors import PlanError
from deepinfer.runtime.plan import EnginePlan, StatePlan
from deepinfer.runtime.prefix.chain import digest

PAGE = 4096
HEADER_BYTES = 256
ID_BYTES = 4
LOG_ENTRY_BYTES = 64
MOST_SECTIONS = 16
NAME_BYTES = 40
FORMAT = 1
KIND_BLOCKS, KIND_WINDOWS = "blocks", "windows"


def aligned(size: int) -> int:
    """The next multiple of a page."""
    return -(-size // PAGE) * PAGE


@dataclass(frozen=True)
class Layout:
    """One record: header, B ids, and a payload of sections.

    Args:
        identity: 16 bytes for weights, numerics and cache plan: what every byte of every record hangs on.
        block_tokens: ids of a block (B); of a snapshot of windows likewise the ids of the block before it.
        sections: (name, bytes), at most 16, in the order of the payload.
        kind: what the payload is; other kinds are other namespaces.
    """

    identity: bytes
    block_tokens: int
    sections: tuple[tuple[str, int], ...]
    kind: str = KIND_BLOCKS

    def __post_init__(self) -> None:
        if not 0 < len(self.sections) <= MOST_SECTIONS or any(size <= 0 for _, size in self.sections):
            raise PlanError("a record has no place for these sections", where="store", found=len(self.sections),
                            allowed=f"1 to {MOST_SECTIONS}, none of them empty")

    @cached_property
    def payload_bytes(self) -> int:
        return sum(size for _, size in self.sections)

    @cached_property
    def ids_bytes(self) -> int:
        return ID_BYTES * self.block_tokens

    @cached_property
    def record_bytes(self) -> int:
        """Header, ids and payload without the filling of the last page."""
        return HEADER_BYTES + self.ids_bytes + self.payload_bytes

    @cached_property
    def stride(self) -> int:
        return aligned(self.record_bytes)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each section begins in a record, and the end of the last."""
        at = [HEADER_BYTES + self.ids_bytes]
        for _, size in self.sections:
            at.append(at[-1] + size)
        return tuple(at)

    @cached_property
    def namespace(self) -> bytes:
        """[16] of everything that makes two stores' records exchangeable."""
        sections = b"".join(name.encode() + size.to_bytes(8, "little") for name, size in self.sections)
        tokens = self.block_tokens.to_bytes(8, "little")
        return digest(b"namespace", self.identity, self.kind.encode(), tokens, sections)

    def capacity(self, segment_bytes: int) -> int:
        """Records of a segment: superblock, records, footer (a log entry each in whole pages, and a page)."""
        count = (segment_bytes - 3 * PAGE) // (self.stride + LOG_ENTRY_BYTES)
        if count < 1:
            raise PlanError("a segment is smaller than one record", where="store: segment_bytes", found=segment_bytes,
                            allowed=f"at least {3 * PAGE + self.stride + LOG_ENTRY_BYTES}")
        return count


def record_offset(stride: int, slot: int) -> int:
    return PAGE + stride * slot


def footer_offset(stride: int, capacity: int) -> int:
    return PAGE + stride * capacity


def segment_size(stride: int, capacity: int) -> int:
    """Bytes of the file, footer included."""
    return footer_offset(stride, capacity) + aligned(LOG_ENTRY_BYTES * capacity) + PAGE


def layout_of(plan: EnginePlan, identity: bytes, kind: str = KIND_BLOCKS) -> Layout:
    """The layout of a plan's cache blocks (its paged states) or of its window snapshots (its rings).

    Neighbouring states share a section where a plan has more than 16.
    """
    states = plan.paged if kind == KIND_BLOCKS else plan.rings
    if not states:
        raise PlanError("this engine has nothing to keep in a store", where=plan.model, found=f"no {kind}")
    return Layout(identity, plan.block_tokens, tuple(map(_section, _grouped(states))), kind)


def _grouped(states: Sequence[StatePlan]) -> list[Sequence[StatePlan]]:
    each = -(-len(states) // MOST_SECTIONS)
    return [states[i : i + each] for i in range(0, len(states), each)]


def _section(states: Sequence[StatePlan]) -> tuple[str, int]:
    name = states[0].name if len(states) == 1 else f"{states[0].name}..{states[-1].name}"
    return name.encode()[:NAME_BYTES].decode(errors="ignore"), sum(s.unit_bytes for s in states)
