"""What cached bytes hang on: weights, numerics and cache plan, as digests that every host comes to by itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepinfer.errors import ArtifactError
from deepinfer.runtime.plan import EnginePlan
from deepinfer.runtime.prefix.chain import digest

_SAMPLES, _SAMPLE_BYTES = 64, 4096  # of each file of weights
# Options of an engine that change no cached byte: limits, how far prompts are cut, and how far the host lags.
_NOT_NUMERICS = ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "replay", "host_lag", "ring_slack")


def weights_digest(folder: Path) -> bytes:
    """[16] of a checkpoint: its config, and of every file of weights name, size, beginning and 64 samples.

    Reading 500 GB to the last byte would take longer than what a prefix cache saves; two trainings of one model differ
    everywhere, and so in the samples.
    """
    parts = [(folder / "config.json").read_bytes()]
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        parts += [file.name.encode(), size.to_bytes(8, "little")]
        with file.open("rb") as data:
            for i in range(_SAMPLES):
                data.seek(i * max(0, size - _SAMPLE_BYTES) // (_SAMPLES - 1))
                parts.append(data.read(_SAMPLE_BYTES))
    return digest(*parts)


def identity_of(plan: EnginePlan, options: Mapping[str, Any], folder: Path | None) -> tuple[bytes, bytes, bytes]:
    """Digests of weights, numerics and cache plan of an engine.

    Args:
        options: those that the engine was compiled with. ``folder``: of its checkpoint.

    Raises ArtifactError when there is no checkpoint to tell weights by.
    """
    if folder is None:
        raise ArtifactError("a prefix store needs a checkpoint to tell weights by", where="prefix_store",
                            next_step="name the checkpoint, or leave prefix_store out")
    numerics = {k: v for k, v in options.items() if k not in _NOT_NUMERICS}
    cached = [plan.block_tokens, *((s.name, s.rows, s.record_bytes, s.ratio) for s in plan.paged)]
    return (weights_digest(folder),
            digest(json.dumps([plan.model, plan.target, numerics], sort_keys=True).encode()),
            digest(json.dumps(cached).encode()))
