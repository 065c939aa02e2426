"""``engine_facts``: the figures of an engine that exists."""

from __future__ import annotations

import json
from pathlib import Path

from deepinfer.codegen.package.manifest import EXPLANATION, read_manifest, rebuild_command
from deepinfer.codegen.report.model import EngineFacts
from deepinfer.errors import ArtifactError


def engine_facts(folder: Path) -> EngineFacts:
    """The facts of an engine folder, whose files are checked; ArtifactError as ``read_manifest`` raises it."""
    manifest = read_manifest(folder)
    explanation = json.loads((folder / EXPLANATION).read_bytes())
    if "entries" not in explanation:
        raise ArtifactError("the engine's explanation is an older version's", where=str(folder / EXPLANATION),
                            found=f"written by version {manifest['version']}",
                            next_step=f"compile again: {rebuild_command(manifest, folder)}")
    return EngineFacts(manifest, explanation)
