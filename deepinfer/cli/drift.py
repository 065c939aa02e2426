"""`deepinfer drift`: what bounded replay does to a checkpoint's answers, and what it saves."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deepinfer.cli.failure import Command
from deepinfer.cli.placement import placement_options
from deepinfer.cli.subject import resolve_subject
from deepinfer.errors import ArtifactError, RequestError

if TYPE_CHECKING:
    from rich.table import Table

    from deepinfer.runtime.llm import LLM
    from deepinfer.runtime.replay_drift import Drift

_LENGTHS = (2048, 8192, 65536, 1 << 20)
_MEANING = {
    "decoder": "decoder layers for the last K rows only, as in every prompt",
    "replay": "besides, a prefix hit whose windows are gone",
    "again": "besides, every turn before was such a hit",
    "window": "no cache: the last W tokens alone",
}


@click.command(cls=Command, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("subject", metavar="ENGINE_OR_MODEL")
@click.option("--checkpoint", metavar="DIR_OR_HUB_ID",
              help="Weights for an engine. Default: those packed with it, else what it was compiled from.")
@click.option("--text", "text_file", type=click.Path(path_type=Path, exists=True, dir_okay=False), metavar="FILE",
              help="UTF-8 text to measure on. Default: the language reference that Python ships.")
@click.option("--turns", type=click.IntRange(min=2), default=33, show_default=True, metavar="N",
              help="Turns that the text is cut into; each but the first is a prefix hit.")
@click.option("--keep", type=click.IntRange(min=1), metavar="K",
              help="Rows that all layers compute at the end of a prompt. Default: the fewest of the training.")
@click.option("--max-model-len", type=click.IntRange(min=1), metavar="L",
              help="Tokens to use at most; a model is compiled for so many. Default: all that the engine takes.")
@placement_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
def main(subject: str, checkpoint: str | None, text_file: Path | None, turns: int, keep: int | None,
         max_model_len: int | None, threads: int | None, cpus: str | None, numa: str | None,
         as_json: bool) -> None:
    """Measure how far bounded replay moves the next-token distribution.

    A text is read as a conversation of N turns. At the end of each turn the distribution of the
    next tokens is compared with that of a run that computes every row: after decoder-side
    replay, after a prefix hit without windows, and when all turns before were such hits. The
    last window of tokens alone is shown beside them. Then come the multiplications saved.

    \b
    Examples:
      deepinfer drift engines/my_engine --checkpoint ./my-checkpoint --text conversation.txt
      deepinfer drift ./my-checkpoint --turns 12 --json > drift.json
    """
    from rich.progress import track

    from deepinfer.runtime.llm import LLM
    from deepinfer.runtime.replay_drift import measure

    text = default_text() if text_file is None else _read(text_file)
    found = resolve_subject(subject, checkpoint, {"max_model_len": max_model_len, "max_num_seqs": None})
    if found.compile is not None:
        found.compile.make()
    interactive = sys.stderr.isatty()
    with LLM(found.engine, found.checkpoint, threads=threads, cpus=cpus, numa=numa, prefix_cache=False,
             progress=interactive) as llm:
        ids = _ids(llm, text)[: max_model_len or llm.plan.max_model_len]

        def shown(turns: range) -> Iterable[int]:
            from rich.console import Console

            return track(turns, "turns", console=Console(stderr=True), disable=not interactive)

        drift = measure(llm, ids, turns, keep, shown)
        work = Work.of(found.engine, Path(str(llm.core.engine.checkpoint)))
        plan = llm.plan
    if as_json:
        click.echo(json.dumps(as_dict(found.name, drift, work, plan.rerun), indent=2))
        return
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 110
    console.print(f"{found.name}: {len(drift.ends)} turns of {drift.ends[0]} tokens, K = {drift.keep}, "
                  f"W = {drift.window}", style="bold")
    for table in (_ways(drift), _again(drift), _operations(drift, work, plan.rerun)):
        console.print()
        console.print(table)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArtifactError("the text cannot be read", where=file, found=error, allowed="UTF-8") from None


def _ids(llm: LLM, text: str) -> list[int]:
    if llm.core.text is None:
        raise RequestError("a text needs a tokenizer", where="--text",
                           next_step="put tokenizer.json beside the weights")
    return llm.core.text.encode(text)


def default_text() -> str:
    """The language reference inside every Python, about 600,000 characters of English."""
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    return "\n".join(topics[name] for name in sorted(topics))


# ---- operations -----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Work:
    """Multiply-adds with weights for a row that all layers below the cut compute (``step``), for a kept one besides
    (``kept``), and for one whose logits are wanted besides (``wanted``)."""

    step: int
    kept: int
    wanted: int

    @staticmethod
    def of(engine: Path, checkpoint: Path) -> Work:
        """Counted on the narrowed graph of the model that an engine was compiled from."""
        compile_ = importlib.import_module("deepinfer.codegen.compile")
        narrow = importlib.import_module("deepinfer.codegen.passes.narrow")
        model_module = importlib.import_module("deepinfer.dsl.model")
        manifest: Any = importlib.import_module("deepinfer.codegen.package.manifest").read_manifest(engine)
        known = {f.name for f in fields(model_module.EngineOptions)}
        options = model_module.EngineOptions(**{k: v for k, v in manifest["options"].items() if k in known})
        opened = importlib.import_module("deepinfer.runtime.checkpoint").open_checkpoint(str(checkpoint))
        model = compile_.describe_model(opened, options)
        scopes = narrow.narrow_model(model, model_module.trace(model).graphs["step"])[1].scopes
        return Work(*(sum(s.work.get(axis, 0) for s in scopes) for axis in ("T", "T_kept", "T_wanted")))

    def prompt(self, rows: int, keep: int | None) -> int:
        """Of ``rows`` rows that run, of which ``keep`` are kept (None: all) and one is wanted."""
        return rows * self.step + (rows if keep is None else min(rows, keep)) * self.kept + self.wanted


def savings(work: Work, keep: int, rerun: int, ends: Iterable[int], hits: Iterable[int]) -> dict[str, float]:
    """Part of the multiplications of cold runs in which all layers compute all rows that each way leaves out."""
    spent = dict.fromkeys(("full", "decoder", "replay", "windows"), 0)
    for end, hit in zip(ends, hits, strict=True):
        spent["full"] += work.prompt(end, None)
        spent["decoder"] += work.prompt(end, keep)
        spent["windows"] += work.prompt(end - hit, keep)
        spent["replay"] += work.prompt(end - max(0, hit - rerun) if hit else end, keep)
    return {way: 1 - spent[way] / spent["full"] for way in ("decoder", "replay", "windows")}


# ---- output ---------------------------------------------------------------------------------------------------------
def as_dict(name: str, drift: Drift, work: Work, rerun: int) -> dict[str, Any]:
    """Everything that was measured."""
    return {
        "model": name, "keep": drift.keep, "window": drift.window, "turns": len(drift.ends),
        "turn_tokens": drift.ends[0], "ways": {k: way.summary() for k, way in drift.ways.items()},
        "by_turn": {k: [way.summary(i, i + 1) for i in range(len(drift.ends))] for k, way in drift.ways.items()},
        "multiply_adds": {"step": work.step, "kept": work.kept, "wanted": work.wanted},
        "saved": savings(work, drift.keep, rerun, drift.ends, drift.hits),
        "saved_cold": {str(n): savings(work, drift.keep, rerun, (n,), (0,))["decoder"] for n in _LENGTHS},
    }


def _table(title: str, *columns: str) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for i, name in enumerate(columns):
        text = i == 0 or name.startswith("(")
        table.add_column(name.strip("()"), justify="left" if text else "right", no_wrap=not text)
    return table


def _ways(drift: Drift) -> Table:
    table = _table("against a run of all rows", "way", "mean KL", "median", "max", "top-1 changed", "(prompt)")
    for name, way in drift.ways.items():
        s = way.summary(1)  # the first turn has no hit
        table.add_row(name, f"{s['mean_kl']:.5f}", f"{s['median_kl']:.5f}", f"{s['max_kl']:.4f}",
                      f"{s['top1_changed']:.1%}", _MEANING[name])
    return table


def _again(drift: Drift) -> Table:
    table = _table("replay upon replay, mean KL by turn", "turns", "decoder", "replay", "again", "again, top-1 changed")
    for first, stop in drift.groups():
        s = {name: drift.ways[name].summary(first, stop) for name in ("decoder", "replay", "again")}
        table.add_row(f"{first + 1}-{stop}" if stop > first + 1 else str(first + 1),
                      *(f"{s[name]['mean_kl']:.5f}" for name in s), f"{s['again']['top1_changed']:.1%}")
    return table


def _operations(drift: Drift, work: Work, rerun: int) -> Table:
    table = _table("multiplications with weights that are not done", "prompt", "left out", "(way)")
    for rows in _LENGTHS:
        saved = savings(work, drift.keep, rerun, (rows,), (0,))["decoder"]
        table.add_row(f"{rows:,}", f"{saved:.1%}", "cold, decoder-side replay")
    saved_here = savings(work, drift.keep, rerun, drift.ends, drift.hits)
    for way, text in (("decoder", "without hits"), ("replay", "hits without windows"),
                      ("windows", "hits with windows")):
        table.add_row("these turns", f"{saved_here[way]:.1%}", text)
    return table
