"""Encoding one long text on several cores, with cuts that cannot change the ids.

The pre-tokenizer splits text into pieces before any merge, so a cut is harmless exactly where two pieces meet
whatever stands around them. Two such places are used: behind a line feed when a non-space follows, and between
an ASCII letter and a space that an ASCII letter follows. Near other white space, digits, ideographs, carriage
returns or punctuation a piece may reach across.
"""

from __future__ import annotations

import re
from typing import Final

from tokenizers import Tokenizer

SHORTEST_PART: Final = 16_384
PARTS_PER_WORKER: Final = 4
_CUT = re.compile(r"\n(?=\S)|[A-Za-z](?= [A-Za-z])")


def encode_parallel(tokenizer: Tokenizer, text: str, workers: int) -> list[int]:
    """Ids of `text`, equal to encoding it in one piece.

    Args:
        tokenizer: without added tokens; its pre-tokenizer has to be the models' own.
        workers: how many cores the text is cut for; 1 encodes in one piece. The thread pool of the tokenizers
            library runs the parts; `RAYON_NUM_THREADS` bounds it.
    """
    if not text:
        return []
    parts = (
        split(text, max(SHORTEST_PART, len(text) // (workers * PARTS_PER_WORKER))) if workers > 1 else [text]
    )
    encodings = tokenizer.encode_batch_fast(parts, add_special_tokens=False)
    ids: list[int] = encodings[0].ids
    for encoding in encodings[1:]:
        ids.extend(encoding.ids)
    return ids


def split(text: str, length: int) -> list[str]:
    """`text` in parts of about `length` characters, cut at harmless places; longer where there is none."""
    parts: list[str] = []
    start = 0
    while len(text) - start > length:
        cut = _CUT.search(text, start + length - 1)
        if cut is None or cut.end() >= len(text):
            break
        parts.append(text[start : cut.end()])
        start = cut.end()
    parts.append(text[start:])
    return parts
