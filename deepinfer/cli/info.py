"""`deepinfer info`: what an engine or a model needs, before anything is allocated."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Any

import click

from deepinfer.cli.failure import Command
from deepinfer.cli.targets import target_option
from deepinfer.dsl.model import EngineOptions

if TYPE_CHECKING:
    from rich.table import Table

    from deepinfer.codegen.describe import Description
    from deepinfer.codegen.plan.cache_plan import RingPlan

_DEFAULTS = EngineOptions()
_FILE_WIDTH = 110  # of output that no terminal wraps


def _option(name: str, metavar: str | None, text: str) -> Callable[[Any], Any]:
    """An option for the field `name` of EngineOptions; left out, an engine's own value or the default counts."""
    usual = getattr(_DEFAULTS, name)
    kind: Any = click.Choice(EngineOptions.ALLOWED[name]) if name in EngineOptions.ALLOWED else click.IntRange(min=1)
    return click.option("--" + name.replace("_", "-"), name, type=kind, metavar=metavar,
                        help=f"{text} Default: an engine's own, else {usual}.")


@click.command(cls=Command, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("subject", metavar="ENGINE|CONFIG")
@_option("max_num_seqs", "N", "Sequences to hold at once.")
@_option("max_model_len", "L", "Tokens of each, prompt and output together.")
@_option("max_num_batched_tokens", "TOKENS", "Most rows of one step (of a model only).")
@_option("cache_format", None, "Storage of the KV cache (of a model only).")
@target_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
def main(subject: str, target: str | None, as_json: bool, **options: Any) -> None:
    """Print parameters, cache plan and the memory of N sequences of length L.

    ENGINE|CONFIG is an engine folder, a config.json, a folder that holds one, or a hub id. Nothing
    is allocated and no weight is read. Checkpoint tensors and config keys that the engine ignores
    are listed with the reason and their bytes.

    \b
    Examples:
      deepinfer info engines/my_engine --max-num-seqs 4
      deepinfer info ./my-checkpoint/config.json --max-num-seqs 64 --max-model-len 32768
    """
    from rich.console import Console

    given = {key: value for key, value in options.items() if value is not None}
    with Console(stderr=True).status(f"planning {subject}"):
        found: Description = importlib.import_module("deepinfer.codegen.describe").describe(
            subject, target=target, options=given)
    if as_json:
        click.echo(found.as_json())
        return
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    console.print(f"{found.model} for {found.target}, from {found.source}", style="bold", soft_wrap=True)
    for part in (_parameters(found), _cache(found), _memory(found)):
        console.print()
        console.print(*part, sep="\n", soft_wrap=False)


def gigabytes(size: int) -> str:
    """`510.3 GB`: decimal, as checkpoints and disks are sold."""
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= scale:
            return f"{size / scale:,.1f} {unit}"
    return f"{size} B"


def _table(title: str, *columns: str) -> Table:
    """The first column is text, the others numbers, but for those in parentheses."""
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for i, name in enumerate(columns):
        text = i == 0 or name.startswith("(")
        table.add_column(name.strip("()"), justify="left" if text else "right", no_wrap=not text)
    return table


def _parameters(found: Description) -> Iterator[Any]:
    sizes = found.footprint.sizes
    table = _table("parameters, as the checkpoint stores them", "format", "tensors", "bytes", "(note)")
    for g in sizes.groups:
        table.add_row(g.format, f"{g.tensors:,}", f"{g.bytes:,}", "lookup tables" if g.table else "")
    for i in sizes.ignored:
        if i.tensors:
            table.add_row(i.pattern, f"{i.tensors:,}", f"{i.bytes:,}", f"ignored: {i.reason}")
    table.add_row("total", f"{sizes.tensors:,}", f"{sizes.disk_bytes:,}")
    yield table
    off = f"; {gigabytes(sizes.disk_bytes - sizes.table_bytes)} when the lookup tables stay on disk"
    yield f"{gigabytes(sizes.disk_bytes)} on disk" + (off if sizes.table_bytes and not found.memory.on_device else "")
    if found.footprint.ignored_keys:
        yield ""
        table = _table("config keys that are not read", "key", "(why)")
        for key, why in sorted(found.footprint.ignored_keys.items()):
            table.add_row(key, why)
        yield table


def _cache(found: Description) -> Iterator[Any]:
    cache = found.footprint.cache
    clock = cache.clock
    table = _table("cache plan", "state", "bytes a record", "records", "bytes", "(of)")
    shapes = groupby(sorted(cache.paged, key=lambda p: (-p.record_bytes, p.tokens_per_entry)),
                     key=lambda p: (p.record_bytes, p.tokens_per_entry))
    for (record, tokens), states in shapes:
        names = [p.name for p in states]
        entries = clock.block // tokens
        table.add_row(_names(names), f"{record:,}", f"{entries}", f"{len(names) * entries * record:,}", "each block")
    rings = groupby(sorted(cache.rings, key=_shape), key=_shape)
    for _, group in rings:
        same = list(group)
        rows = "every row" if same[0].axis.kind == "step" else "kept rows"
        table.add_row(_names([r.name for r in same]), f"{same[0].record_bytes:,}", f"{same[0].ring_rows}",
                      f"{sum(r.ring_bytes for r in same):,}", f"each sequence, from {rows}")
    yield table
    yield (f"{float(cache.bytes_per_token):,g} bytes a token; a block of {clock.block} tokens is "
           f"{cache.block_bytes:,} bytes ({cache.page_bytes:,} as a page of whole records)")
    yield (f"a resume point at a block edge is {cache.resume_bytes:,} bytes; "
           f"a running sequence holds {cache.slot_bytes:,}")
    fewer = f"at least {clock.least_keep}, and " if clock.least_keep < clock.exact_keep else ""
    usual = "all" if clock.keep is None else str(clock.keep)
    yield f"replay keeps the last rows of a prompt: {fewer}{clock.exact_keep} lose nothing; default {usual}"


def _shape(r: RingPlan) -> tuple[str, str, int, int]:
    return str(r.axis), r.kind, r.record_bytes, r.ring_rows


def _names(names: list[str]) -> str:
    """`win.0-19, draft.0-2` for states that differ by their number."""
    numbered: dict[str, list[int]] = {}
    for name in names:
        m = re.fullmatch(r"(.*)\.(\d+)", name)
        numbered.setdefault(m[1] if m else name, []).extend([int(m[2])] if m else [])
    return ", ".join(f"{stem}.{_ranges(sorted(at))}" if at else stem for stem, at in numbered.items())


def _ranges(numbers: list[int]) -> str:
    """`0-19`, `2,4..42` (steps of two), `2,8,14`: rising numbers as few words."""
    parts: list[str] = []
    while numbers:
        step = numbers[1] - numbers[0] if len(numbers) > 1 else 1
        run = 1
        while run < len(numbers) and numbers[run] - numbers[run - 1] == step:
            run += 1
        if step == 1 and run > 1:
            parts.append(f"{numbers[0]}-{numbers[run - 1]}")
        elif run > 3:
            parts.append(f"{numbers[0]},{numbers[1]}..{numbers[run - 1]}")
        else:
            run = 1
            parts.append(str(numbers[0]))
        numbers = numbers[run:]
    return ",".join(parts)


def _memory(found: Description) -> Iterator[Any]:
    m = found.memory
    table = _table(f"memory for {m.sequences} sequences of {m.tokens:,} tokens", "for", "bytes", "(what)")
    table.add_row("weights", f"{m.weights:,}", "as stored")
    if m.tables and m.on_device:
        table.add_row("lookup tables", f"{m.tables:,}", "on the device, as the weights")
    table.add_row("rings", f"{m.slots:,}", "windows and open groups")
    table.add_row("cache blocks", f"{m.blocks:,}", f"{m.block_count:,} of {found.footprint.cache.clock.block} tokens")
    if m.arena is None:
        table.add_row("step", "-", f"known once the backend for {found.target} is built")
    else:
        table.add_row("arena", f"{m.arena:,}", "values in flight in a step")
        if m.scratch is None:
            table.add_row("scratch", "-", "of kernels on the device: known when the engine is opened")
        else:
            table.add_row("scratch", f"{m.scratch:,}", f"{found.threads} threads")
    if m.drawing:
        where = ", in host memory" if m.on_device else ""
        table.add_row("drawing", f"{m.drawing:,}", f"token counts, drafts and their logits{where}")
    table.add_row("total", f"{m.total:,}", gigabytes(m.total))
    yield table
    if m.tables and not m.on_device:
        yield f"and {gigabytes(m.tables)} of lookup tables, in host memory or left on disk"
