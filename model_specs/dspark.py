"""DSpark heads: what turns the last draft layer's rows into tokens, shared by the specs that draft this way.

Left to right over the block: a Markov term from the previous token corrects the base logits, the argmax becomes
the draft token, and a linear probe of row and token estimates whether it will be accepted.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer.dsl import (
    Config,
    Node,
    Path,
    argmax,
    by_sequence,
    concat,
    contract,
    gather,
    output,
    reshape,
    rounded,
    slice_,
    token_ids,
)


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
    def read(c: Config, hidden: int, vocab: int) -> DSparkHeads:
        return DSparkHeads(
            c.integer("dspark_block_size"), c.integer("dspark_noise_token_id", 0), c.integers("dspark_target_layer_ids"),
            c.integer("dspark_markov_rank"), c.integer("dspark_n_routed_experts"),
            c.integer("dspark_num_experts_per_tok"), hidden, vocab)


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
        previous = argmax(z)
        tokens.append(previous)
        logits.append(z)
    output("tokens", concat(*tokens))
    output("draft_logits", concat(*logits, dim=0))
    output("base_logits", base)
    output("confidence", reshape(concat(*confidence, dim=0), d.block))
