"""The two limits of this machine, measured: what reports and benchmarks hold a step against."""

from __future__ import annotations

import ctypes
from pathlib import Path

from deepinfer.backends.base import Roof
from deepinfer.errors import PlanError
from deepinfer.runtime.native.build import LIBRARY


def measured_roof(lib: Path, threads: int) -> Roof:
    """Limits of ``threads`` threads of this machine, in about two seconds; ``lib``: that folder of an engine.

    Raises PlanError when there is no 1 GiB to read from.
    """
    limits = (ctypes.c_double * 2)()
    if ctypes.CDLL(str(lib / LIBRARY)).di_machine_limits(threads, limits):
        raise PlanError("no memory to measure this machine with", found="less than 1 GiB free",
                        next_step="end other programs")
    basis = (f"measured with {threads} thread{'s' * (threads > 1)} in the same run: sums over 1 GiB, products of the "
             "widest registers, on bf16 pairs where there are such")
    return Roof("this machine", limits[0], limits[1], basis)
