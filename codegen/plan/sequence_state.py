"""What the runner keeps of every sequence beside its rings: where it stands, last ids, drafts, counts of tokens."""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer.codegen.plan.arena import ALIGNMENT

_HEAD = 64  # SlotHead of runtime/native/slots.h
TAIL = 256  # last ids: more than any look-back, and the longest sequence of bad words


@dataclass(frozen=True)
class SequenceState:
    """Layout of the record of one slot. Counts and draft logits are whole rows of the vocabulary: they bound what
    penalties and rejection sampling take, whatever a request brings.

    Args:
        vocab: tokens. ``drafts``: m, 0 without a draft head; ``filler``: id of a block's rows behind its first.
        lookback: ids before a row that it reads.
    """

    vocab: int
    drafts: int
    filler: int
    lookback: int

    @property
    def tail(self) -> int:
        """Last ids that are kept."""
        return -(-max(TAIL, self.lookback) // ALIGNMENT) * ALIGNMENT

    @property
    def parts(self) -> dict[str, int]:
        """Bytes of each part, in order: last ids (i64), drafts (i64), confidences (f32), counts (u32), draft logits
        (f32)."""
        return {"tail": 8 * self.tail, "drafts": 8 * self.drafts, "confidence": 4 * self.drafts,
                "counts": 4 * self.vocab, "logits": 4 * self.vocab * self.drafts}

    def offsets(self) -> dict[str, int]:
        """Where each part begins; ``end``: bytes of the record. Parts begin on cache lines."""
        out, at = {}, _HEAD
        for name, size in self.parts.items():
            out[name] = at
            at += -(-size // ALIGNMENT) * ALIGNMENT
        return out | {"end": at}

    @property
    def bytes(self) -> int:
        return self.offsets()["end"]

    def text(self) -> str:
        """Its line of the launch table."""
        places = " ".join(f"{name} {at}" for name, at in self.offsets().items())
        return f"sequence vocab {self.vocab} drafts {self.drafts} filler {self.filler} ids {self.tail} {places}"
