"""Blackwell (sm_100) as data for the fusion pass. Provisional until the backend exists, whose launch table is the
truth.

A kernel boundary costs about what a CUDA graph replay pays for a small kernel; the last block of a row finishes it
(ticket), so row-wide steps may follow a contraction in its own kernel; contractions of one level share a launch.
"""

from __future__ import annotations

from deepinfer.backends.base import Capabilities

SM100 = Capabilities(
    target="sm100",
    prologue={"gemm": "group", "grouped_gemm": "group", "attend": "none"},
    epilogue={"gemm": "row", "grouped_gemm": "row", "attend": "row"},
    shared_input=True, mixed_tiles=True, ticket=True,
    barrier_us=1.35,
    on_chip_bytes=227 << 10,
)
