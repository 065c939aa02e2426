"""From packages to token files: the tokenizer, the training streams and the held-out streams."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from . import corpus, vocabulary
from .chat import BOS, EOS, Piece, render
from .corpus import Document
from .dialogues import make_dialogue
from .entries import Entry, entries
from .vocabulary import Encoder

Tokens = NDArray[np.uint16]
STREAMS = ("prose", "code", "dialogue")
DIALOGUES, HELD_OUT_DIALOGUES, TOKENIZER_DIALOGUES = 40_000, 400, 6_000
TOKENIZER_PROSE, TOKENIZER_CODE = 3_500, 1_500


def _text_of(pieces: list[Piece]) -> str:
    return "\n".join(piece for piece in pieces if isinstance(piece, str))


def _train_tokenizer(training: list[Document], facts: list[Entry], path: Path) -> None:
    rng = random.Random(1)
    prose = [document.text for document in training if document.is_prose]
    code = [document.text for document in training if not document.is_prose]
    texts = rng.sample(prose, min(TOKENIZER_PROSE, len(prose))) + rng.sample(code, min(TOKENIZER_CODE, len(code)))
    texts += [_text_of(render(make_dialogue(rng, facts))) for _ in range(TOKENIZER_DIALOGUES)]
    vocabulary.train(texts).save(str(path))


def _document_stream(encoder: Encoder, documents: list[Document], seed: int) -> Tokens:
    """Every document between a begin and an end token, in random order."""
    shuffled = list(documents)
    random.Random(seed).shuffle(shuffled)
    begin, end = encoder.control_ids[BOS], encoder.control_ids[EOS]
    parts = [[begin, *ids, end] for ids in encoder.encode_text([document.text for document in shuffled])]
    return np.concatenate([np.array(part, dtype=np.uint16) for part in parts])


def _dialogue_stream(encoder: Encoder, facts: list[Entry], count: int, seed: int) -> Tokens:
    rng = random.Random(seed)
    parts = [encoder.encode(render(make_dialogue(rng, facts))) for _ in range(count)]
    return np.concatenate([np.array(part, dtype=np.uint16) for part in parts])


def split_entries(facts: list[Entry]) -> tuple[list[Entry], list[Entry]]:
    """(training, held out): every fiftieth entry is asked about in held-out dialogues alone."""
    kept = [entry for i, entry in enumerate(facts) if i % 50]
    return kept, [entry for i, entry in enumerate(facts) if i % 50 == 0]


def prepare(packages: Path, out: Path) -> None:
    """Fetch into ``packages`` what is missing there and write every token file into ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    corpus.fetch(packages)
    documents = corpus.documents(packages)
    training, held_out = corpus.split(documents)
    facts, held_out_facts = split_entries(entries(documents))
    path = out / "tokenizer.json"
    _train_tokenizer(training, facts, path)
    encoder = Encoder(path)
    streams = {
        "prose": _document_stream(encoder, [d for d in training if d.is_prose], 2),
        "code": _document_stream(encoder, [d for d in training if not d.is_prose], 3),
        "dialogue": _dialogue_stream(encoder, facts, DIALOGUES, 4),
        "heldout_text": _document_stream(encoder, held_out, 5),
        "heldout_dialogue": _dialogue_stream(encoder, held_out_facts, HELD_OUT_DIALOGUES, 6),
    }
    for name, tokens in streams.items():
        np.save(out / f"{name}.npy", tokens)
    report = {
        "documents": {"training": len(training), "held_out": len(held_out)},
        "bytes": {
            "prose": sum(len(d.text.encode()) for d in training if d.is_prose),
            "code": sum(len(d.text.encode()) for d in training if not d.is_prose),
            "held_out": sum(len(d.text.encode()) for d in held_out),
        },
        "tokens": {name: int(tokens.size) for name, tokens in streams.items()},
        "entries": len(facts),
        "control_ids": {piece: encoder.control_ids[piece] for piece in vocabulary.TAIL_TOKENS},
    }
    (out / "corpus.json").write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


