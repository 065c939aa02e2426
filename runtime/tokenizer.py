"""A checkpoint's own tokenizer.json behind two functions, text to ids and ids to text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from deepinfer.errors import ArtifactError, RequestError
from deepinfer.runtime.engine_core import TextSide
from deepinfer.tokenizer_file import read_tokenizer


def load_text_side(tokenizer: Any, folder: Path | None) -> TextSide | None:
    """The text side of an engine.

    Args:
        tokenizer: None (the checkpoint's, if it has one), a tokenizer.json or its folder, a ``tokenizers.Tokenizer``,
            or anything with ``encode(text)`` and ``decode(ids)`` such as a tokenizer of transformers.
        folder: the checkpoint.
    """
    if tokenizer is None:
        if folder is None or not (folder / "tokenizer.json").is_file():
            return None
        tokenizer = folder
    if isinstance(tokenizer, str | Path):
        file = Path(tokenizer)
        return _of_tokenizers(*_read(file / "tokenizer.json" if file.is_dir() else file))
    if isinstance(tokenizer, Tokenizer):
        return _of_tokenizers(tokenizer, None)
    if not callable(getattr(tokenizer, "encode", None)) or not callable(getattr(tokenizer, "decode", None)):
        raise ArtifactError("not a tokenizer", where="tokenizer", found=type(tokenizer).__name__,
                            allowed="a path, a tokenizers.Tokenizer, or an object with encode and decode")
    return TextSide(lambda text: [int(i) for i in tokenizer.encode(text)],
                    lambda ids, skip: str(tokenizer.decode(list(ids), skip_special_tokens=skip)))


def end_ids(folder: Path | None) -> tuple[int, ...]:
    """Ids that end an answer: ``eos_token_id`` of generation_config.json, else of config.json; () when none says so."""
    for name in ("generation_config.json", "config.json"):
        config = _json(folder / name) if folder is not None else {}
        text = config.get("text_config")
        for part in (config, text if isinstance(text, dict) else {}):
            found = part.get("eos_token_id")
            if found is not None:
                ids = found if isinstance(found, list) else [found]
                if not all(isinstance(i, int) for i in ids):
                    raise ArtifactError("the end token is no token id", where=f"{name}: eos_token_id", found=found)
                return tuple(ids)
    return ()


def _read(file: Path) -> tuple[Tokenizer, int | None]:
    """The tokenizer, and the id to put in front of a text when tokenizer_config.json says so (``add_bos_token``)."""
    if not file.is_file():
        raise ArtifactError("there is no tokenizer", where=file, next_step="name a tokenizer.json with tokenizer=")
    tokenizer = read_tokenizer(file)
    config = _json(file.with_name("tokenizer_config.json"))
    first = config.get("bos_token")
    first = first.get("content") if isinstance(first, dict) else first
    return tokenizer, tokenizer.token_to_id(first) if config.get("add_bos_token") and first else None


def _of_tokenizers(tokenizer: Tokenizer, first: int | None) -> TextSide:
    def encode(text: str) -> list[int]:
        if not isinstance(text, str):
            raise RequestError("a text is needed", where="prompt", found=type(text).__name__)
        ids: list[int] = tokenizer.encode(text).ids
        return ids if first is None or ids[:1] == [first] else [first, *ids]

    def decode(ids: Sequence[int], skip_special_tokens: bool) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    return TextSide(encode, decode, tokenizer.to_str)


def _json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ArtifactError("the file cannot be read", where=file, found=error) from None
    return found if isinstance(found, dict) else {}
