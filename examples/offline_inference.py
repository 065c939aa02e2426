"""Generate text with a compiled engine: a checkpoint, an engine for this machine, prompts, answers.

    python examples/offline_inference.py
    python examples/offline_inference.py --checkpoint /path/to/checkpoint "The three laws of"
    DEEPINFER_HF_MODEL_DIR=/path/to/checkpoint python examples/offline_inference.py

On an accelerator the default is the official checkpoint from the hub. On a CPU without a checkpoint the project's small
trained one is taken, which shows every step but knows little. The engine is compiled once and kept.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from time import perf_counter

import click
from rich.console import Console

from deepinfer import LLM, SamplingParams, __version__
from deepinfer.accelerator import resolve_target
from deepinfer.backends.base import HOST
from deepinfer.cli.failure import Command
from deepinfer.codegen.cache import cache_root, digest_of
from deepinfer.codegen.compile import compile_engine
from deepinfer.codegen.package import load_engine
from deepinfer.dsl.model import EngineOptions
from deepinfer.errors import ArtifactError
from deepinfer.model_specs.deepseek_v41_flash import HUB_IDS
from deepinfer.runtime.checkpoint import open_checkpoint
from deepinfer.runtime.checkpoint.checkpoint import LOCAL_VARIABLE
from deepinfer.tools.make_checkpoint.make import make_checkpoint

HERE = Path(__file__).resolve().parent
SHIPPED = HERE.parent / "assets" / "tiny"
CONFIG = HERE / "tiny_config.json"
PROMPTS = ("The three laws of", "Once upon a time", "def fibonacci(n):", "Dear reader,")
screen = Console(stderr=True, highlight=False)


def small_checkpoint() -> Path:
    """The project's small checkpoint if it is there, else one of random weights, made once."""
    if (SHIPPED / "config.json").is_file():
        screen.print(f"no checkpoint named: using the small one of the project in {SHIPPED}")
        return SHIPPED
    folder = cache_root() / "examples" / f"random-{digest_of({'config': json.loads(CONFIG.read_text())})[:12]}"
    if folder.is_dir():
        screen.print(f"no checkpoint named: using the small one with random weights in {folder}")
    else:
        screen.print(f"no checkpoint named: making a small one with random weights in {folder}")
        make_checkpoint(CONFIG, folder, console=screen)
    return folder


def engine_for(checkpoint: str, target: str, options: EngineOptions) -> Path:
    """The engine folder of a checkpoint's config on this target, compiled unless it is there and whole."""
    found = open_checkpoint(checkpoint)
    made_of = {"config": found.config, "target": target, "options": options.as_dict(), "version": __version__,
               "tensors": {name: [t.dtype, list(t.shape)] for name, t in found.headers.items()}}
    folder = cache_root() / "examples" / f"engine_{digest_of(made_of)[:12]}"
    if folder.is_dir():
        try:
            load_engine(folder)
            screen.print(f"using the engine in {folder}")
            return folder
        except ArtifactError as error:
            screen.print(f"compiling again: {error}")
    compile_engine(model=checkpoint, out=folder, target=target, options=options, isa=HOST, console=screen)
    return folder


@click.command(cls=Command, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("prompts", nargs=-1)
@click.option("--checkpoint", metavar="DIR_OR_HUB_ID", help=f"Default: {LOCAL_VARIABLE}; without it the official "
              "checkpoint on an accelerator, a small one on a CPU.")
@click.option("--engine", type=click.Path(path_type=Path, exists=True, file_okay=False), metavar="DIR",
              help="A compiled engine. Default: one is compiled for the checkpoint and kept.")
@click.option("--max-tokens", default=64, show_default=True, metavar="N", help="Most tokens of an answer.")
@click.option("--temperature", default=0.6, show_default=True, metavar="T", help="0 takes the most probable token.")
@click.option("--seed", type=int, metavar="N", help="Makes the answers repeatable.")
@click.option("--max-model-len", default=EngineOptions().max_model_len, show_default=True, metavar="TOKENS",
              help="Longest sequence of an engine that is compiled here.")
def main(prompts: tuple[str, ...], checkpoint: str | None, engine: Path | None, max_tokens: int, temperature: float,
         seed: int | None, max_model_len: int) -> None:
    """Answer PROMPTS (some of our own without any) and show how fast it went."""
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed)
    choice = resolve_target()
    screen.print(f"target {choice.target}: {choice.reason}")
    name = checkpoint or os.environ.get(LOCAL_VARIABLE)
    small = name is None and choice.target == "cpu"
    name = name or (str(small_checkpoint()) if small else HUB_IDS[0])
    options = EngineOptions(max_model_len=max_model_len)
    llm = LLM(engine or engine_for(name, choice.target, options), name)
    start = perf_counter()
    outputs = llm.generate(list(prompts or PROMPTS), params)
    seconds = perf_counter() - start
    for output in outputs:
        click.echo(f"{output.prompt!r} -> {output.text!r}")
    made = sum(len(output.token_ids) for output in outputs)
    read = sum(len(output.prompt_token_ids) for output in outputs)
    click.echo(f"{read} prompt tokens and {made} new tokens in {seconds:.2f} s: {made / seconds:.1f} tokens/s")
    if small:
        screen.print(f"next: point {LOCAL_VARIABLE} or --checkpoint at a checkpoint of yours, or compile one with\n"
                     "  deepinfer-compile --model DIR_OR_HUB_ID --out engines/my_engine")
    else:
        screen.print("next: `from deepinfer import LLM`; `deepinfer info` shows what an engine needs")


if __name__ == "__main__":
    main()
