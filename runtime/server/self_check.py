"""A short greedy answer that must be the same at every start: broken weights or kernels do not get to serve."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from deepinfer.errors import ArtifactError, InternalError
from deepinfer.runtime import events
from deepinfer.runtime.engine_core import EngineCore
from deepinfer.runtime.records import record_file, write_record
from deepinfer.runtime.sampling_params import SamplingParams

_PROMPT_TOKENS, _ANSWER_TOKENS = 48, 16


def greedy_digest(core: EngineCore) -> str:
    """SHA-256 of the greedy answer to a fixed prompt; it also touches every kernel of prefill and decoding once."""
    plan = core.plan
    room = plan.max_model_len - _ANSWER_TOKENS - 1
    prompt = [(7 + 13 * i) % plan.vocab_size for i in range(max(1, min(_PROMPT_TOKENS, room)))]
    answer = max(1, min(_ANSWER_TOKENS, plan.max_model_len - len(prompt)))
    params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True, detokenize=False, seed=0)
    request = core.make("self-check", prompt, params)
    core.add(request)
    while not request.finished:
        if not core.step():
            raise InternalError("the self check waits and nothing runs")
    out = request.outputs[0]
    if out.error is not None:
        raise ArtifactError("the engine's first answer failed", found=out.error,
                            next_step="check the checkpoint's files, then compile the engine again")
    return hashlib.sha256(",".join(map(str, out.token_ids)).encode()).hexdigest()


def check_against_record(digest: str, folder: Path, identity: dict[str, str]) -> bool:
    """Compare a digest with the one recorded for the same identity; the first start records. True: it was recorded.

    Args:
        folder: where records lie. ``identity``: engine, weights and machine, whatever the answer depends on.

    Raises:
        ArtifactError: the answer is another one than before.
    """
    file = record_file(folder, identity)
    try:
        recorded = json.loads(file.read_text(encoding="utf-8"))["digest"]
    except (OSError, ValueError, KeyError, TypeError):
        write_record(file, {"digest": digest, **identity})
        events.info("self_check_recorded", digest=digest[:16], file=file)
        return True
    if recorded != digest:
        raise ArtifactError(
            "the engine no longer gives the answer that it gave at its first start", where=file, found=digest[:16],
            allowed=str(recorded)[:16],
            next_step="check memory and files of this machine; if the change is wanted, remove the record")
    events.info("self_check_passed", digest=digest[:16])
    return False


def weights_identity(checkpoint: Path | None) -> str:
    """SHA-256 over name, size and header of the weight files; cheap, and another one for another checkpoint."""
    seen = hashlib.sha256()
    for file in sorted(checkpoint.glob("*.safetensors")) if checkpoint is not None else ():
        with file.open("rb") as f:
            length = int.from_bytes(f.read(8), "little")
            seen.update(f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}\n".encode() + f.read(length))
    return seen.hexdigest()
