"""Engram: hashed n-gram tables. The hash constants and the token classes they act on.

Classes: token ids whose text normalises to the same string share one class, numbered by first appearance. Each
layer has odd multipliers from a seeded generator; each (layer, n-gram order, head) has a prime modulus of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from deepinfer.dsl import Config
from deepinfer.errors import ArtifactError, SpecError
from deepinfer.tokenizer_file import read_tokenizer

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from tokenizers import Tokenizer

_LARGEST = 2**63 - 1
_SEED_STRIDE = 10007  # the released generator seeds layer L with 10007 * L


@dataclass(frozen=True)
class EngramTables:
    """Sizes and constants of all Engram layers."""

    layers: tuple[int, ...]
    declared_rows: tuple[int, ...]
    ngram: int
    heads: int
    head_dim: int
    first_prime: int
    pad_id: int
    classes: int
    primes: dict[int, tuple[tuple[int, ...], ...]]

    @staticmethod
    def read(c: Config, backbone_layers: int) -> EngramTables:
        layers = c.integers("engram_layer_ids")
        if list(layers) != sorted(set(layers)) or layers[0] < 0 or layers[-1] >= backbone_layers:
            raise c.error("engram_layer_ids must be rising layer ids", list(layers),
                          f"0..{backbone_layers - 1}, rising")
        ngram, heads = c.integer("engram_max_ngram_size", 2), c.integer("engram_n_heads")
        start = c.integer("engram_vocab_size", 2)
        t = EngramTables(
            layers, c.integers("engram_num_embeddings"), ngram, heads, c.integer("engram_head_dim"), start,
            c.integer("engram_pad_token_id", 0), c.integer("engram_compressed_vocab_size"),
            _moduli(layers, ngram - 1, heads, start))
        rows = tuple(t.rows(L) for L in layers)
        if rows != t.declared_rows:
            raise SpecError("engram_num_embeddings does not match the moduli that the other engram keys give",
                            where="config.json: text_config", found=list(t.declared_rows), allowed=list(rows))
        return t

    @property
    def columns(self) -> int:
        """Table rows read per token: one per n-gram order and head."""
        return (self.ngram - 1) * self.heads

    def multipliers(self, layer: int) -> list[int]:
        bound = max(1, _LARGEST // self.classes // 2)
        draws = np.random.default_rng(_SEED_STRIDE * layer).integers(0, bound, size=self.ngram, dtype=np.int64)
        return [int(v) * 2 + 1 for v in draws]

    def moduli(self, layer: int) -> tuple[tuple[int, ...], ...]:
        """[order][head]: primes, for n-grams of 2, 3, .. tokens."""
        return self.primes[layer]

    def offsets(self, layer: int) -> list[int]:
        """First table row of each column."""
        flat = [p for order in self.moduli(layer) for p in order]
        return [sum(flat[:i]) for i in range(len(flat))]

    def rows(self, layer: int) -> int:
        return sum(sum(order) for order in self.moduli(layer))


def _is_prime(n: int) -> bool:
    if n < 4:
        return n > 1
    return n % 2 == 1 and all(n % d for d in range(3, math.isqrt(n) + 1, 2))


def _moduli(layers: tuple[int, ...], orders: int, heads: int, start: int) -> dict[int, tuple[tuple[int, ...], ...]]:
    """Per layer, per order (each restarts at ``start``), per head: the next prime not used by anyone before."""
    used: set[int] = set()
    out: dict[int, tuple[tuple[int, ...], ...]] = {}
    for layer in layers:
        per_order = []
        for _ in range(orders):
            candidate, row = start, list[int]()
            while len(row) < heads:
                if candidate not in used and _is_prime(candidate):
                    used.add(candidate)
                    row.append(candidate)
                candidate += 1
            per_order.append(tuple(row))
        out[layer] = tuple(per_order)
    return out


def token_classes(checkpoint: Path, config: Config) -> NDArray[np.int64]:
    """Class of each token id, [vocab_size], from the checkpoint's tokenizer.json. Ids past the tokenizer get class 0.

    Raises ArtifactError when the file cannot be read or the number of classes is not
    ``engram_compressed_vocab_size``.
    """
    text_config = config.raw["text_config"]
    file = checkpoint / "tokenizer.json"
    if not file.is_file():
        raise ArtifactError("the checkpoint has no tokenizer.json, which the Engram layers need", where=str(file))
    out = np.zeros(int(text_config["vocab_size"]), dtype=np.int64)
    known = classes_of(read_tokenizer(file))[: len(out)]
    out[: len(known)] = known
    count, want = int(known.max(initial=-1)) + 1, int(text_config["engram_compressed_vocab_size"])
    if count != want:
        raise ArtifactError("the tokenizer gives another number of token classes than the Engram tables were made for",
                            where=str(file), found=count, allowed=want,
                            next_step="use the tokenizer.json of the same checkpoint")
    return out


def classes_of(tokenizer: Tokenizer) -> NDArray[np.int64]:
    """Class of each id of a tokenizer.

    Text of the single token (special tokens kept) -> NFKC, NFD, accents off, lower case, runs of blank/tab/CR/LF to
    one space, strip (a lone space stays). A token that is no complete UTF-8 keeps its vocabulary string; one with
    nothing left keeps its text.
    """
    from tokenizers import Regex, normalizers

    lone = "\ue000"
    clean = normalizers.Sequence([
        normalizers.NFKC(), normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase(),
        normalizers.Replace(Regex(r"[ \t\r\n]+"), " "), normalizers.Replace(Regex(r"^ $"), lone), normalizers.Strip(),
        normalizers.Replace(lone, " ")])
    seen: dict[str, int] = {}
    out = np.zeros(tokenizer.get_vocab_size(), dtype=np.int64)
    for i in range(len(out)):
        text = tokenizer.decode([i], skip_special_tokens=False)
        whole = "\ufffd" not in text
        key = clean.normalize_str(text) or text if whole else str(tokenizer.id_to_token(i))
        out[i] = seen.setdefault(key, len(seen))
    return out
