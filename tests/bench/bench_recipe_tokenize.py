"""Serial against parallel encoding of one long text.

    python tests/bench/bench_recipe_tokenize.py --megabytes 1 --workers 2

prints the median and the best of the rounds, tokens per second and the speed-up; the ids of both are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable

from deepinfer.recipe import RecipeTokenizer, packaged_tokenizer

PROSE = """the model reads a long report on rivers and bridges while engineers measure water, steel, light and
time; every value is written down again: 12.5 metres, 3,400 people, "two" signs (see page 7). Über das Wasser führt
ein Weg. def total(rows): return sum(row.count for row in rows if row.ok) # checked 水 は 流れる"""
ENDS = ("\n", "\n", "\n\n", " ")


def long_text(size: int, seed: int) -> str:
    """Prose-like text of about `size` bytes with lines, numbers, code and some Japanese."""
    rng, words = random.Random(seed), PROSE.split()
    parts: list[str] = []
    length = 0
    while length < size:
        line = " ".join(rng.choice(words) for _ in range(rng.randint(4, 24))) + rng.choice(ENDS)
        parts.append(line)
        length += len(line.encode("utf-8"))
    return "".join(parts)


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of parallel tokenisation.")
    parser.add_argument("--megabytes", type=float, default=1.0, help="size of the text (default: 1)")
    parser.add_argument("--workers", type=int, default=2, help="cores for the parallel run (default: 2)")
    parser.add_argument(
        "--rounds", type=int, default=7, help="runs of each kind; the median counts (default: 7)"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--file", help="a text file instead of the made-up text")
    given = parser.parse_args()
    tokenizer: RecipeTokenizer = packaged_tokenizer("v4.1")
    if given.file:
        with open(given.file, encoding="utf-8") as file:
            text = file.read()
    else:
        text = long_text(int(given.megabytes * 1e6), given.seed)
    ids = tokenizer.encode(text)
    same = tokenizer.encode(text, workers=given.workers) == ids
    # the two kinds take turns, so that other load on the machine meets both
    rounds = [
        (
            seconds(lambda: tokenizer.encode(text)),
            seconds(lambda: tokenizer.encode(text, workers=given.workers)),
        )
        for _ in range(given.rounds)
    ]
    serial, parallel = (statistics.median(column) for column in zip(*rounds, strict=True))
    best_serial, best_parallel = (min(column) for column in zip(*rounds, strict=True))
    print(
        json.dumps(
            {
                "bytes": len(text.encode("utf-8")),
                "tokens": len(ids),
                "same_ids": same,
                "cores": os.cpu_count(),
                "workers": given.workers,
                "python": platform.python_version(),
                "serial_s": round(serial, 4),
                "parallel_s": round(parallel, 4),
                "serial_tokens_per_s": round(len(ids) / serial),
                "parallel_tokens_per_s": round(len(ids) / parallel),
                "speedup": round(serial / parallel, 2),
                "best_serial_s": round(best_serial, 4),
                "best_parallel_s": round(best_parallel, 4),
                "best_speedup": round(best_serial / best_parallel, 2),
            }
        )
    )


if __name__ == "__main__":
    main()
