"""Options of the commands that run an engine: its threads, their processors, and the memory nodes of its pages."""

from __future__ import annotations

from typing import Any

import click

from deepinfer.errors import PlanError
from deepinfer.runtime.placement import AFFINITY, MODES, NUMA, Placement

NAMES = ("threads", "cpus", "numa")  # as `LLM` has them


class _Processors(click.ParamType):  # type: ignore[type-arg]  # older releases take no arguments
    """What `Placement` reads."""

    name = "processors"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            Placement.wanted(cpus=str(value), numa="off")
        except PlanError as error:
            self.fail(f"{error.what}; found {error.found}; allowed {error.allowed}", param, ctx)
        return str(value)


def placement_options(command: Any) -> Any:
    """Add `--threads`, `--cpus` and `--numa`; results never depend on them."""
    options = (
        click.option("--threads", type=click.IntRange(min=1), metavar="N",
                     help="Threads of a CPU engine. Default: one for each processor of --cpus, else for each that the "
                     "process may use, fewer for a small model. No more run than there are processors."),
        click.option("--cpus", type=_Processors(), metavar="LIST",
                     help="Processors that the threads of a CPU engine keep to, one each in this order: a list like "
                     "0-7,16; each: all that the process may use; off: the system moves threads. "
                     f"Default: {AFFINITY}, else off."),
        click.option("--numa", type=click.Choice(MODES),
                     help="Memory of a CPU engine on machines with several nodes. interleave: values and caches are "
                     "spread over all; local: threads keep to the node the process starts on, and memory with them. "
                     f"Default: {NUMA}, else off."))
    for option in reversed(options):
        command = option(command)
    return command
