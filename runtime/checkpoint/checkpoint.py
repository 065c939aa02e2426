"""A checkpoint: its folder, config and tensor headers, from a local folder or from the hub."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from deepinfer.dsl.params import StoredTensor
from deepinfer.errors import ArtifactError, SpecError
from deepinfer.runtime import events
from deepinfer.runtime.checkpoint import hub
from deepinfer.runtime.checkpoint.headers import Place, read_places
from deepinfer.runtime.checkpoint.room import Need, require_memory
from deepinfer.runtime.checkpoint.variants import refuse_variants

LOCAL_VARIABLE = "DEEPINFER_HF_MODEL_DIR"
_CONFIG, _QUANT = "config.json", "hf_quant_config.json"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as far as it is known here.

    Args:
        name: what was asked for, a folder or a hub id.
        folder: local folder with config and tokenizer, and with the weights when ``places`` has them.
        config: ``config.json``.
        headers: dtype and shape of every tensor; {} for a folder with a config only.
        places: where tensors lie on this disk; {} when the weights are not here.
        revision: commit of the hub that was resolved; None for a folder.
        asked: branch, tag or commit that was asked for.
    """

    name: str
    folder: Path
    config: dict[str, Any]
    headers: Mapping[str, StoredTensor] = field(default_factory=dict)
    places: Mapping[str, Place] = field(default_factory=dict)
    revision: str | None = None
    asked: str | None = None


def open_checkpoint(model: str | Path, *, revision: str | None = None) -> Checkpoint:
    """The checkpoint of a local folder (or of the config.json in it) or of a hub id, without its weights.

    ``revision``: branch, tag or commit of a hub id; None: its main branch. Of a hub checkpoint config, tokenizer and
    headers are fetched. The hub is reached through huggingface_hub, which honours HF_TOKEN, HF_HOME, HF_HUB_OFFLINE and
    HF_ENDPOINT. With ``DEEPINFER_HF_MODEL_DIR`` a hub id means the copy in that folder: the folder itself, or ``<id>``
    or the last part of it inside.

    Raises ArtifactError for absent or damaged files, SpecError for a variant that is not read.
    """
    local = _local(str(model))
    if local is not None:
        if revision is not None and Path(str(model)).exists():
            raise SpecError("a revision belongs to a hub id, this is a folder", where=str(model), found=revision,
                            next_step="leave --revision out")
        return _open_folder(str(model), local)
    if not _HUB_ID.fullmatch(str(model)):
        raise ArtifactError("there is no such folder", where=str(model), allowed="a checkpoint folder or a hub id",
                            next_step="check the path; a hub id reads ORGANISATION/NAME")
    return _open_hub(str(model), revision)


def fetch_weights(checkpoint: Checkpoint, need: Need | None = None) -> Checkpoint:
    """The checkpoint with its weights on this disk.

    ``need``: bytes that serving it takes; compared with memory before anything is fetched, as the download is with the
    free disk. Raises PlanError when it does not fit, ArtifactError when there are no weights.
    """
    if need is not None:
        require_memory(checkpoint.name, need)
    if checkpoint.places:
        return checkpoint
    if checkpoint.revision is None:
        raise ArtifactError("the folder has no weights", where=checkpoint.name, found=_CONFIG,
                            allowed="model.safetensors, or model.safetensors.index.json with its shards",
                            next_step="fetch the whole checkpoint")
    folder = hub.fetch_weights(hub.resolve(checkpoint.name, checkpoint.asked), checkpoint.revision)
    places = read_places(folder)
    return replace(checkpoint, folder=folder, places=places, headers={n: p.tensor for n, p in places.items()})


def _local(model: str) -> Path | None:
    """The folder that a name means; None for a hub id that is to be fetched."""
    path = Path(model).expanduser()
    if path.exists():
        return path.parent if path.name == _CONFIG else path
    base = os.environ.get(LOCAL_VARIABLE, "")
    if not base or not _HUB_ID.fullmatch(model):
        return None
    root = Path(base).expanduser()
    found = [p for p in (root / model, root / model.rpartition("/")[2], root) if (p / _CONFIG).is_file()]
    if not found:
        raise ArtifactError("the folder holds no copy of the checkpoint", where=LOCAL_VARIABLE, found=str(root),
                            allowed=f"a folder with {_CONFIG}, or with {model} in it",
                            next_step=f"correct {LOCAL_VARIABLE}, or unset it to use the hub")
    events.info("checkpoint_local", model=model, folder=found[0])
    return found[0]


def _open_folder(name: str, folder: Path) -> Checkpoint:
    if not folder.is_dir():
        refuse_variants({}, [folder.name], name)
        raise ArtifactError("a checkpoint is a folder", where=name, found="a file", allowed="a folder with config.json")
    files = sorted(p.name for p in folder.iterdir())
    config = _read_config(folder) if _CONFIG in files else {}
    quant = (folder / _QUANT).read_text(encoding="utf-8", errors="replace") if _QUANT in files else None
    refuse_variants(config, files, name, quant)
    if _CONFIG not in files:
        raise ArtifactError("the folder has no config.json", where=name, next_step="give the folder of a checkpoint")
    places = read_places(folder)
    return Checkpoint(name, folder, config, {n: p.tensor for n, p in places.items()}, places)


def _open_hub(name: str, revision: str | None) -> Checkpoint:
    found = hub.resolve(name, revision)
    events.info("checkpoint_resolved", model=name, asked=revision or "main", revision=found.commit)
    folder = hub.fetch_texts(found)
    config = _read_config(folder) if (folder / _CONFIG).is_file() else {}
    quant = (folder / _QUANT).read_text(encoding="utf-8") if (folder / _QUANT).is_file() else None
    refuse_variants(config, found.files, name, quant)
    if not config:
        raise ArtifactError("the repository has no config.json", where=name, next_step="name a model checkpoint")
    return Checkpoint(name, folder, config, hub.fetch_headers(found, folder), revision=found.commit, asked=revision)


def _read_config(folder: Path) -> dict[str, Any]:
    file = folder / _CONFIG
    try:
        config = json.loads(file.read_bytes())
    except (ValueError, UnicodeDecodeError) as error:
        raise SpecError(f"config.json is not JSON ({error})", where=str(file)) from None
    if not isinstance(config, dict):
        raise SpecError("config.json does not hold an object", where=str(file), found=type(config).__name__)
    return config
