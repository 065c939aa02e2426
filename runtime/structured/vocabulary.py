"""What the grammar library has to know of a tokenizer: the bytes of each token, and which tokens are no text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from deepinfer.errors import RequestError, ToolchainError
from deepinfer.recipe.errors import TokenizerError
from deepinfer.recipe.tokenizer import RecipeTokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

# fields that the grammar library's wrapper reads
_ENCODING = "utf-8"


class _Source:
    """The tokenizer as ``llguidance.TokenizerWrapper`` reads it. Every added token is a control token: inside a string
    of the answer none of them may stand, however it is spelled."""

    bos_token_id = None

    def __init__(self, tokenizer: RecipeTokenizer, size: int, end: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = end
        self.tokens = [tokenizer.token_bytes(i) or b"" for i in range(size)]
        self.special_token_ids = [i for i in range(size) if tokenizer.is_special(i) or not self.tokens[i]]
        for i in self.special_token_ids:
            self.tokens[i] = self.tokens[i] or b"<unused %d>" % i

    def __call__(self, text: str | bytes) -> list[int]:
        return self._tokenizer.encode(text.decode(_ENCODING) if isinstance(text, bytes) else text)


def grammar_tokens(tokenizer_json: Callable[[], str] | None, size: int, ends: Iterable[int]) -> LLTokenizer:
    """The vocabulary of a model for the grammar library.

    Args:
        tokenizer_json: gives the content of the tokenizer.json; None: there is none.
        size: of the vocabulary, as logits have it. ``ends``: ids of the model's end tokens.

    Raises:
        RequestError: the tokenizer cannot be used for this. ToolchainError: the library is missing.
    """
    found: Sequence[int] = sorted(i for i in ends if i < size)
    if tokenizer_json is None:
        raise RequestError("a form of the answer needs the model's tokenizer.json", where="structured_outputs",
                           next_step="give LLM the tokenizer.json of the model with tokenizer=")
    if not found:
        raise RequestError("a form of the answer needs the token that ends an answer", where="structured_outputs",
                           next_step="name eos_token_id in the checkpoint's generation_config.json")
    try:
        from llguidance import LLTokenizer, TokenizerWrapper
    except ImportError as error:
        raise ToolchainError("the library for grammars is missing", where="llguidance", found=str(error),
                             next_step="pip install llguidance") from None
    try:
        source = _Source(RecipeTokenizer(tokenizer_json()), size, found[0])
    except TokenizerError as error:
        raise RequestError("a form of the answer needs a byte-level tokenizer", where="structured_outputs",
                           found=str(error)) from None
    return LLTokenizer(TokenizerWrapper(source), n_vocab=size, eos_token=list(found))
