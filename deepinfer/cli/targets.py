"""The `--target` option that several subcommands share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from deepinfer.accelerator import VARIABLE, backends, known_targets


def target_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--target`, a name or None; `deepinfer.accelerator.resolve_target` judges the value."""
    built = {target: backend.built for backend in backends() for target in backend.targets}
    states = ", ".join(f"{name}{'' if built.get(name) else ' (not built yet)'}" for name in known_targets())
    return click.option(
        "--target",
        metavar="NAME",
        help=f"Chip to compile for: {states}. Default: what {VARIABLE}=nvidia|ascend|cpu names, else the "
        "best found on this machine whose backend is built.",
    )(command)
