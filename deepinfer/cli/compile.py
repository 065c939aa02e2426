"""`deepinfer compile`, also installed as `deepinfer-compile`: from a model to an engine folder."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from deepinfer.accelerator import resolve_target
from deepinfer.backends.base import ALL, HOST
from deepinfer.cli.failure import Command
from deepinfer.cli.targets import target_option
from deepinfer.dsl.model import EngineOptions

_DEFAULTS = EngineOptions()


def _engine_option(name: str, metavar: str | None, text: str) -> Callable[[Any], Any]:
    """An option for the field `name` of EngineOptions, whose default and values it shows."""
    default = getattr(_DEFAULTS, name)
    kind: Any = click.Choice(EngineOptions.ALLOWED[name]) if name in EngineOptions.ALLOWED else type(default)
    flag = "--" + name.replace("_", "-")
    return click.option(flag, name, type=kind, default=default, show_default=True, metavar=metavar, help=text)


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
@_engine_option("max_num_seqs", "N", "Most sequences that run at the same time; more wait in the queue.")
@_engine_option(
    "max_num_batched_tokens", "TOKENS", "Most rows one step computes; longer prompts are split into chunks."
)
@_engine_option("max_model_len", "TOKENS", "Longest sequence, prompt and output together.")
@_engine_option(
    "replay",
    "off|exact|K",
    "Rows of a prompt that the upper layers compute, where the model's training allows less than all of "
    "them: off = every row; exact = every row that can change a result; K = the last K rows. A request "
    "can ask any engine for off or exact.",
)
@_engine_option(
    "host_lag",
    "0|1",
    "Steps that the host may plan ahead of the engine: 1 gives the rings room for the overlapped loop, in "
    "which the engine never waits for the host.",
)
@_engine_option(
    "profile",
    None,
    "bf16 rounds where the model's reference rounds; wide computes in f32 throughout, for tests.",
)
@_engine_option(
    "cache_format",
    None,
    "Storage of the KV cache: the spec's packed formats, or f32 for a checkpoint not trained for them.",
)
@_engine_option(
    "act_format",
    None,
    "Activations in front of FP8 and FP4 weights: the spec's MXFP8, or f32 for a checkpoint not trained "
    "for it.",
)
@_engine_option(
    "wo_a_input",
    None,
    "Input of the grouped output projection: bf16 as in the model's reference, or MXFP8 as in production.",
)
@click.option(
    "--layers",
    type=int,
    metavar="N",
    help="Compile the first N layers only and no draft head, for a device that does not hold the whole model: same "
    "kernels and sizes, but no sensible answers. Default: all.",
)
@click.option("--wheel", is_flag=True, help="Also write an installable wheel next to the engine folder.")
@click.option(
    "--pack-weights",
    is_flag=True,
    help="Also lay the checkpoint's weights out in ENGINE/weights: checked once, in the order of use, mapped and "
    "shared by processes. Takes their size on disk again.",
)
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
@click.option(
    "--isa",
    type=click.Choice([ALL, HOST]),
    default=ALL,
    show_default=True,
    help="Instruction sets to compile for: all that the target has, or the best one of this machine only, which "
    "takes less time.",
)
def main(
    target: str | None,
    model: str,
    revision: str | None,
    out: Path,
    wheel: bool,
    pack_weights: bool,
    dump_ir: Path | None,
    jobs: int | None,
    isa: str,
    **options: Any,
) -> None:
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
    engine_options = EngineOptions(**options)
    click.echo(f"target {choice.target}: {choice.reason}", err=True)
    codegen: Any = importlib.import_module("deepinfer.codegen")
    codegen.compile_engine(
        model=model,
        out=out,
        target=choice.target,
        options=engine_options,
        revision=revision,
        wheel=wheel,
        pack=pack_weights,
        dump_ir=dump_ir,
        jobs=jobs,
        isa=isa,
    )
