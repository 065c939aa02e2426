"""`deepinfer info`: what an engine or a model needs, before anything is allocated."""

from __future__ import annotations

import importlib
from typing import Any

import click

from deepinfer.accelerator import resolve_target
from deepinfer.cli.failure import Command
from deepinfer.cli.targets import target_option


@click.command(cls=Command, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("subject", metavar="ENGINE|CONFIG")
@click.option(
    "--num-seqs",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="N",
    help="Sequences to hold at once.",
)
@click.option(
    "--seq-len", type=click.IntRange(min=1), metavar="L", help="Tokens of each. Default: the longest allowed."
)
@target_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
def main(subject: str, num_seqs: int, seq_len: int | None, target: str | None, as_json: bool) -> None:
    """Print the cache plan and the memory of N sequences of length L.

    ENGINE|CONFIG is an engine folder, a config.json, a folder that holds one, or a hub id. Nothing
    is allocated and no weight is read. Checkpoint tensors and config keys that the engine ignores
    are listed with the reason and their bytes.

    \b
    Examples:
      deepinfer info engines/my_engine --num-seqs 64 --seq-len 32768
      deepinfer info ./my-checkpoint/config.json
    """
    choice = resolve_target(target, need_built=False)
    description: Any = importlib.import_module("deepinfer.codegen").describe(
        subject, target=choice.target, num_seqs=num_seqs, seq_len=seq_len
    )
    click.echo(description.as_json() if as_json else str(description))
