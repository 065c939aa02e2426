"""Command line of the tool."""

from __future__ import annotations

import re
from pathlib import Path

import click
from rich.console import Console

from deepinfer.cli.failure import Command
from deepinfer.tools.make_checkpoint.make import STORAGES, make_checkpoint

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)B?", re.IGNORECASE)
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


class Size(click.ParamType[int]):
    """``4GB``, ``500MB`` or a number of bytes."""

    name = "size"

    def convert(self, value: str | int, param: click.Parameter | None, ctx: click.Context | None) -> int:
        match = _SIZE.fullmatch(str(value).strip())
        if not match or float(match[1]) == 0:
            self.fail(f"{value!r} is no size; write 4GB, 500MB or a number of bytes", param, ctx)
        return int(float(match[1]) * _UNITS[match[2].upper()])


@click.command(cls=Command, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--config", "config_file", required=True, type=click.Path(path_type=Path), metavar="FILE",
              help="config.json of the model to make weights for, or a folder that holds one.")
@click.option("--seed", type=int, default=0, show_default=True, metavar="N",
              help="Equal seeds give equal bytes; each tensor depends on the seed and its own name only.")
@click.option("--out", required=True, type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
              help="Folder to write. It must not exist yet, or be empty.")
@click.option("--shard-size", type=Size(), default="4GB", show_default=True, metavar="SIZE",
              help="Largest file; a checkpoint that fits into one is written as model.safetensors.")
@click.option("--storage", type=click.Choice(STORAGES), default="official", show_default=True,
              help="official: as the config says (FP8 and FP4 blocks with scales); bf16 and f32: every weight plain, "
              "and the config written to DIR has no quantization_config.")
@click.option("--tokenizer", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="tokenizer.json to copy. Default: one is made, of byte and filler tokens, for the config's "
              "vocab_size and (V4.1) with exactly engram_compressed_vocab_size classes; the config is not changed.")
@click.option("--spec", metavar="MODULE", help="Dotted name of a spec module, for models that are not registered.")
def main(config_file: Path, seed: int, out: Path, shard_size: int, storage: str, tokenizer: Path | None,
         spec: str | None) -> None:
    """Make a random checkpoint in exactly the official names, shapes and storage formats.

    Values are normal with deviations that keep activations near unit size, so that every path of the model runs.
    Tensors are made piece by piece: memory does not grow with the checkpoint.

    \b
    Examples:
      python -m deepinfer.tools.make_checkpoint --config tests/golden/cases/v41_c_quant/config.json --out /tmp/tiny
      python -m deepinfer.tools.make_checkpoint --config ./config.json --seed 7 --shard-size 10GB --out ./random
    """
    made = make_checkpoint(config_file, out, seed=seed, shard_bytes=shard_size, storage=storage, tokenizer=tokenizer,
                           spec=spec, console=Console(stderr=True))
    click.echo(f"made {made.tensors} tensors, {made.bytes} bytes, in {made.files} files: {out}")
    if not made.tokenizer:
        click.echo("no tokenizer.json: the vocabulary is too small for one; prompts have to be token ids", err=True)


if __name__ == "__main__":
    main()
