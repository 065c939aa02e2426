"""A byte-level tokenizer for any vocabulary size, with as many token classes as a model asks for."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any

from tokenizers import Tokenizer

from deepinfer.errors import SpecError
from deepinfer.model_specs.engram import classes_of
from deepinfer.recipe.dialect import DIALECTS

_BYTES = 256
LEAST_VOCABULARY = _BYTES + 5  # bytes and the control tokens that a config may name
_LETTERS = 6  # of a filler word: 26^6 words with 2^6 spellings that fold together
_PAD = "<｜▁pad▁｜>"


def make_tokenizer(config: Mapping[str, Any], vocab_size: int, classes: int | None) -> str:
    """Text of a ``tokenizer.json`` of ``vocab_size`` ids: control tokens, the 256 bytes, and filler words.

    ``classes``: how many classes the ids must fold into (None: any). Control tokens lie at the ids that the config
    names and else at the end. Raises SpecError when the vocabulary is too small, or cannot have so many classes.
    """
    taken = _control_tokens(config, vocab_size)
    free = [i for i in range(vocab_size) if i not in taken]
    if len(free) < _BYTES:
        raise SpecError("the vocabulary has no room for the 256 byte tokens", where="config.json: vocab_size",
                        found=vocab_size, allowed=f">= {LEAST_VOCABULARY}")
    byte = _byte_characters()
    vocab = {byte[b]: i for b, i in zip(range(_BYTES), free, strict=False)}
    rest = free[_BYTES:]
    if classes is None:
        vocab |= zip(_spelled(itertools.islice(_words(), len(rest)), byte), rest, strict=True)
        return _document(vocab, taken)
    new = classes - (base := _classes_without_fillers(byte, taken))
    if not 0 <= new <= len(rest):
        raise SpecError("a made tokenizer cannot have as many token classes as the config asks for",
                        where="config.json: engram_compressed_vocab_size", found=classes,
                        allowed=f"{base}..{base + len(rest)} for {vocab_size} ids",
                        next_step="give a tokenizer of your own with --tokenizer, or change the key")
    texts = itertools.chain(itertools.islice(_words(), new), itertools.islice(_variants(new), len(rest) - new))
    vocab |= zip(_spelled(texts, byte), rest, strict=True)
    return _document(vocab, taken)


def _classes_without_fillers(byte: list[str], control: Mapping[int, str]) -> int:
    """Ids do not matter for the number of classes, but have to be without gaps."""
    moved = {_BYTES + i: word for i, word in enumerate(control.values())}
    tokenizer = Tokenizer.from_str(_document({c: b for b, c in enumerate(byte)}, moved))
    return int(classes_of(tokenizer).max()) + 1


def _control_tokens(config: Mapping[str, Any], vocab_size: int) -> dict[int, str]:
    """Id -> spelling. The dialect with a system token is that of models that name one as noise of their drafts."""
    text = config.get("text_config", config)
    wanted = {key: config.get(key, text.get(key)) for key in (
        "bos_token_id", "eos_token_id", "pad_token_id", "image_token_id", "dspark_noise_token_id")}
    newest = list(DIALECTS.values())[-1].tokens
    named = {wanted["bos_token_id"]: newest.begin, wanted["eos_token_id"]: newest.end, wanted["pad_token_id"]: _PAD,
             wanted["dspark_noise_token_id"]: newest.system, wanted["image_token_id"]: newest.image}
    placed = {int(i): str(word) for i, word in named.items() if i is not None and word and 0 <= i < vocab_size}
    words = [w for w in (newest.user, newest.assistant, newest.system, newest.think, newest.think_end, newest.dsml)
             if w and w not in placed.values()]
    for i in range(vocab_size - 1, -1, -1):
        if not words or len(placed) + _BYTES >= vocab_size:
            break
        if i not in placed:
            placed[i] = words.pop()
    return placed


def _byte_characters() -> list[str]:
    """The printable stand-in of each byte in a byte-level vocabulary: itself, or the next free one from 256 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = itertools.count(256)
    return [chr(b) if b in printable else chr(next(spare)) for b in range(_BYTES)]


def _words() -> Iterator[str]:
    """Lower-case words that differ from each other and from single letters."""
    for letters in itertools.product("abcdefghijklmnopqrstuvwxyz", repeat=_LETTERS):
        yield "".join(letters)


def _variants(words: int) -> Iterator[str]:
    """Further spellings of the first ``words`` words, or without any of one letter, in classes that exist already."""
    for blanks in itertools.count():
        for case in range(1 << _LETTERS):
            if words and (case or blanks):
                for word in itertools.islice(_words(), words):
                    yield " " * blanks + "".join(c.upper() if case >> i & 1 else c for i, c in enumerate(word))
        if not words and blanks:
            yield " " * blanks + "a"


def _spelled(texts: Iterator[str], byte: list[str]) -> Iterator[str]:
    return ("".join(byte[b] for b in text.encode()) for text in texts)


def _document(vocab: Mapping[str, int], control: Mapping[int, str]) -> str:
    added = [{"id": i, "content": word, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
              "special": True} for i, word in sorted(control.items())]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    words = dict(sorted({**vocab, **{w: i for i, w in control.items()}}.items(), key=lambda item: item[1]))
    model: dict[str, Any] = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
             "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
             "vocab": words, "merges": []}
    return json.dumps({"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
                       "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level, "model": model},
                      ensure_ascii=False) + "\n"
