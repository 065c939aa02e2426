"""Token ids as text while they arrive: no character is split and none is lost."""

from __future__ import annotations

import codecs

from deepinfer.recipe.tokenizer import RecipeTokenizer


class StreamDecoder:
    """Turns ids into text one by one; bytes of an unfinished character wait for the next id."""

    def __init__(self, tokenizer: RecipeTokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The text that this id completes; empty while a character is unfinished and for an unknown id.

        Bytes that can no longer become a character come out as U+FFFD; a control token ends every wait.
        """
        if self._tokenizer.is_special(token_id):
            return self.finish() + self._tokenizer.token_text(token_id)
        return self._decoder.decode(self._tokenizer.token_bytes(token_id) or b"")

    def finish(self) -> str:
        """What is left of an unfinished character, as U+FFFD; the decoder can go on afterwards."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest
