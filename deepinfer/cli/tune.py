"""`deepinfer tune`: measures schedules of kernels on a device and writes the database that the compiler replays."""

from __future__ import annotations

import importlib
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from deepinfer.accelerator import resolve_target
from deepinfer.cli.failure import Command
from deepinfer.cli.targets import target_option
from deepinfer.dsl.model import EngineOptions
from deepinfer.errors import SpecError


@click.command(cls=Command, context_settings={"help_option_names": ["-h", "--help"]})
@target_option
@click.option("--model", required=True, metavar="DIR_OR_HUB_ID",
              help="Folder with config.json, or a hub id: its contractions are tuned. Weights are not read.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="Database to write. Compile with DEEPINFER_TUNING=FILE to use it.")
@click.option("--candidates", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="Only compile the candidates into FILE, on a machine without a device; or, with --times, the file "
              "that was measured.")
@click.option("--times", type=click.Path(path_type=Path, dir_okay=False, exists=True), metavar="FILE",
              help="Times of --candidates that measure.py took on the device; nothing is measured here.")
@click.option("--only", default="", metavar="TEXT", help="Kernels whose name has TEXT, instead of all.")
@click.option("--jobs", type=click.IntRange(min=1), metavar="N", help="Compilers to run at once. Default: all cores.")
def main(target: str | None, model: str, out: Path | None, candidates: Path | None, times: Path | None, only: str,
         jobs: int | None) -> None:
    """Measure schedules of MODEL's contractions on this machine's device and write a database of the best ones.

    A contraction can be cut into tiles in many ways; which is fastest depends on its sizes, on the number of rows
    and on the device. Each way is compiled, and timed with cold weights. `deepinfer compile` then takes the best
    ones from the database, with or without a device, and says how many kernels it had measured. The parts that
    sums are made of belong to a schedule: engines of different databases can differ in last bits, engines of one
    never do. A database for the H200 comes with the package.

    \b
    Examples:
      deepinfer tune --model ./my-checkpoint --target sm90 --out my_h200.json
      DEEPINFER_TUNING=my_h200.json deepinfer compile --model ./my-checkpoint --target sm90 --out engines/e

    \b
    With the compiler on one machine and the device on another, which needs Python and numpy alone:
      deepinfer tune --model M --target sm90 --candidates c.zip
      python backends/cuda_sm100/tune/measure.py c.zip times.json         # there
      deepinfer tune --model M --target sm90 --candidates c.zip --times times.json --out db.json
    """
    if out is None and candidates is None:
        raise SpecError("nothing to write", where="--out", found="neither --out nor --candidates",
                        next_step="name a database with --out, or a file with --candidates")
    if times is not None and (candidates is None or out is None):
        raise SpecError("times belong to the candidates they were taken of", where="--times", found=times,
                        next_step="name both --candidates and --out")
    choice = resolve_target(target)
    if not choice.target.startswith("sm"):
        raise SpecError("kernels of this target have no schedules to measure", where="--target", found=choice.target,
                        allowed="sm100, sm90")
    show = Console(stderr=True)
    specs = contractions(model, choice.target, only)
    file = candidates or out.with_suffix(".candidates.zip")  # type: ignore[union-attr]
    if times is None:
        _prepare(show, choice.target, specs, file, jobs or os.cpu_count() or 1)
    if out is None:
        return
    found = json.loads(times.read_text(encoding="utf-8")) if times else _measure(show, file)
    _write(show, file, found, specs, out)


def contractions(model: str, target: str, only: str) -> dict[str, Any]:
    """Specs of the contractions of a model, by symbol."""
    driver: Any = importlib.import_module("deepinfer.codegen.compile")
    checkpoint = driver.open_checkpoint(model)
    described = driver.describe_model(checkpoint, EngineOptions())
    plan = driver.lower(described, driver.load_backend(target), target)
    database: Any = importlib.import_module("deepinfer.backends.cuda_sm100.tune.database")
    found: dict[str, Any] = {}
    for s in plan.lowered.specs:  # one of each shape: rows of other axes are the same work
        if s.family in database.TUNED and only in s.symbol:
            found.setdefault(database.shapes(s), s)
    if not found:
        raise SpecError("no kernel has this text in its name", where="--only", found=only,
                        next_step="deepinfer explain lists the kernels of an engine")
    return {s.symbol: s for s in found.values()}


def _bar(show: Console) -> Progress:
    return Progress(TextColumn("{task.description:12}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                    TimeRemainingColumn(), TextColumn("{task.fields[what]}"), console=show,
                    disable=not show.is_terminal)


def _prepare(show: Console, target: str, specs: dict[str, Any], file: Path, jobs: int) -> None:
    stage: Any = importlib.import_module("deepinfer.backends.cuda_sm100.tune.prepare")
    with _bar(show) as bar:
        task = bar.add_task("compiling", total=None, what="")

        def progress(what: str, total: int) -> None:
            bar.update(task, advance=1, total=total, what=what)

        made = stage.prepare(target, specs.values(), file, jobs=jobs, progress=progress)
    show.print(f"{made} candidates of {len(specs)} contractions in {file}")


def _measure(show: Console, file: Path) -> dict[str, Any]:
    stage: Any = importlib.import_module("deepinfer.backends.cuda_sm100.tune.measure")
    with zipfile.ZipFile(file) as z:
        total = sum(len(k["cases"]) for k in json.loads(z.read("choices.json"))["kernels"].values())
    with _bar(show) as bar:
        task = bar.add_task("measuring", total=total, what="")
        progress: Callable[[str], None] = lambda what: bar.update(task, advance=1, what=what)  # noqa: E731
        result: dict[str, Any] = stage.measure(file, progress)
    return result


def _write(show: Console, file: Path, times: dict[str, Any], specs: dict[str, Any], out: Path) -> None:
    database: Any = importlib.import_module("deepinfer.backends.cuda_sm100.tune.database")
    with zipfile.ZipFile(file) as z:
        choices = json.loads(z.read("choices.json"))
    made = database.database_of(times, choices, specs, database.installed_triton())
    made.save(out)
    table = Table("contraction", "parts", "microseconds by rows", title=made.device, title_justify="left", box=None)
    for shapes, entry in made.entries.items():
        us = ", ".join(f"{rows}: {t:.1f}" for rows, t in entry["us"].items())
        table.add_row(shapes, str(entry["schedule"]["parts"]), us)
    show.print(table)
    show.print(f"wrote {out}; compile with {database.VARIABLE}={out}")
