"""`deepinfer explain`: from a layer to its kernels, from a kernel to the lines of the spec and its source."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deepinfer.cli.failure import Command
from deepinfer.errors import SpecError

if TYPE_CHECKING:
    from rich.console import Console

    from deepinfer.codegen.report.model import EngineFacts, Shape, Step

_FILE_WIDTH = 140  # of output that no terminal wraps


@click.command(cls=Command, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("engine", metavar="ENGINE", type=click.Path(path_type=Path))
@click.argument("what", metavar="[layer N | kernel SYMBOL]", nargs=-1)
@click.option("--entry", metavar="NAME", default="step", show_default=True, help="An entry of the engine.")
@click.option("--source", is_flag=True, help="With `kernel`: print the generated source.")
@click.option("--json", "as_json", is_flag=True, help="Print the launches as JSON, one a line; alone: all.")
def main(engine: Path, what: tuple[str, ...], entry: str, source: bool, as_json: bool) -> None:
    """Explain what the compiler made of a layer.

    Alone, ENGINE prints the kinds of layers. `layer 30` prints the kernels of layer 30 in order: the
    spec line that each comes from, why it ends where it ends, the bytes it moves when one sequence
    decodes, the least time for that, and its source. `kernel SYMBOL` prints all of one kernel.
    SYMBOL may be any part of the name, also of several kernels.

    \b
    Examples:
      deepinfer explain engines/my_engine
      deepinfer explain engines/my_engine layer 30
      deepinfer explain engines/my_engine layer mtp.0 --entry draft
      deepinfer explain engines/my_engine kernel grouped_gemm --source
    """
    from rich.console import Console

    facts: EngineFacts = importlib.import_module("deepinfer.codegen.report.read").engine_facts(engine.expanduser())
    if entry not in facts.entries:
        raise SpecError("the engine has no such entry", where="--entry", found=entry, allowed=", ".join(facts.entries))
    if len(what) not in (0, 2) or (what and what[0] not in ("layer", "kernel")):
        raise SpecError("this cannot be explained", found=" ".join(what), allowed="layer N, kernel SYMBOL, or nothing")
    if source and (as_json or what[:1] != ("kernel",)):
        raise SpecError("sources are printed of kernels, as text", where="--source",
                        found="--json" if as_json else " ".join(what) or "no kernel", allowed="kernel SYMBOL --source")
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    if not what and not as_json:
        _kinds(console, facts, entry)
        return
    kernels = _kernels(facts, entry, what[1]) if what[:1] == ("kernel",) else []
    steps = (_layer(facts, entry, what[1]) if what[:1] == ("layer",) else facts.steps(entry) if not what else
             [step for kernel in kernels for step in kernel])
    if as_json:
        for step in steps:
            kernel = facts.kernels[step.raw["kernel"]] if step.is_kernel else {}
            console.print_json(data={"launch": step.number, **step.raw, **kernel}, indent=None)
    elif what[0] == "layer":
        _print_layer(console, facts, steps)
    else:
        for i, kernel in enumerate(kernels):
            if i:
                console.print()
            _print_kernel(console, engine.expanduser(), facts, kernel, source)


def _kinds(console: Console, facts: EngineFacts, entry: str) -> None:
    from rich.table import Table

    table = Table("layers", "count", "kernels a layer", "by family", title=f"kinds of layers in {entry}",
                  title_justify="left", box=None)
    for k in facts.kinds(entry):
        table.add_row(k.layers, str(k.count), str(k.launches), ", ".join(f"{n} {f}" for f, n in k.families.items()))
    console.print(table)
    console.print(f"{sum(s.is_kernel for s in facts.steps(entry))} kernels and "
                  f"{sum(not s.is_kernel for s in facts.steps(entry))} ring commits, a barrier after each at most; "
                  "more with: layer N, kernel SYMBOL", soft_wrap=True)


def _layer(facts: EngineFacts, entry: str, asked: str) -> list[Step]:
    """Launches of a layer: a number, or `name.number` where several stacks have one."""
    stack, _, number = asked.rpartition(".")
    found: dict[tuple[str, int], list[Step]] = {}
    for step in facts.steps(entry):
        found.setdefault(step.layer, []).append(step)
    for (name, at), steps in found.items():
        if (number == str(at) and stack in ("", name)) or (at < 0 and name == asked):
            return steps
    names = [f"{k.layers}" for k in facts.kinds(entry)]
    raise SpecError(f"the entry {entry} has no such layer", where="layer", found=asked, allowed=", ".join(names))


def _kernels(facts: EngineFacts, entry: str, asked: str) -> list[list[Step]]:
    """Launches of each kernel of the entry whose symbol has this part."""
    launches: dict[str, list[Step]] = {}
    for step in facts.steps(entry):
        if step.is_kernel:
            launches.setdefault(str(facts.kernels[step.raw["kernel"]]["symbol"]), []).append(step)
    found = [steps for symbol, steps in sorted(launches.items()) if asked in symbol]
    if not found:
        raise SpecError(f"no kernel of {entry} has that name", where="kernel", found=asked,
                        allowed=f"a part of one of: {', '.join(sorted(launches))}")
    return found


def _print_layer(console: Console, facts: EngineFacts, steps: Sequence[Step]) -> None:
    shape = facts.shapes[0]
    name = ".".join(str(part) for part in steps[0].layer if part != -1)
    console.print(f"{name}: bytes and least time for {shape.name}", style="bold", soft_wrap=True)
    for step in steps:
        if not step.is_kernel:
            console.print(f"{step.number:5} commit      {step.raw['commit']}: this step's rows go into the ring",
                          soft_wrap=True)
            continue
        kernel = facts.kernels[step.raw["kernel"]]
        moved, least = _cost(facts, step, shape)
        console.print(f"{step.number:5} {kernel['family']:13}{step.raw['rows']:9}{step.scope:28}{moved:>9}{least:>10}  "
                      f"{', '.join(step.raw['ops'])}", soft_wrap=True, style="bold")
        chain = step.raw["lines"][0]
        console.print(f"      spec    {' > '.join(chain)}", soft_wrap=True)
        for text in _texts(facts, chain[-2:]):
            console.print(f"              {text}", style="dim", soft_wrap=True)
        console.print(f"      ends    {step.raw['why']}", soft_wrap=True)
        console.print(f"      source  {kernel['source']}", soft_wrap=True)


def _texts(facts: EngineFacts, places: Sequence[str]) -> list[str]:
    """Text of lines of the spec that the engine was made from, as far as it has them."""
    texts = facts.explanation.get("texts", {})
    return [texts[place] for place in places if texts.get(place)]


def _cost(facts: EngineFacts, step: Step, shape: Shape) -> tuple[str, str]:
    from deepinfer.codegen.report.charts import duration, size

    moved, macs = step.cost.bytes(shape.step), step.cost.macs(shape.step)
    return size(moved), duration(facts.roofs[0].seconds(moved, macs)) if facts.roofs else "-"


def _print_kernel(console: Console, folder: Path, facts: EngineFacts, steps: Sequence[Step], source: bool) -> None:
    kernel, first = facts.kernels[steps[0].raw["kernel"]], steps[0]
    moved, least = _cost(facts, first, facts.shapes[0])
    machine = facts.roofs[0].machine if facts.roofs else "no known machine"
    lines: list[tuple[str, Any]] = [
        ("kernel", kernel["symbol"]), ("family", f"{kernel['family']}, on rows {first.raw['rows']}"),
        ("launched", f"{len(steps)} times: {', '.join(s.scope for s in steps[:6])}{' ...' if len(steps) > 6 else ''}"),
        ("ops", ", ".join(f"{n} x {op}" for op, n in first.raw["ops"].items())),
        ("ends because", first.raw["why"]),
        ("weights", ", ".join(first.raw["params"]) or "none"), ("states", ", ".join(first.raw["states"]) or "none"),
        ("moves", f"{moved}, at least {least} on {machine} ({facts.shapes[0].name})"),
        ("source", folder / kernel["source"])]
    for name, text in lines:
        console.print(f"{name:14}{text}", soft_wrap=True)
    console.print("spec lines")
    for chain in first.raw["lines"]:
        console.print(f"  {' > '.join(chain)}", soft_wrap=True)
        for text in _texts(facts, chain[-2:]):
            console.print(f"      {text}", style="dim", soft_wrap=True)
    if source:
        console.print()
        console.print((folder / kernel["source"]).read_text(encoding="utf-8"), soft_wrap=True)
