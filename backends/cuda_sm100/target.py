"""Hopper and Blackwell as data: what the skeletons carry, and what a binary may use."""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer.backends.base import Capabilities


@dataclass(frozen=True)
class Arch:
    """``suffix``: architecture that cubins are for; ``capability``: as Triton names it; ``shared``: most bytes of
    shared memory of a block; ``matrix``: instructions of the asynchronous tensor cores in the disassembly,
    ``fallback``: those that a compiler takes instead without a word."""

    target: str
    suffix: str
    capability: int
    shared: int
    matrix: tuple[str, ...]
    fallback: tuple[str, ...] = ("HMMA", "IMMA", "QMMA")


ARCHS = {
    "sm90": Arch("sm90", "sm_90a", 90, 232448, ("HGMMA", "QGMMA")),
    "sm100": Arch("sm100", "sm_100a", 100, 232448, ("UTCHMMA", "UTCQMMA", "UTCOMMA")),
}


def built(target: str) -> Capabilities:
    """What the skeletons of today carry. A kernel boundary costs about what a graph replay pays for a small kernel."""
    return Capabilities(target=target, prologue={}, epilogue=dict.fromkeys(("gemm", "grouped_gemm", "attend"), "group"),
                        group=32, row_columns=32, shared_input=True, barrier_us=1.35, on_chip_bytes=227 << 10,
                        workspace_bytes=2 << 30, draws=True)


# Where fusion is to go: the last block of a row finishes it (ticket), so row-wide steps may follow a contraction in its
# own kernel; contractions of one level share a launch. No skeleton carries this yet.
SM100 = Capabilities(
    target="sm100",
    prologue={"gemm": "group", "grouped_gemm": "group", "attend": "none"},
    epilogue={"gemm": "row", "grouped_gemm": "row", "attend": "row"},
    shared_input=True, mixed_tiles=True, ticket=True,
    barrier_us=1.35,
    on_chip_bytes=227 << 10, draws=True,
)
