"""Command line: python -m tools.train_tiny prepare | train | export | baseline | evaluate | card."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

import torch

from . import checkpoint, schedule
from .engram import load_classes, table_primes
from .shape import Shape
from .vocabulary import IMAGE, Encoder


def shape_for(tokenizer: Path) -> Shape:
    """The demonstration model's shape, with what follows from the tokenizer filled in."""
    classes = load_classes(tokenizer)
    encoder = Encoder(tokenizer)
    shape = Shape(
        engram_compressed_vocab_size=int(classes.max()) + 1,
        dspark_noise_token_id=encoder.control_ids["<｜System｜>"],
    )
    return replace(shape, engram_num_embeddings=tuple(sum(primes) for primes in table_primes(shape).values()))


def _prepare(options: argparse.Namespace) -> None:
    from .prepare import prepare

    prepare(options.packages, options.data)


def _train(options: argparse.Namespace) -> None:
    from .train import Trainer

    tokenizer = options.data / "tokenizer.json"
    plan = schedule.SMOKE if options.smoke else schedule.parse(options.steps)
    shape = shape_for(tokenizer)
    trainer = Trainer(shape, load_classes(tokenizer), options.data, plan, torch.device(options.device))
    if options.state.exists():
        trainer.load(options.state)
    elif options.start is not None:
        trainer.begin_from(options.start)
    done = trainer.run(options.log, options.minutes * 60)
    trainer.save(options.state)
    print(f"leg done={done} state={options.state}")


def _export(options: argparse.Namespace) -> None:
    from .train import Trainer

    tokenizer = options.data / "tokenizer.json"
    trainer = Trainer(shape_for(tokenizer), load_classes(tokenizer), options.data, (), torch.device("cpu"))
    trainer.load(options.state)
    image = Encoder(tokenizer).control_ids[IMAGE]
    checkpoint.write(options.out, trainer.backbone, trainer.draft, image, quantised=not options.float32)
    (options.out / "tokenizer.json").write_bytes(tokenizer.read_bytes())


def _baseline(options: argparse.Namespace) -> None:
    from .evaluate import baseline

    _write(options.out, baseline(options.data, options.chunks))


def _evaluate(options: argparse.Namespace) -> None:
    from .evaluate import evaluate

    device = torch.device(options.device)
    folders = (options.checkpoint, options.unquantised, options.sequences, options.data)
    _write(options.out, evaluate(*folders, device, options.scale))


def _card(options: argparse.Namespace) -> None:
    from .card import write_card

    write_card(options.checkpoint, options.data, options.baseline, options.report, options.log, options.note)


def _write(path: Path, report: object) -> None:
    path.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.train_tiny", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def command(name: str, run: object, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(run=run)
        sub.add_argument("--data", type=Path, required=True, help="folder of the token files")
        return sub

    sub = command("prepare", _prepare, "fetch and clean the text, train the tokenizer, write the token files")
    sub.add_argument("--packages", type=Path, required=True, help="folder to unpack Debian packages into")
    sub = command("train", _train, "train one leg, from the saved state if there is one")
    sub.add_argument("--state", type=Path, required=True, help="file that a leg ends with and the next starts from")
    sub.add_argument("--start", type=Path, help="checkpoint folder to take the first weights from")
    sub.add_argument("--log", type=Path, required=True, help="JSON lines are appended here")
    sub.add_argument("--minutes", type=float, default=9.0, help="end the leg after so long (default 9)")
    sub.add_argument("--steps", default="", help="other step counts, such as short=2000,final=1000")
    sub.add_argument("--smoke", action="store_true", help="a plan of a few tiny steps")
    sub.add_argument("--device", default=device)
    sub = command("export", _export, "write the official checkpoint format")
    sub.add_argument("--state", type=Path, required=True)
    sub.add_argument("--out", type=Path, required=True, help="checkpoint folder")
    sub.add_argument("--float32", action="store_true", help="without quantisation, for comparing")
    sub = command("baseline", _baseline, "held-out loss of a 5-gram model on the same text")
    sub.add_argument("--out", type=Path, required=True, help="JSON report")
    sub.add_argument("--chunks", type=int, help="judge so many chunks of 2,048 tokens (default: all)")
    sub = command("evaluate", _evaluate, "measure a checkpoint: losses, replay, speculation, samples")
    sub.add_argument("--checkpoint", type=Path, required=True)
    sub.add_argument("--unquantised", type=Path, help="checkpoint written with --float32")
    sub.add_argument("--out", type=Path, required=True, help="JSON report")
    sub.add_argument("--sequences", type=Path, help="JSON list of greedy sequences that an engine made")
    sub.add_argument("--scale", type=float, default=1.0, help="share of the prompts to use (default 1)")
    sub.add_argument("--device", default=device)
    sub = command("card", _card, "write the model card and the calibration beside a checkpoint")
    sub.add_argument("--checkpoint", type=Path, required=True)
    sub.add_argument("--baseline", type=Path, required=True, help="report of the baseline command")
    sub.add_argument("--report", type=Path, required=True, help="report of the evaluate command")
    sub.add_argument("--log", type=Path, required=True, help="log of the training")
    sub.add_argument("--note", default="", help="a paragraph for below the training table: where the run left the plan")
    return parser


def main() -> int:
    options = _parser().parse_args()
    try:
        options.run(options)
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
