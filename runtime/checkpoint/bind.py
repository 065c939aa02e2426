"""From a checkpoint to bound parameters: every check a loader makes, in the order in which it is cheap."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from deepinfer.dsl.config import Config
from deepinfer.dsl.params import ParamDecl
from deepinfer.errors import ArtifactError
from deepinfer.runtime import events
from deepinfer.runtime.checkpoint.checkpoint import Checkpoint
from deepinfer.runtime.checkpoint.declared import IgnoredTensors, check_tensors
from deepinfer.runtime.checkpoint.mapping import Weights
from deepinfer.runtime.checkpoint.packed import check_pack, packed_values, read_pack
from deepinfer.runtime.checkpoint.scan import SMALL_TABLES, scan, scan_bytes, tables_left_out

_ABSENT = object()


def bind_weights(checkpoint: Checkpoint, params: Sequence[ParamDecl], model: Mapping[str, Any], *, threads: int = 1,
                 depth: str = "weights", progress: bool = True) -> Weights:
    """The parameters of an engine over a checkpoint's mapped files.

    ``model``: the manifest's ``model`` object (config, ``derive``, ``ignored``). ``depth``: see ``scan``. Raises
    ArtifactError for tensors that are missing, unexpected, of another shape or dtype, or that hold a NaN or an
    infinity. Of packed weights the sums are compared instead (packed.py), unless ``depth`` is ``off``.
    """
    for group in require_tensors(checkpoint, params, model):
        events.info("tensors_ignored", pattern=group.pattern, tensors=len(group.names), bytes=group.bytes,
                    reason=group.reason)
    pack = read_pack(checkpoint.folder)
    derived = packed_values(pack) if pack else derived_values(checkpoint.folder, params, model)
    weights = Weights(checkpoint.places, params, derived)
    if weights.copied.tensors:
        events.warn("tensors_copied", tensors=weights.copied.tensors, bytes=weights.copied.bytes, reason="misaligned")
    if pack is None:
        _scan(weights, depth, threads, progress)
    elif depth != "off":
        with bar("reading packed weights", pack.bytes, progress) as advance:
            check_pack(pack, threads=threads, advance=advance)
    read = depth == "weights" if pack is None else depth != "off"
    weights.tables_in_memory = read and not tables_left_out(weights)
    events.info("weights_bound", checkpoint=checkpoint.name, revision=checkpoint.revision, parameters=len(params),
                copied_bytes=weights.copied.bytes)
    return weights


def _scan(weights: Weights, depth: str, threads: int, progress: bool) -> None:
    left_out = tables_left_out(weights)
    if left_out and depth != "off":
        events.info("tables_not_scanned", bytes=left_out, limit=SMALL_TABLES)
    with bar("checking weights", scan_bytes(weights, depth), progress) as advance:
        scan(weights, depth=depth, threads=threads, advance=advance)


def require_tensors(checkpoint: Checkpoint, params: Sequence[ParamDecl],
                    model: Mapping[str, Any]) -> list[IgnoredTensors]:
    """Names, shapes and dtypes of a checkpoint against an engine's parameters; returns what is left out."""
    ignored = [(i["pattern"], i["reason"]) for i in model["ignored"]]
    return check_tensors(checkpoint.headers, params, ignored, checkpoint.name)


def derived_values(folder: Path, params: Sequence[ParamDecl], model: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    """Parameters that functions of the spec make from the checkpoint's folder (its tokenizer, for instance)."""
    config, made = Config(model["config"]), dict[str, NDArray[Any]]()
    for p in params:
        if p.derive:
            module, _, function = model["derive"][p.derive].partition(":")
            made[p.name] = getattr(importlib.import_module(module), function)(folder, config)
    return made


def require_same_config(engine: Mapping[str, Any], checkpoint: Mapping[str, Any], unread: Mapping[str, str],
                        where: str, rebuild: str) -> None:
    """Raises ArtifactError that names the first key on which two configs differ. ``unread`` keys do not count."""
    difference = next(_differences(engine, checkpoint, unread, ""), None)
    if difference is not None:
        key, of_engine, found = difference
        raise ArtifactError(f"the engine was compiled for another config: {key} differs", where=where,
                            found=_shown(found), allowed=_shown(of_engine),
                            next_step=f"load the checkpoint it was compiled for, or compile again: {rebuild}")


def _differences(a: Mapping[str, Any], b: Mapping[str, Any], unread: Mapping[str, str],
                 path: str) -> Iterator[tuple[str, Any, Any]]:
    for key in sorted({*a, *b}):
        left, right = a.get(key, _ABSENT), b.get(key, _ABSENT)
        if key in unread or left == right:
            continue
        if isinstance(left, Mapping) and isinstance(right, Mapping):
            yield from _differences(left, right, unread, f"{path}{key}.")
        else:
            yield f"{path}{key}", left, right


def _shown(value: Any) -> str:
    text = "no such key" if value is _ABSENT else str(value)
    return text if len(text) <= 80 else text[:77] + "..."


@contextmanager
def bar(what: str, total: int, show: bool) -> Iterator[Any]:
    """A progress bar over bytes on a terminal; yields what to tell the bytes done."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(),
               TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not show or not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.advance(task, done)
