"""The byte-level BPE of the demonstration model, with DeepSeek's control tokens under their real spellings."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from .chat import ASSISTANT, BOS, DSML, EOS, PAD, SYSTEM, THINK, THINK_END, USER, Control, Piece

VOCAB_SIZE = 4096
IMAGE = "<｜deepseek_image｜>"
# Ids 0, 1, 2 belong to the first three; the others follow the ordinary entries, in this order.
HEAD_TOKENS = (BOS, EOS, PAD)
TAIL_TOKENS = (
    SYSTEM,
    "<｜fim▁hole｜>",
    "<｜fim▁begin｜>",
    "<｜fim▁end｜>",
    USER,
    ASSISTANT,
    THINK,
    THINK_END,
    DSML,
    "<｜latest_reminder｜>",
    "<｜action｜>",
    "<｜query｜>",
    "<｜authority｜>",
    "<｜domain｜>",
    "<｜title｜>",
    "<｜read_url｜>",
    IMAGE,
)
# Three isolating cuts, as in the released tokenizer: digit runs, East Asian runs, then words, marks and spaces.
_DIGITS = r"\p{N}{1,3}"
_EAST_ASIAN = r"[一-龥぀-ゟ゠-ヿ]+"
_WORDS = "|".join(
    (
        r"[!-/:-@\[-`{-~][A-Za-z]+",
        r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
        r" ?[\p{P}\p{S}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


def train(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """A tokenizer of exactly ``vocab_size`` ids."""
    tokenizer = Tokenizer(models.BPE())
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in (_DIGITS, _EAST_ASIAN, _WORDS)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(TAIL_TOKENS),
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in HEAD_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in TAIL_TOKENS])
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(
            f"The tokenizer has {tokenizer.get_vocab_size()} ids instead of {vocab_size}: "
            "the text is too short to learn that many merges.  Train it on more text."
        )
    return tokenizer


class Encoder:
    """Text to ids, where only :class:`Control` pieces become control ids."""

    def __init__(self, path: Path):
        self.tokenizer = Tokenizer.from_file(str(path))
        controls = (*HEAD_TOKENS, *TAIL_TOKENS)
        self.control_ids: dict[str, int] = {}
        for token in controls:
            found = self.tokenizer.token_to_id(token)
            if found is None:
                raise ValueError(f"{path} has no control token {token}; make it with the prepare command.")
            self.control_ids[token] = found
        # A copy without the added vocabulary: a control token's spelling in ordinary text stays text.
        description = json.loads(path.read_text(encoding="utf-8"))
        self._plain = Tokenizer.from_str(json.dumps({**description, "added_tokens": []}))

    def encode_text(self, texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._plain.encode_batch(texts, add_special_tokens=False)]

    def encode(self, pieces: list[Piece]) -> list[int]:
        texts = iter(self.encode_text([piece for piece in pieces if isinstance(piece, str)]))
        ids: list[int] = []
        for piece in pieces:
            ids += [self.control_ids[piece.spelling]] if isinstance(piece, Control) else next(texts)
        return ids
