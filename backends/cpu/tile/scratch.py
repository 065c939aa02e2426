"""Scratch memory of one row: buffers with lifetimes, laid out so that those that never live together share bytes."""

from __future__ import annotations

from dataclasses import dataclass, field

_ALIGNMENT = 64


@dataclass
class Slot:
    """``first`` and ``last``: places in the program between which the buffer holds a value."""

    name: str
    kind: str
    bytes: int
    first: int
    last: int
    offset: int = 0


@dataclass
class Scratch:
    """Buffers of a kernel in order of creation."""

    slots: list[Slot] = field(default_factory=list)

    def add(self, name: str, kind: str, nbytes: int, first: int, last: int) -> str:
        self.slots.append(Slot(name, kind, -(-nbytes // _ALIGNMENT) * _ALIGNMENT, first, max(first, last)))
        return name

    def lay_out(self) -> int:
        """Assigns offsets, first fit by time; returns the bytes needed."""
        placed: list[Slot] = []
        total = 0
        for s in sorted(self.slots, key=lambda s: (s.first, s.name)):
            busy = sorted((p for p in placed if p.last >= s.first and p.first <= s.last), key=lambda p: p.offset)
            at = 0
            for p in busy:
                if at + s.bytes <= p.offset:
                    break
                at = max(at, p.offset + p.bytes)
            s.offset = at
            placed.append(s)
            total = max(total, at + s.bytes)
        return total

    def declarations(self, base: str = "args->scratch") -> list[str]:
        return [f"{s.kind}* const {s.name} = ({s.kind}*)({base} + {s.offset});" for s in self.slots]
