"""Kernels that every engine has, whatever its graphs: the same text each time."""

from __future__ import annotations

from deepinfer.backends.cuda_sm100.families import commit, follow
from deepinfer.backends.cuda_sm100.source import CudaSource


def sources() -> tuple[CudaSource, ...]:
    """Commits of rings, and what steps that are sent ahead need."""
    return commit.source(), follow.follow(), follow.accept()
