"""`deepinfer bench`: measure a server from outside."""

from __future__ import annotations

import asyncio
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deepinfer.cli.failure import Command, Group
from deepinfer.cli.serve import KEY_VARIABLE
from deepinfer.errors import RequestError, ToolchainError

if TYPE_CHECKING:
    from deepinfer.runtime.server.load_test import Load, Timing

_MS = 1000


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Measure latency and throughput.

    \b
    Examples:
      deepinfer bench serve --request-rate 4 --num-prompts 200
      deepinfer bench serve --url http://127.0.0.1:8000 --json > result.json
    """


@main.command("serve", cls=Command, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--url", default="http://127.0.0.1:8000", show_default=True,
              help="Server of the OpenAI kind; with or without /v1.")
@click.option("--model", metavar="NAME", help="Default: the first one that the server lists.")
@click.option("--num-prompts", type=click.IntRange(min=1), default=100, show_default=True, metavar="N")
@click.option("--request-rate", type=click.FloatRange(min=0, min_open=True), default=math.inf, show_default=True,
              metavar="R", help="Arrivals a second, at random with this mean; inf sends all at once.")
@click.option("--input-len", type=click.IntRange(min=1), default=128, show_default=True, metavar="TOKENS")
@click.option("--output-len", type=click.IntRange(min=1), default=64, show_default=True, metavar="TOKENS",
              help="Exactly so many: the end token is ignored.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of arrivals and prompts.")
@click.option("--slo-ttft", type=click.FloatRange(min=0), metavar="MS", help="Goodput counts requests whose first "
              "token came within this time, and")
@click.option("--slo-tpot", type=click.FloatRange(min=0), metavar="MS",
              help="whose tokens took at most this on average.")
@click.option("--vocab-size", type=click.IntRange(min=1), metavar="N", help="Ids of the random prompts are below it. "
              "Default: what the server's model card says.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
@click.option("--picture", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE.svg",
              help="Draw the distributions of both latencies.")
def serve(url: str, model: str | None, vocab_size: int | None, as_json: bool, picture: Path | None,
          slo_ttft: float | None, slo_tpot: float | None, **options: Any) -> None:
    """Send requests at random times and measure what a client sees.

    The load is open: a request is sent when it is due, however many are under way, and its latency
    counts from then. TTFT is the time to the first token, TPOT the mean time between tokens after
    it, ITL the time between two events of a stream. The API key comes from DEEPINFER_API_KEY.

    \b
    Examples:
      deepinfer bench serve --request-rate 4 --num-prompts 200 --slo-ttft 500 --slo-tpot 50
    """
    try:
        from deepinfer.runtime.server import load_test
    except ModuleNotFoundError as error:
        raise ToolchainError("the packages of the server are not installed", found=f"no {error.name}",
                             next_step="pip install 'deepinfer-aot[server]'") from None
    url = url.rstrip("/").removesuffix("/v1")
    key = os.environ.get(KEY_VARIABLE, "").split(",")[0].strip() or None
    card = asyncio.run(load_test.model_card(url, key, model))
    size = vocab_size or card.get("vocab_size")
    if size is None:
        raise RequestError("the server does not say how many token ids there are", where="--vocab-size",
                           next_step="give the size of the model's vocabulary")
    load = load_test.Load(
        url=url, model=card["id"], vocab_size=size, key=key, requests=options["num_prompts"],
        rate=options["request_rate"], input_tokens=options["input_len"], output_tokens=options["output_len"],
        seed=options["seed"], slo_ttft=None if slo_ttft is None else slo_ttft / _MS,
        slo_tpot=None if slo_tpot is None else slo_tpot / _MS)
    timings = _run(load)
    found = load_test.summary(load, timings)
    if as_json:
        click.echo(json.dumps(found, indent=1))
    else:
        _print(found)
    if picture is not None:
        picture.write_text(draw({"time to first token": [t.ttft for t in timings if t.ttft is not None],
                                 "time per output token": [t.tpot for t in timings if t.tpot is not None]}),
                           encoding="utf-8")
        click.echo(f"drawn: {picture}", err=True)
    if not found["completed"]:
        raise RequestError("no request was answered", where=url, found=found["errors"])


def _run(load: Load) -> list[Timing]:
    from rich.console import Console
    from rich.progress import Progress

    from deepinfer.runtime.server.load_test import apply_load

    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("requests", total=load.requests)
        return asyncio.run(apply_load(load, lambda _: progress.advance(bar)))


def _print(found: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    console.print(f"{found['completed']} answered, {found['failed']} failed in {found['seconds']:.2f} s; "
                  f"{found['requests_per_s']:.2f} requests/s, {found['output_tokens_per_s']:.1f} output tokens/s, "
                  f"{found['total_tokens_per_s']:.1f} tokens/s with prompts; "
                  f"goodput {found['goodput_requests_per_s']:.2f} requests/s")
    for error in found["errors"]:
        console.print(f"failed: {error}", markup=False)
    table = Table(box=None, pad_edge=False)
    table.add_column("milliseconds")
    columns = list(found["e2e"])
    for name in columns:
        table.add_column(name, justify="right")
    for row in ("ttft", "tpot", "itl", "e2e"):
        table.add_row(row, *(f"{found[row][c] * _MS:.1f}" if c in found[row] else "-" for c in columns))
    console.print(table)


def draw(panels: Mapping[str, Sequence[float]]) -> str:
    """Cumulative distributions side by side as SVG; values in seconds, shown in milliseconds."""
    from deepinfer.runtime.server import load_test

    width, height, left, top = 360, 240, 56, 52
    parts = []
    for at, (title, values) in enumerate(panels.items()):
        x0 = at * (width + left) + left
        found = sorted(v * _MS for v in values)
        ticks = _ticks(found[-1] if found else 1.0)
        scale = width / ticks[-1]
        path = f"M{x0} {top + height}"
        for i, value in enumerate(found, 1):  # every request lifts the line by a step
            path += f"H{x0 + value * scale:.1f}V{top + (1 - i / len(found)) * height:.1f}"
        told = ", ".join(f"{name} {value:.4g}" for name, value in load_test.quantiles(found).items()) or "no answers"
        parts.append(f'<text x="{x0}" y="{top - 30}" font-weight="bold">{title}, ms</text>'
                     f'<text x="{x0}" y="{top - 14}" fill="#555">{told}</text>')
        for share in (0.0, 0.5, 0.9, 1.0):
            y = top + (1 - share) * height
            parts.append(f'<path d="M{x0} {y:.1f}h{width}" stroke="#ddd"/>'
                         f'<text x="{x0 - 6}" y="{y + 4:.1f}" text-anchor="end">{share:.0%}</text>')
        parts += [f'<text x="{x0 + t * scale:.1f}" y="{top + height + 18}" text-anchor="middle">{t:.6g}</text>'
                  for t in ticks]
        parts.append(f'<path d="{path}H{x0 + width}" fill="none" stroke="#1f6feb" stroke-width="2"/>')
    total = len(panels) * (width + left) + 24
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{total}" height="{top + height + 30}" '
            f'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="#fff"/>'
            + "".join(parts) + "</svg>\n")


def _ticks(largest: float) -> list[float]:
    """Three to six round numbers from 0 to the first one that is not below ``largest``."""
    largest = max(largest, 1e-9)
    rough = largest / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(n * power for n in (1, 2, 5, 10) if n * power >= rough)
    return [i * step for i in range(math.ceil(largest / step - 1e-9) + 1)]
