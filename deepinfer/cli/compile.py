"""`deepinfer compile`, also installed as `deepinfer-compile`: from a model to an engine folder."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import click

from deepinfer.accelerator import resolve_target
from deepinfer.cli.failure import Command
from deepinfer.cli.targets import target_option
from deepinfer.errors import SpecError

FORMATS = ("spec", "f32")
PROFILES = ("bf16", "wide")


def _replay(context: click.Context, parameter: click.Parameter, value: str | None) -> str | int | None:
    """`off`, `exact`, or a number of rows as an int."""
    if value is None or value in ("off", "exact"):
        return value
    if value.isdecimal() and int(value) > 0:
        return int(value)
    raise SpecError(
        "unknown replay mode", where="--replay", found=value, allowed=["off", "exact", "a number of rows K"]
    )


def limit_options(command: Any) -> Any:
    """`--max-num-seqs`, `--max-num-batched-tokens`, `--max-model-len`: what the memory plan is made for."""
    for option in (
        click.option(
            "--max-model-len",
            type=click.IntRange(min=1),
            metavar="TOKENS",
            help="Longest sequence, prompt and output together. Default: what the model's config allows.",
        ),
        click.option(
            "--max-num-batched-tokens",
            type=click.IntRange(min=1),
            metavar="TOKENS",
            help="Most rows one step computes; longer prompts are split into chunks of this size.",
        ),
        click.option(
            "--max-num-seqs",
            type=click.IntRange(min=1),
            metavar="N",
            help="Most sequences that run at the same time; more wait in the queue.",
        ),
    ):
        command = option(command)
    return command


@click.command(cls=Command, context_settings={"help_option_names": ["-h", "--help"]})
@target_option
@click.option(
    "--model",
    required=True,
    metavar="DIR_OR_HUB_ID",
    help="Folder with config.json and tokenizer.json, or a hub id. Weights are not read while compiling.",
)
@click.option(
    "--revision", metavar="REV", help="Branch, tag or commit of a hub id. Default: its main branch."
)
@click.option(
    "--out",
    required=True,
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Engine folder to write. Its name is the name to import, so it has to be a Python identifier.",
)
@limit_options
@click.option(
    "--replay",
    callback=_replay,
    metavar="off|exact|K",
    help="Rows of a prompt that the upper layers compute, where the model's training allows less than "
    "all of them: off = every row; exact = every row that can change a result; K = the last K rows. "
    "The engine can be asked for off or exact later as well. Default: the number its spec states.",
)
@click.option(
    "--profile",
    type=click.Choice(PROFILES),
    default="bf16",
    show_default=True,
    help="bf16 rounds where the model's reference rounds; wide computes in f32 throughout, for tests.",
)
@click.option(
    "--cache-format",
    type=click.Choice(FORMATS),
    default="spec",
    show_default=True,
    help="Storage of the KV cache: the spec's packed formats, or f32 for a checkpoint not trained for them.",
)
@click.option(
    "--act-format",
    type=click.Choice(FORMATS),
    default="spec",
    show_default=True,
    help="Activations in front of FP8 and FP4 weights: the spec's MXFP8, or f32 for a checkpoint not "
    "trained for it.",
)
@click.option("--wheel", is_flag=True, help="Also write an installable wheel next to the engine folder.")
@click.option(
    "--dump-ir",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Write the program after every pass as a numbered text file: 01-trace.txt, 02-..., and so on.",
)
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    metavar="N",
    help="Compilers to run at once. Default: the machine's cores.",
)
def main(target: str | None, model: str, out: Path, **options: Any) -> None:
    """Compile MODEL for one target into an engine folder.

    The folder holds compiled kernels, their readable sources, a launch table, a memory plan and a
    manifest. Running it needs no compiler. A second run with the same inputs takes everything from
    the cache and writes equal files.

    \b
    Examples:
      deepinfer-compile --target cpu --model ./my-checkpoint --out engines/my_engine
      deepinfer-compile --model deepseek-ai/DeepSeek-V4.1-Flash --out engines/flash --max-model-len 32768
    """
    choice = resolve_target(target)
    click.echo(f"target {choice.target}: {choice.reason}", err=True)
    given = {name: value for name, value in options.items() if value is not None}
    codegen: Any = importlib.import_module("deepinfer.codegen")
    codegen.compile_engine(model=model, out=out, target=choice.target, **given)
