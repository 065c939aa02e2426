"""``pack_weights``: a checkpoint's tensors, checked and laid out for an engine, into ``ENGINE/weights``."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from deepinfer.codegen.cache import sync
from deepinfer.codegen.package.aside import aside_of, remove_leftovers
from deepinfer.disk import room_in
from deepinfer.errors import ArtifactError
from deepinfer.runtime.checkpoint import Checkpoint, fetch_weights
from deepinfer.runtime.checkpoint.bind import bar, bind_weights, derived_values
from deepinfer.runtime.checkpoint.packed import FOLDER, read_pack, write_pack
from deepinfer.runtime.checkpoint.room import Need, require_disk
from deepinfer.runtime.placement import processors

if TYPE_CHECKING:
    from deepinfer.codegen.package.load import EnginePackage


def pack_weights(engine: EnginePackage, checkpoint: Checkpoint | None = None, *, progress: bool = True) -> Path:
    """Pack the weights of a checkpoint (None: the engine's own) for an engine; replaces those that were packed before.

    Every number is looked at as a load does it. Raises ArtifactError for a checkpoint that is not the engine's, is
    damaged, or is the pack itself; PlanError when the disk is full. Whatever fails leaves what was there.
    """
    found = checkpoint or engine.checkpoint()
    if found.folder.resolve() == (engine.path / FOLDER).resolve() or read_pack(found.folder) is not None:
        raise ArtifactError("these weights are packed already", where=str(found.folder),
                            next_step="name the checkpoint that they were packed from")
    remove_leftovers(FOLDER, engine.path)
    need = engine.footprint.sizes.weight_bytes + engine.footprint.sizes.table_bytes
    require_disk(found.name, need, engine.path, "pack", "compile into a folder on a larger disk")
    engine.require_fit(found)
    found = fetch_weights(found, Need(0))
    params, model = engine.interface.params, engine.manifest["model"]
    weights = bind_weights(found, params, model, threads=processors(), progress=progress)
    place = engine.path / FOLDER
    with room_in(engine.path, "free space there"), aside_of(FOLDER, engine.path) as aside:
        with bar("packing weights", need, progress) as advance:
            write_pack(aside, weights, derived_values(found.folder, params, model), found.folder, found.name, advance)
        for file in aside.iterdir():
            sync(file)
        sync(aside)
        old = aside.with_name(aside.name + ".old")
        with contextlib.suppress(FileNotFoundError):
            os.rename(place, old)
        os.rename(aside, place)
        sync(engine.path)
        shutil.rmtree(old, ignore_errors=True)
    Console(stderr=True).print(f"weights packed into {place}", soft_wrap=True, highlight=False)
    return place
