"""What `serve` and `chat` run: an engine folder as it is, or a model that is compiled into the cache first."""

from __future__ import annotations

import importlib
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deepinfer.accelerator import resolve_target
from deepinfer.errors import SpecError

if TYPE_CHECKING:
    from deepinfer.codegen.cached_engine import CachedEngine


@dataclass(frozen=True)
class Subject:
    """What is run: an engine folder and the checkpoint for it, None for the engine's own.

    ``compile``: what has to be compiled into that folder first, if anything.
    """

    engine: Path
    checkpoint: str | None
    name: str
    compile: CachedEngine | None = None


def resolve_subject(subject: str, checkpoint: str | None, limits: Mapping[str, Any]) -> Subject:
    """The engine to run; for a model, the equal compile command is printed and `compile` says what to make.

    ``limits``: max_model_len and max_num_seqs, None where the engine's own or the default counts.
    """
    package: Any = importlib.import_module("deepinfer.codegen.package.manifest")
    folder = Path(subject).expanduser()
    if folder.is_dir() and package.is_engine(folder):
        longest = package.read_manifest(folder)["plan"]["max_model_len"]
        if limits["max_model_len"] is not None and limits["max_model_len"] > longest:
            raise SpecError("the engine was compiled for shorter sequences", where="--max-model-len",
                            found=limits["max_model_len"], allowed=f"at most {longest}",
                            next_step="compile again with a larger --max-model-len")
        if checkpoint is None:
            checkpoint = _remembered(folder)
            return Subject(folder, checkpoint, folder.resolve().name)
        return Subject(folder, checkpoint, Path(checkpoint).name)
    if checkpoint is not None:
        raise SpecError("--checkpoint goes with an engine folder, and this is none", where="ENGINE_OR_MODEL",
                        found=subject, next_step="leave --checkpoint out, or name an engine folder")
    given = {name: value for name, value in limits.items() if value is not None}
    package = importlib.import_module("deepinfer.codegen.cached_engine")
    cached: CachedEngine = package.CachedEngine(subject, resolve_target(None).target, given)
    click.echo(f"compiling into the cache: {shlex.join(cached.command())}", err=True)
    return Subject(cached.folder, subject, Path(subject).name, cached)


def _remembered(engine: Path) -> str | None:
    """The folder that an engine was compiled from, where neither the engine nor the environment names weights."""
    from deepinfer.runtime.checkpoint.checkpoint import LOCAL_VARIABLE
    from deepinfer.runtime.checkpoint.packed import FOLDER as PACKED

    if os.environ.get(LOCAL_VARIABLE) or (engine / PACKED).is_dir():
        return None
    known: str | None = importlib.import_module("deepinfer.codegen.origin").checkpoint_of(engine)
    if known is not None:
        click.echo(f"weights: {known}, which the engine was compiled from", err=True)
    return known
