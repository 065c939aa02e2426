"""DSpark heads: what turns the last draft layer's rows into tokens, shared by the specs that draft this way.

Left to right over the block: a Markov term from the previous token corrects the base logits, a draw from them is
the draft token, and a linear probe of row and token estimates whether it will be accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deepinfer.dsl import (
    Config,
    Node,
    Path,
    by_sequence,
    concat,
    contract,
    draw,
    flatten,
    gather,
    output,
    reduce,
    reshape,
    rms_norm,
    rounded,
    slice_,
    token_ids,
)
from deepinfer.model_specs.blocks import Linear


@dataclass(frozen=True)
class DSparkHeads:
    """Sizes of the draft head. ``noise_token`` fills the block after the anchor; ``targets`` are the tapped layers."""

    block: int
    noise_token: int
    targets: tuple[int, ...]
    rank: int
    experts: int
    experts_per_tok: int
    hidden: int
    vocab: int
    embed_name: str = "embed"
    head_name: str = "head"

    @staticmethod
    def read(c: Config, hidden: int, vocab: int, layers: int, experts: tuple[int, int] | None = None,
             names: tuple[str, str] = ("embed", "head")) -> DSparkHeads:
        """The ``dspark_`` keys. ``experts``: (count, per token) of the draft layers, None: from the config;
        ``names``: of the Markov head's tensors. Raises SpecError when the tapped layers are none of the backbone."""
        count, per_token = experts or (c.integer("dspark_n_routed_experts"), c.integer("dspark_num_experts_per_tok"))
        d = DSparkHeads(
            c.integer("dspark_block_size"), c.integer("dspark_noise_token_id", 0),
            c.integers("dspark_target_layer_ids"), c.integer("dspark_markov_rank"), count, per_token, hidden, vocab,
            *names)
        rising = bool(d.targets) and list(d.targets) == sorted(set(d.targets))
        if not rising or d.targets[0] < 0 or d.targets[-1] >= layers:
            raise c.error("dspark_target_layer_ids must be rising layer ids", list(d.targets),
                          f"0..{layers - 1}, rising")
        if d.noise_token >= vocab:
            raise c.error("dspark_noise_token_id is not a token", d.noise_token, f"0..{vocab - 1}")
        return d


def context_rows(taps: Sequence[Node], first: Path, linear: Linear, eps: float) -> Node:
    """What the draft layers make their context keys from: the tapped layers' features joined, projected, normed.

    ``first``: names of the first draft layer, which holds the projection. Taps and result are [hidden].
    """
    hidden = taps[0].type.size
    x = linear(concat(*taps), first.main_proj.matrix(hidden, len(taps) * hidden))
    return rms_norm(x, first.main_norm.vector(hidden), eps)


def tap(h: Node) -> Node:
    """Feature [hidden] of streams [mult, hidden]: their mean, held in bf16."""
    return rounded(flatten(reduce(h, "mean", (0,))))


def draft_outputs(d: DSparkHeads, rows: Node, base: Node, p: Path) -> None:
    """Publishes ``tokens`` [block], ``draft_logits`` and ``base_logits`` [block, vocab], ``confidence`` [block] per
    sequence.

    ``rows`` [hidden]: collapsed rows before the norm; ``base`` [vocab]: logits without the Markov term; ``confidence``
    is the value before the sigmoid.
    """
    rows, base = by_sequence(rows, d.block), by_sequence(base, d.block)
    embed = getattr(p.markov_head, d.embed_name).vector(d.vocab, d.rank)
    head = getattr(p.markov_head, d.head_name).vector(d.vocab, d.rank)
    probe = p.confidence_head.proj.vector(1, d.hidden + d.rank)
    previous = slice_(by_sequence(token_ids(), d.block), 0, 1)
    tokens, logits, confidence = [], [], []
    for j in range(d.block):
        e = rounded(gather(embed, previous))
        z = slice_(base, j, j + 1, dim=0) + contract(e, head)
        confidence.append(contract(concat(slice_(rows, j, j + 1, dim=0), e), probe))
        previous = draw(z, ahead=j)
        tokens.append(previous)
        logits.append(z)
    output("tokens", concat(*tokens))
    output("draft_logits", concat(*logits, dim=0))
    output("base_logits", base)
    output("confidence", reshape(concat(*confidence, dim=0), d.block))
