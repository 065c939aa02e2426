"""``compile_engine``: checkpoint folder or hub id -> engine folder, with everything a person wants to see on the
way."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from time import perf_counter

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from deepinfer.accelerator import backend_of, built_targets
from deepinfer.backends.base import ALL, HOST, Backend, Binary
from deepinfer.codegen.census import layer_kinds
from deepinfer.codegen.lower import Plan, lower
from deepinfer.codegen.origin import remember
from deepinfer.codegen.package import EngineContents, check_out, load_engine, pack_weights, write_engine
from deepinfer.codegen.plan.barriers import barriers, decode_rows
from deepinfer.dsl.config import Config
from deepinfer.dsl.model import EngineOptions, Model
from deepinfer.errors import ArtifactError, SpecError
from deepinfer.model_specs.registry import build_model
from deepinfer.runtime.checkpoint import Checkpoint, open_checkpoint


@dataclass(frozen=True)
class Compiled:
    """What ``compile_engine`` made. ``cache_hits``, ``cache_misses``: compiled parts (a kernel in one instruction set,
    the library of all) that were in the cache, or had to be made. ``for_device``: whether the target's compiler made
    the kernels; else they are sources, which a stand-in for the device runs."""

    folder: Path
    wheel: Path | None
    plan: Plan
    kernels: int
    cache_hits: int
    cache_misses: int
    seconds: float
    for_device: bool = True


def compile_engine(*, model: str, out: Path, target: str, options: EngineOptions | None = None,
                   revision: str | None = None, wheel: bool = False, dump_ir: Path | None = None,
                   jobs: int | None = None, isa: str = ALL, spec: str | None = None, console: Console | None = None,
                   workspace_bytes: int | None = None, pack: bool = False) -> Compiled:
    """Compile a model for one target into the engine folder ``out``.

    ``model``: a folder with config.json (weights are not read; their headers decide the storage formats) or a hub id.
    ``isa``: ``all`` instruction sets of the target, or ``host``: the best one of this machine, which takes less time
    and gives an engine that other machines may not run. ``spec``: dotted name of a spec module, for models that are
    not registered; ``workspace_bytes``: memory of the values inside a row loop (plan/row_loops.py), None: as the
    target's capabilities say. ``pack``: also lay
    the weights out beside the engine, checked once (package/pack.py). Raises SpecError, PlanError, ToolchainError,
    ArtifactError; nothing is left behind half-written.
    """
    start = perf_counter()
    show = console or Console(stderr=True)
    check_out(out)
    if isa not in (ALL, HOST):
        raise SpecError("there is no such choice of instruction sets", where="isa", found=isa, allowed=f"{ALL}, {HOST}")
    opt = options or EngineOptions()
    checkpoint = open_checkpoint(model, revision=revision)
    if pack and not checkpoint.headers:
        raise ArtifactError("there are no weights to pack", where=checkpoint.name, found="a config without weights",
                            allowed="a checkpoint with its safetensors files",
                            next_step="compile without --pack-weights")
    described = describe_model(checkpoint, opt, spec)
    _print_arguments(show, checkpoint, described, out, target)
    backend = load_backend(target)
    with _phases(show) as phase:
        plan = lower(described, backend, target, dump=dump_ir, on_pass=phase.named, workspace_bytes=workspace_bytes)
        binary = _compile_kernels(backend, plan, jobs or os.cpu_count() or 1, isa, phase)
        phase.named("package")
        contents = EngineContents(plan=plan, binary=binary, checkpoint=checkpoint,
                                  roofs=backend.capabilities(target).roofs)
        folder, wheel_file = write_engine(contents, out, wheel=wheel)
    remember(folder, model)
    done = Compiled(folder, wheel_file, plan, len(plan.lowered.specs), binary.cache_hits, binary.cache_misses,
                    perf_counter() - start, binary.compiled)
    print_result(show, done)
    if pack:
        pack_weights(load_engine(folder), checkpoint, progress=show.is_terminal)
    return done


def load_backend(target: str) -> Backend:
    """The compiling side of the backend that serves a target; SpecError when it is not built."""
    announced = backend_of(target)
    if not announced.built:
        raise SpecError("this target cannot be compiled for yet", where="target", found=target, allowed=built_targets())
    module = import_module(f"deepinfer.backends.{announced.name}.backend")
    backend: Backend = module.backend(target) if hasattr(module, "backend") else module.BACKEND
    return backend


def describe_model(checkpoint: Checkpoint, options: EngineOptions, spec: str | None = None) -> Model:
    """The spec's Model for a checkpoint's config and headers."""
    return build_model(Config(checkpoint.config), options, checkpoint.headers or None, spec=spec)


def _compile_kernels(backend: Backend, plan: Plan, jobs: int, isa: str, phase: _Phase) -> Binary:
    sources = plan.lowered.sources
    phase.counted("compile kernels", len(sources))
    return backend.compile(sources, jobs=jobs, isa=isa, progress=lambda _: phase.step())


class _Phase:
    """One line of progress that names the pass at work, and a bar while kernels compile."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.task = progress.add_task("start", total=None)

    def named(self, name: str) -> None:
        self.progress.update(self.task, description=name, total=None, completed=0)

    def counted(self, name: str, total: int) -> None:
        self.progress.update(self.task, description=name, total=total, completed=0)

    def step(self) -> None:
        self.progress.advance(self.task)


