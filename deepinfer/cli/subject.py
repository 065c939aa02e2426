"""What `serve` and `chat` run: an engine folder as it is, or a model that is compiled into the cache first."""

from __future__ import annotations

import hashlib
import importlib
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from deepinfer.accelerator import resolve_target
from deepinfer.errors import SpecError


@dataclass(frozen=True)
class Subject:
    """What is served: an engine folder and the checkpoint for it, None for the engine's own."""

    engine: Path
    checkpoint: str | None
    name: str


def resolve_subject(subject: str, checkpoint: str | None, limits: Mapping[str, Any]) -> Subject:
    """The engine to run; a model is compiled first.

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
        return Subject(folder, checkpoint, Path(checkpoint).name if checkpoint else folder.resolve().name)
    if checkpoint is not None:
        raise SpecError("--checkpoint goes with an engine folder, and this is none", where="ENGINE_OR_MODEL",
                        found=subject, next_step="leave --checkpoint out, or name an engine folder")
    return Subject(_compiled(subject, limits), subject, Path(subject).name)


def _compiled(model: str, limits: Mapping[str, Any]) -> Path:
    """Compile a model into the cache; what is there already is not compiled again."""
    from deepinfer.backends.base import HOST
    from deepinfer.codegen.cache import cache_root
    from deepinfer.dsl.model import EngineOptions

    given = {name: limits[name] for name in ("max_model_len", "max_num_seqs") if limits[name] is not None}
    choice = resolve_target(None)
    # for this machine alone: the cache is its own, and it takes half the time
    flags = ["--isa", HOST, *_flags(given)]
    place = str(Path(model).resolve()) if Path(model).is_dir() else model
    mark = hashlib.sha256("\n".join([place, choice.target, *flags]).encode()).hexdigest()[:12]
    name = re.sub(r"[^a-z0-9]+", "_", Path(model).name.lower()).strip("_")
    out = cache_root() / "engines" / f"engine_{name}_{mark}"  # a name that can be imported, whatever the model's
    command = ["deepinfer-compile", "--target", choice.target, "--model", model, *flags, "--out", str(out)]
    click.echo(f"compiling into the cache: {shlex.join(command)}", err=True)
    codegen: Any = importlib.import_module("deepinfer.codegen")
    codegen.compile_engine(model=model, out=out, target=choice.target, isa=HOST,
                           options=EngineOptions(**given))
    return out


def _flags(options: Mapping[str, Any]) -> list[str]:
    return [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", str(value))]
