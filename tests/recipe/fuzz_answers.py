"""Answers made of marker pieces, random text, random bytes and random ids, read in every kind of cut, for a while.

    python tests/recipe/fuzz_answers.py --budget 60 --json tests/recipe/fuzz_answers_result.json

Nothing may raise, no cut may change the body, and without tools no character may be lost or added.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

from test_answer_cuts import FRAGMENTS, SETTINGS, request

from deepinfer.recipe import packaged_tokenizer
from deepinfer.recipe.dialect import THINK_END
from deepinfer.recipe.tokenizer import RecipeTokenizer
from deepinfer.recipe.vector_parse import replay


def made(seeded: random.Random) -> str:
    """A text of 0 to 30 pieces: half of them markers or parts of such, the others characters or decoded bytes."""
    pieces = []
    for _ in range(seeded.randrange(30)):
        kind = seeded.random()
        if kind < 0.5:
            piece = seeded.choice(FRAGMENTS)
            pieces.append(piece[: seeded.randrange(1, len(piece) + 1)] if seeded.random() < 0.3 else piece)
        elif kind < 0.75:
            pieces.append(chr(seeded.choice([seeded.randrange(32, 127), seeded.randrange(0x100, 0xD7FF)])))
        else:
            pieces.append(seeded.randbytes(seeded.randrange(1, 9)).decode("utf-8", "replace"))
    return "".join(pieces)


def once(seeded: random.Random, tokenizer: RecipeTokenizer) -> str:
    """One answer; the kind of check it went through."""
    repair, finish = seeded.random() < 0.5, seeded.choice(["stop", "length"])
    if seeded.random() < 0.4:
        asked = request(**seeded.choice(SETTINGS))
        ids = [seeded.choice([seeded.randrange(129_300), seeded.randrange(256), 128821, 128822, 128825])
               for _ in range(seeded.randrange(40))]
        bodies = [replay(asked, chunks, finish, tokenizer, repair=repair)[1].body() for chunks in (
            [{"tokens": ids}], [{"tokens": [i]} for i in ids], cut(ids, "tokens", seeded))]
        assert bodies[0] == bodies[1] == bodies[2], (ids, bodies)
        return "ids"
    text, setting = made(seeded), seeded.choice(SETTINGS)
    asked = request(seeded.choice(["chat", "messages", "responses"]) if not setting else "chat", **setting)
    bodies = [replay(asked, chunks, finish, None, repair=repair)[1].body() for chunks in (
        [{"text": text}], [{"text": letter} for letter in text], cut(text, "text", seeded))]
    assert bodies[0] == bodies[1] == bodies[2], (text, bodies)
    _, processor = replay(request(tools=False), [{"text": text}], finish, None, repair=repair)
    message = processor.body()["choices"][0]["message"]
    seen = message["reasoning_content"] + message["content"]
    assert seen.replace("\n", "") == text.replace(THINK_END, "").replace("\n", ""), text
    return "text"


def cut(whole: Any, key: str, seeded: random.Random) -> list[dict[str, Any]]:
    places = sorted(seeded.randrange(len(whole) + 1) for _ in range(seeded.randrange(6)))
    return [{key: whole[a:b]} for a, b in zip([0, *places], [*places, len(whole)], strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", type=float, default=60, help="seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    seeded, tokenizer, counts = random.Random(given.seed), packaged_tokenizer("v4.1"), {"ids": 0, "text": 0}
    end = time.monotonic() + given.budget
    while time.monotonic() < end:
        counts[once(seeded, tokenizer)] += 1
    text = json.dumps({"seconds": given.budget, "seed": given.seed, "answers": counts, "failures": 0}, indent=1)
    print(text)
    if given.json is not None:
        given.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