@contextmanager
def _phases(console: Console) -> Iterator[_Phase]:
    columns = (SpinnerColumn(), TextColumn("{task.description:18}"), BarColumn(), TextColumn("{task.completed:.0f}"),
               TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield _Phase(progress)


def _print_arguments(show: Console, checkpoint: Checkpoint, model: Model, out: Path, target: str) -> None:
    show.print(f"[bold]compiling[/] {model.name} from {checkpoint.name} for {target} into {out}")
    for key, value in model.options.as_dict().items():
        if value is not None:
            show.print(f"  {key:24} {value}", highlight=False)


def print_result(show: Console, done: Compiled) -> None:
    """Passes with times, kernels per layer kind, memory by purpose, total time."""
    table, specs = done.plan.lowered.table, done.plan.lowered.specs
    passes = Table("pass", "seconds", "what", title="passes", title_justify="left", box=None)
    for p in done.plan.passes:
        passes.add_row(p.name, f"{p.seconds:.2f}", p.note)
    show.print(passes)
    families = [s.family for s in specs]
    kinds = Table("layers", "count", "kernels a layer", "by family", title="kernels of one step",
                  title_justify="left", box=None)
    for k in layer_kinds(table, families, "step"):
        kinds.add_row(k.layers, str(k.count), str(k.launches), ", ".join(f"{n} {f}" for f, n in k.families.items()))
    show.print(kinds)
    entry = table.entries["step"]
    if done.plan.target == "cpu":  # the others' launches are met by their device
        few, many = (barriers(entry, decode_rows(entry, n)) for n in (1, 8))
        show.print(f"barriers: {few} in a decode step of one sequence, {many} of eight, for {len(entry.launches)} "
                   f"launches and commits")
    schedules = Counter(x for s in done.plan.lowered.sources if (x := getattr(s, "schedule", "")))
    if schedules:
        show.print("schedules: " + ", ".join(f"{n} {what}" for what, n in sorted(schedules.items(), reverse=True)))
    arena = max(e.arena_bytes for e in table.entries.values())
    slot = sum(s.rows * s.record_bytes for s in table.states if s.kind == "ring")
    block = sum(s.rows * s.record_bytes for s in table.states if s.kind == "paged")
    show.print(f"memory: arena {arena / 2**20:.1f} MiB, {slot / 2**10:.1f} KiB a sequence, "
               f"{block / 2**10:.1f} KiB a block of {table.block_tokens} tokens")
    show.print(f"[bold]engine[/] {done.folder}: {done.kernels} kernels, {done.cache_hits} of "
               f"{done.cache_hits + done.cache_misses} parts from the cache; "
               f"{done.seconds:.1f} s" + (f"; wheel {done.wheel}" if done.wheel else ""))
    if not done.for_device:
        show.print(f"not compiled for {done.plan.target}: the target's compiler is not here, so the engine holds "
                   f"sources only; {backend_of(done.plan.target).stand_in}=1 runs them on a stand-in, slowly")
