"""The engine process: one line of settings on standard input, then messages; it ends when that input ends.

    python -m deepinfer.runtime.server.engine_process

The front end keeps our standard input open as long as it lives, so an engine never outlives it, even inside a step.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import zmq

from deepinfer.errors import DeepInferError, InternalError
from deepinfer.runtime import events
from deepinfer.runtime.records import machine_identity
from deepinfer.runtime.server import wire
from deepinfer.runtime.server.engine_loop import EngineLoop, tell_all
from deepinfer.runtime.server.garbage import spare_what_was_loaded
from deepinfer.runtime.server.logs import start_logging
from deepinfer.runtime.server.self_check import (
    check_against_record,
    greedy_digest,
    weights_identity,
)
from deepinfer.runtime.server.trace import StepTrace

if TYPE_CHECKING:
    from deepinfer.runtime.llm import LLM
    from deepinfer.runtime.store.settings import StoreSettings


class Compilation(msgspec.Struct, frozen=True):
    """An engine to compile into the cache first; see `codegen.cached_engine`."""

    model: str
    target: str
    options: dict[str, int]


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How to start an engine; the names are those of `LLM`.

    ``endpoint``: where the front end listens. ``records``: folder of the self check's records; None: no check.
    ``prefix_store``: its folder; quota in bytes, retention in seconds by class, backend by name, None: the usual ones.
    ``compile``: makes the engine first. ``profile``: where a trace of the first ``profile_steps`` steps goes.
    """

    endpoint: str
    engine: str
    checkpoint: str | None = None
    max_num_seqs: int | None = None
    num_blocks: int | None = None
    threads: int | None = None
    cpus: str | None = None
    numa: str | None = None
    seed: int | None = None
    prefix_cache: bool = True
    prefix_snapshots: int | None = None
    num_speculative_tokens: int | None = None
    schedule_drafts: bool = True
    decode_stretch: float | None = 2.0
    prefix_store: str | None = None
    store_quota: int | None = None
    store_retention: dict[str, int] | None = None
    store_backend: str | None = None
    records: str | None = None
    log_json: bool = False
    log_level: str = "info"
    compile: Compilation | None = None
    profile_steps: int = 0
    profile: str = ""


def build(settings: EngineSettings) -> LLM:
    """The engine with its weights."""
    from deepinfer.runtime.llm import LLM

    if settings.compile is not None:
        from deepinfer.codegen.cached_engine import CachedEngine

        CachedEngine(settings.compile.model, settings.compile.target, settings.compile.options).make()
    return LLM(settings.engine, settings.checkpoint, max_num_seqs=settings.max_num_seqs,
               num_blocks=settings.num_blocks, threads=settings.threads, cpus=settings.cpus, numa=settings.numa,
               seed=settings.seed,
               prefix_cache=settings.prefix_cache, prefix_snapshots=settings.prefix_snapshots,
               prefix_store=store_settings(settings), num_speculative_tokens=settings.num_speculative_tokens,
               schedule_drafts=settings.schedule_drafts, decode_stretch=settings.decode_stretch,
               progress=not settings.log_json)


def store_settings(settings: EngineSettings) -> StoreSettings | None:
    """The prefix store that was asked for; SpecError where a setting is out of range."""
    if settings.prefix_store is None:
        return None
    from deepinfer.runtime.store.settings import StoreSettings

    given = {"quota": settings.store_quota, "retention": settings.store_retention, "backend": settings.store_backend}
    usual = StoreSettings(Path(settings.prefix_store))
    return replace(usual, **{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]


def serve(settings: EngineSettings, make: Callable[[EngineSettings], LLM]) -> int:
    """Start an engine and serve until the front end says stop. Returns the exit code of docs/errors.md."""
    start = time.monotonic()
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.setsockopt(zmq.LINGER, 2000)
    socket.set_hwm(0)
    socket.connect(settings.endpoint)
    try:
        llm = make(settings)
        with llm:
            _read_forms_vocabulary(llm)
            digest = _engine_digest(settings)
            fingerprint = _check(llm, settings, digest)
            plan, memory = llm.plan, llm.core.memory
            folder = llm.core.engine.checkpoint
            tell_all(socket, wire.Hello(
                plan.model, plan.target, plan.max_model_len, plan.vocab_size, memory.slots.size, memory.blocks.size,
                plan.block_tokens, None if folder is None else str(folder), fingerprint, time.monotonic() - start,
                digest))
            trace = StepTrace(settings.profile_steps, Path(settings.profile)) if settings.profile_steps else None
            spare_what_was_loaded()
            EngineLoop(llm.core, socket, trace).run()
        return 0
    except DeepInferError as error:
        tell_all(socket, wire.Failed(str(error), error.exit_code))
        return error.exit_code
    except Exception as error:
        traceback.print_exc()
        what = " ".join(f"{type(error).__name__}: {error}".split())
        tell_all(socket, wire.Failed(f"the engine failed: {what}", InternalError.exit_code))
        return InternalError.exit_code
    finally:
        socket.close()
        context.term()


def _read_forms_vocabulary(llm: LLM) -> None:
    """So that the first answer with a form does not wait for it."""
    if llm.core.grammars.possible:
        try:
            llm.core.grammars.warm()
        except DeepInferError as error:
            events.warn("no_structured_outputs", reason=str(error))


def _engine_digest(settings: EngineSettings) -> str:
    """The hash in an engine folder's manifest; "" for what is no such folder."""
    manifest = Path(settings.engine) / "manifest.json"
    return str(msgspec.json.decode(manifest.read_bytes())["digest"]) if manifest.is_file() else ""


def _check(llm: LLM, settings: EngineSettings, digest_of_engine: str) -> str:
    """Run the self check; a name for engine and weights that answers carry as `system_fingerprint`."""
    digest = greedy_digest(llm.core)
    llm.core.metrics.clear()
    weights = weights_identity(llm.core.engine.checkpoint)
    if settings.records is not None:
        engine = digest_of_engine or settings.engine
        check_against_record(digest, Path(settings.records), {
            "engine": engine, "weights": weights, "machine": machine_identity(), "threads": str(settings.threads)})
    return f"fp_{digest[:10]}"


def _end_with_the_front_end() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


def main(make: Callable[[EngineSettings], LLM] = build) -> None:
    """Read the settings and serve. ``make`` builds the engine."""
    settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=EngineSettings)
    threading.Thread(target=_end_with_the_front_end, daemon=True, name="front-end-watch").start()
    start_logging(settings.log_level, as_json=settings.log_json)
    code = serve(settings, make)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # the watching thread sits in a read that nothing can end


if __name__ == "__main__":
    main()
