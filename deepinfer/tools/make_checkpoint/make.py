"""Config -> model -> tensors -> folder."""

from __future__ import annotations

import copy
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from deepinfer.codegen.cache import sync
from deepinfer.dsl.config import Config
from deepinfer.dsl.model import EngineOptions, Model, trace
from deepinfer.dsl.params import ParamDecl, StoredTensor
from deepinfer.errors import ArtifactError, PlanError
from deepinfer.model_specs.registry import build_model
from deepinfer.runtime.checkpoint.room import free_disk, gigabytes
from deepinfer.tools.make_checkpoint.codes import scale_bytes, tensor_bytes
from deepinfer.tools.make_checkpoint.laws import UNUSED, Law, laws_of
from deepinfer.tools.make_checkpoint.shards import plan_shards, write_shards
from deepinfer.tools.make_checkpoint.vocabulary import LEAST_VOCABULARY, make_tokenizer

STORAGES = ("official", "bf16", "f32")
_TEXT_BYTES = 64 << 20  # room for config, index and tokenizer


@dataclass(frozen=True)
class Made:
    """What was written. ``tokenizer``: False when the vocabulary is too small for one."""

    tensors: int
    bytes: int
    files: int
    tokenizer: bool


@dataclass(frozen=True)
class MadeTensor:
    """One tensor to make. ``codes``: for a scale, the dtype of the codes it belongs to."""

    stored: StoredTensor
    law: Law
    below: int = 0
    codes: str = ""


def make_checkpoint(config_file: Path, out: Path, *, seed: int = 0, shard_bytes: int = 4 * 10**9,
                    storage: str = "official", tokenizer: Path | None = None, spec: str | None = None,
                    console: Console | None = None) -> Made:
    """Write a random checkpoint into ``out``, complete or not at all; see ``--help`` for the arguments.

    Raises SpecError for a config that no spec takes, PlanError when the disk is too small, ArtifactError when ``out``
    holds something.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ArtifactError("the folder holds something already", where=str(out), next_step="name a new folder")
    config = Config.load(config_file)
    model, tensors = describe_tensors(_stored_config(config.raw, storage), storage, spec)
    total = sum(t.stored.nbytes for t in tensors.values())
    if total + _TEXT_BYTES > free_disk(out):
        raise PlanError("the checkpoint does not fit on the disk", where=str(out), found=gigabytes(total),
                        allowed=f"{gigabytes(free_disk(out))} free", next_step="take a smaller config or another disk")
    words = tokenizer.read_text(encoding="utf-8") if tokenizer else _tokenizer(model)
    shards = plan_shards({name: t.stored for name, t in tensors.items()}, shard_bytes)

    def make(name: str) -> Iterator[NDArray[np.uint8]]:
        t = tensors[name]
        if t.codes:
            return scale_bytes(t.stored, t.law, t.codes, seed, name)
        return tensor_bytes(t.stored, t.law, seed, name, t.below)

    out.absolute().parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{out.name}.making-", dir=out.absolute().parent))
    try:
        aside.chmod(0o755)
        (aside / "config.json").write_text(json.dumps(model.config.raw, indent=2) + "\n", encoding="utf-8")
        if words:
            (aside / "tokenizer.json").write_text(words, encoding="utf-8")
        with _bar(console) as bar:
            task = bar.add_task("making weights", total=total)
            write_shards(aside, shards, make, lambda n: bar.advance(task, n))
        sync(aside)
        os.rename(aside, out)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return Made(len(tensors), total, len(shards), bool(words))


def _bar(console: Console | None) -> Progress:
    return Progress(TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(),
                    TimeRemainingColumn(), console=console, disable=console is None or not console.is_terminal)


def _stored_config(raw: dict[str, Any], storage: str) -> dict[str, Any]:
    config = copy.deepcopy(raw)
    if storage != "official":
        config.pop("quantization_config", None)
    return config


def describe_tensors(raw: dict[str, Any], storage: str, spec: str | None) -> tuple[Model, dict[str, MadeTensor]]:
    """The traced model of a config, and every tensor of its checkpoint by name."""
    options = EngineOptions(cache_format="f32", act_format="f32")  # no weight depends on them; these fit any size
    model = build_model(Config(raw), options, None, spec)
    program = trace(model)
    if storage != "official":
        headers = {name: StoredTensor(storage.upper(), p.shape) for p in model.params.declared.values()
                   for name in p.names if not p.derive and p.dtype.name != "i64"}
        if storage == "bf16":  # what the official checkpoint keeps in f32 stays so
            headers |= {n: p.stored() for p in model.params.declared.values() if p.dtype.name == "f32" for n in p.names}
        model = build_model(Config(raw), options, headers, spec)
        program = trace(model)
    laws = laws_of(program)
    tensors: dict[str, MadeTensor] = {}
    for p in model.params.declared.values():
        if not p.derive:
            tensors |= _tensors(p, laws[p.name])
    for ignored in model.ignored:
        tensors |= {name: MadeTensor(t, UNUSED) for name, t in ignored.tensors.items()}
    return model, tensors


def _tensors(p: ParamDecl, law: Law) -> dict[str, MadeTensor]:
    found = {name: MadeTensor(p.stored(), law, p.below) for name in p.names}
    if p.scale_names:
        found |= {name: MadeTensor(p.stored_scale(), law, codes=p.stored().dtype) for name in p.scale_names}
    return found


def _tokenizer(model: Model) -> str:
    """Text of a tokenizer.json; nothing for a vocabulary too small for bytes that no token classes are made from."""
    derived = any(p.derive == "token_classes" for p in model.params.declared.values())
    classes = model.config.raw["text_config"]["engram_compressed_vocab_size"] if derived else None
    if classes is None and model.vocab_size < LEAST_VOCABULARY:
        return ""
    return make_tokenizer(model.config.raw, model.vocab_size, classes)
