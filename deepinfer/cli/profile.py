"""`deepinfer profile`: steps of an engine on this machine, launch by launch, beside the machine's limits."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deepinfer.accelerator import backend_of
from deepinfer.cli.failure import Command
from deepinfer.cli.placement import placement_options
from deepinfer.disk import room_in
from deepinfer.errors import ArtifactError, SpecError
from deepinfer.runtime.placement import Placement

if TYPE_CHECKING:
    from rich.console import Console

    from deepinfer.codegen.report.model import EngineFacts, Measured, Shape

_DEFAULT_CONTEXT, _DEFAULT_STEPS = 1024, 10
_ELSEWHERE = "free space there or name another file"
_FILE_WIDTH = 120  # of output that no terminal wraps


@click.command(cls=Command, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("engine", metavar="ENGINE", type=click.Path(path_type=Path))
@click.option("--checkpoint", metavar="DIR_OR_HUB_ID", help="Weights to run with. Default: the engine's own.")
@click.option("--decode", metavar="N,...", default="1", show_default=True,
              help="Steps of one new token for each of N sequences.")
@click.option("--prefill", metavar="ROWS,...", default="", help="Steps of so many rows of one prompt.")
@click.option("--context", type=click.IntRange(min=0), metavar="TOKENS",
              help=f"Tokens before the decoded ones. Default: {_DEFAULT_CONTEXT}, or what the engine can hold.")
@click.option("--steps", type=click.IntRange(min=1), default=_DEFAULT_STEPS, show_default=True,
              help="Steps of each kind; medians are shown.")
@placement_options
@click.option("--trace", "trace_file", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              default=Path("profile.perfetto.json"), show_default=True, help="Trace for ui.perfetto.dev.")
@click.option("--report", "report_file", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="Also write the engine's report with the measured times.")
def main(engine: Path, checkpoint: str | None, decode: str, prefill: str, context: int | None, steps: int,
         threads: int | None, cpus: str | None, numa: str | None, trace_file: Path, report_file: Path | None) -> None:
    """Run steps of ENGINE with random tokens, and show what each kernel takes beside its least time.

    The least time of a kernel is the larger of its bytes over the rate at which this machine reads
    memory and its multiply-adds over the rate at which it multiplies; both rates are measured first.

    \b
    Examples:
      deepinfer profile engines/my_engine --checkpoint DIR
      deepinfer profile engines/my_engine --checkpoint DIR --decode 1,8 --prefill 512 --report profile.html
    """
    from rich.console import Console

    module: Any = importlib.import_module("deepinfer.codegen.report.profile")
    model: Any = importlib.import_module("deepinfer.codegen.report.model")
    folder = engine.expanduser()
    facts: EngineFacts = importlib.import_module("deepinfer.codegen.report.read").engine_facts(folder)
    if backend_of(facts.manifest["target"]).runner != "host":
        raise SpecError("only engines that run on the host's processors are measured launch by launch",
                        where=str(folder), found=f"an engine for {facts.manifest['target']}", allowed="cpu",
                        next_step="take report.html in the engine, which predicts, and the vendor's profiler")
    _require_place("--trace", trace_file)
    _require_place("--report", report_file)
    package = importlib.import_module("deepinfer").load_engine(folder)
    longest = package.plan.max_model_len
    before = min(_DEFAULT_CONTEXT, longest - 1) if context is None else context
    shapes = [model.decoding(n, before) for n in _counts("--decode", decode)]
    shapes += [model.prefilling(n, n) for n in _counts("--prefill", prefill)]
    if not shapes:
        raise SpecError("there is no step to run", where="--decode, --prefill", next_step="name at least one")
    needed = module.need(package.plan, shapes)
    console = Console(stderr=True)
    running = package.start(checkpoint, slots=needed.slots, blocks=needed.blocks, threads=threads,
                            placement=Placement.wanted(cpus, numa))
    try:
        with console.status("measuring the machine"):
            roof = importlib.import_module("deepinfer.codegen.report.machine").measured_roof(
                package.lib, running.threads)
        measured = _measured(module.Profiler(package.plan, running, shapes), shapes, steps, roof, console)
    finally:
        running.close()
    whole: EngineFacts = model.EngineFacts(facts.manifest, facts.explanation, tuple(measured))
    out = Console(highlight=False, markup=False)
    if not out.is_terminal:
        out.width = _FILE_WIDTH
    out.print(f"{roof.machine}: {roof.read / 1e9:.1f} GB/s, {roof.multiply / 1e9:.0f} G multiply-adds/s ({roof.basis})",
              soft_wrap=True)
    for m in measured:
        _print(out, whole, m)
    with room_in(trace_file, _ELSEWHERE):
        module.trace(trace_file, whole)
    out.print(f"trace {trace_file}: open it at ui.perfetto.dev", soft_wrap=True)
    if report_file is not None:
        text = importlib.import_module("deepinfer.codegen.report").render_report(
            facts.manifest, facts.explanation, measured)
        with room_in(report_file, _ELSEWHERE):
            report_file.write_text(text, encoding="utf-8")
        out.print(f"report {report_file}", soft_wrap=True)


def _require_place(option: str, file: Path | None) -> None:
    """Said before the steps run, which may take minutes: a file of that name can be written."""
    if file is not None and not (file.parent.is_dir() and os.access(file.parent, os.W_OK | os.X_OK)):
        raise ArtifactError("there is no such folder to write in", where=option, found=str(file.absolute().parent),
                            next_step="make it, or name another file")


def _counts(option: str, text: str) -> list[int]:
    try:
        counts = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        counts = [0]
    if any(n < 1 for n in counts):
        raise SpecError("a list of positive numbers is meant", where=option, found=text, allowed="such as 1,8")
    return counts


def _measured(profiler: Any, shapes: list[Shape], steps: int, roof: Any, console: Console) -> list[Measured]:
    from rich.progress import Progress

    found = []
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        for shape in shapes:
            task = progress.add_task(shape.name, total=steps + 1)
            found.append(profiler.measure(shape, steps, roof, lambda task=task: progress.advance(task)))
    return found


def _print(out: Console, facts: EngineFacts, m: Measured) -> None:
    from rich.table import Table

    from deepinfer.codegen.report.charts import duration, number, size

    for groups, name in ((facts.by_family(m.entry), "family"), (facts.by_kind(m.entry), "layers")):
        table = Table(name, *("launches", "bytes", "multiply-adds", "least", "measured", "of the roof", "of the step"),
                      title=m.shape.name, title_justify="left", box=None)
        for column in table.columns[1:]:
            column.justify = "right"
        accounts = facts.accounts(m.shape, groups, m.roof, m)
        total = sum(a.measured or 0 for a in accounts)
        for a in accounts:
            share = f"{a.share:.0%}" if a.share else "-"
            table.add_row(a.name, str(a.launches), size(a.bytes), number(a.macs), duration(a.least),
                          duration(a.measured), share, f"{(a.measured or 0) / total:.1%}")
        out.print(table)
    every = facts.accounts(m.shape, {"all": facts.steps(m.entry)}, m.roof, m)[0]
    out.print(f"{m.shape.name}: {duration(every.measured)} in kernels, {every.share or 0:.0%} of the roof "
              f"({size(every.bytes)}, {number(every.macs)} multiply-adds)", soft_wrap=True)
