"""The text side of the front end: which prompt dialect a tokenizer belongs to, prompts as ids."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from deepinfer.errors import ArtifactError, RequestError
from deepinfer.recipe import DIALECTS, ConvertedRequest, Dialect, RecipeTokenizer, TokenizerError, render, render_fim

_NOT_NEEDED = {"image", "reminder"}  # no text prompt of every conversation holds them
_WORKERS = 2  # threads for one long text, where the cuts are known to be harmless


class Vocabulary:
    """A tokenizer with the dialect that fits it.

    Args:
        tokenizer: None: the checkpoint has none, so only prompts of ids can be served.
        dialect: by name; None: the one with the most control tokens that the tokenizer has all of.
    """

    def __init__(self, tokenizer: RecipeTokenizer | None, dialect: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._workers = _WORKERS if tokenizer is not None and tokenizer.cuts_are_known else 1
        self.dialect: Dialect | None = None
        if dialect is not None:
            self.dialect = DIALECTS[dialect]
        elif tokenizer is not None:
            fitting = [d for d in DIALECTS.values() if not missing_tokens(d, tokenizer)]
            self.dialect = max(fitting, key=lambda d: len(_spellings(d)), default=None)

    @property
    def has_text(self) -> bool:
        """Whether there is a tokenizer at all."""
        return self._tokenizer is not None

    @property
    def tokenizer(self) -> RecipeTokenizer:
        """RequestError where there is none."""
        if self._tokenizer is None:
            raise RequestError("this engine's checkpoint has no tokenizer",
                               next_step="send token ids to /v1/completions, or name a tokenizer with --tokenizer")
        return self._tokenizer

    def conversation_dialect(self) -> Dialect:
        """RequestError where the tokenizer lacks what conversations need."""
        tokenizer = self.tokenizer
        if self.dialect is None:
            best = min(DIALECTS.values(), key=lambda d: len(missing_tokens(d, tokenizer)))
            lacking = ", ".join(missing_tokens(best, tokenizer))
            raise RequestError("this model's tokenizer lacks control tokens that conversations need",
                               found=f"no {lacking}", next_step="use plain completions")
        return self.dialect

    def prompt(self, request: ConvertedRequest) -> list[int]:
        """The ids of a conversation."""
        prompt = render(request.conversation, self.conversation_dialect())
        return self.tokenizer.encode_prompt(prompt, workers=self._workers)

    def completion(self, text: str, suffix: str | None) -> list[int]:
        """The ids of a plain prompt, or of a hole between text and suffix."""
        dialect = self.dialect or next(iter(DIALECTS.values()))
        try:
            return self.tokenizer.encode_prompt(render_fim(text, suffix, dialect), workers=self._workers)
        except TokenizerError as error:
            raise RequestError(f"this model's tokenizer cannot take the prompt: {error}") from None


def read_vocabulary(folder: Path | None, dialect: str | None) -> Vocabulary:
    """The vocabulary of a checkpoint folder, or of a tokenizer.json.

    Raises:
        ArtifactError: the file cannot be read, or it lacks control tokens of the dialect that was asked for.
    """
    file = folder / "tokenizer.json" if folder is not None and folder.is_dir() else folder
    if file is None or not file.is_file():
        return Vocabulary(None)
    tokenizer = RecipeTokenizer.from_file(file)
    if dialect is not None and (lacking := missing_tokens(DIALECTS[dialect], tokenizer)):
        raise ArtifactError("the tokenizer is not one of this dialect", where=file, found=f"no {', '.join(lacking)}",
                            next_step="leave --dialect out, or name the right one")
    return Vocabulary(tokenizer, dialect)


def missing_tokens(dialect: Dialect, tokenizer: RecipeTokenizer) -> list[str]:
    """Control tokens that conversations of a dialect need and the tokenizer lacks."""
    lacking = []
    for spelling in _spellings(dialect):
        try:
            tokenizer.special_id(spelling)
        except TokenizerError:
            lacking.append(spelling)
    return lacking


def _spellings(dialect: Dialect) -> list[str]:
    tokens = dialect.tokens
    named = [(f.name, getattr(tokens, f.name)) for f in fields(tokens)]
    return [text for name, text in named if text is not None and name not in _NOT_NEEDED and "fim" not in name]
