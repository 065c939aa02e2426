"""Attention that DeepSeek specs share: one key/value vector per position, an indexer that picks compressed entries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deepinfer.dsl import (
    Config,
    DType,
    Node,
    Path,
    Rope,
    Source,
    Window,
    attend,
    contract,
    encode,
    flatten,
    hadamard_matrix,
    index_score,
    reduce,
    reshape,
    rms_norm,
    rounded,
    rsqrt,
)
from deepinfer.model_specs.blocks import Linear


@dataclass(frozen=True)
class LatentAttention:
    """Low-rank queries, one vector per position that is key and value of all heads, grouped low-rank output.

    ``head_norm``: each query head is normed without weights. ``wo_a_input``: ``reference`` (bf16, as the released code
    multiplies) or ``production`` (the activation format that the weight's storage implies). Positions default to
    those of the rows.
    """

    linear: Linear
    hidden: int
    heads: int
    head_dim: int
    q_rank: int
    o_groups: int
    o_rank: int
    eps: float
    head_norm: bool
    wo_a_input: str

    @staticmethod
    def read(c: Config, linear: Linear, wo_a_input: str, head_norm: bool) -> LatentAttention:
        """Sizes from a config; raises SpecError when the heads do not divide into the output groups."""
        a = LatentAttention(
            linear, c.integer("hidden_size"), c.integer("num_attention_heads"), c.integer("head_dim"),
            c.integer("q_lora_rank"), c.integer("o_groups"), c.integer("o_lora_rank"), c.number("rms_norm_eps"),
            head_norm, wo_a_input)
        if a.heads % a.o_groups:
            raise c.error("num_attention_heads must be a multiple of o_groups", a.heads,
                          f"a multiple of {a.o_groups}")
        return a

    def queries(self, x: Node, p: Path, rope: Rope, at: Node | None = None) -> tuple[Node, Node]:
        """(qr [q_lora_rank], q [heads, head_dim])."""
        qr = self.linear(x, p.wq_a.matrix(self.q_rank, self.hidden))
        qr = rms_norm(qr, p.q_norm.vector(self.q_rank), self.eps)
        q = self.linear(qr, p.wq_b.matrix(self.heads * self.head_dim, self.q_rank))
        q = reshape(q, self.heads, self.head_dim)
        return qr, rope(self.normed_heads(q) if self.head_norm else q, at)

    def normed_heads(self, q: Node) -> Node:
        """``q / sqrt(mean(q^2) + eps)`` per head, every step held in bf16."""
        mean = rounded(reduce(rounded(q * q), "mean", (-1,)))
        return rounded(q * rounded(rsqrt(rounded(mean + self.eps))))

    def window_key(self, x: Node, p: Path, rope: Rope, at: Node | None = None) -> Node:
        """One vector [head_dim] per position: key and value of all heads."""
        k = self.linear(x, p.wkv.matrix(self.head_dim, self.hidden))
        return rope(rms_norm(k, p.kv_norm.vector(self.head_dim), self.eps), at)

    def over(self, q: Node, sources: Sequence[Source], p: Path, rope: Rope, at: Node | None = None) -> Node:
        """One softmax per head over the sources and the head's sink, then the output projection: [hidden]."""
        o = attend(q, sources, self.head_dim**-0.5, sink=p.attn_sink.f32(self.heads))
        return self.project_out(o, p, rope, at)

    def over_block(self, x: Node, p: Path, window: Window, context: int, rope: Rope,
                   at: Node | None = None) -> Node:
        """A draft layer: every row of the block sees ``context`` rows of the window and all rows of the block, whose
        keys are read as the window would store them."""
        _, q = self.queries(x, p, rope, at)
        key = encode(self.window_key(x, p, rope, at), window.record)
        sources = [Source("context", context, window.handle()), Source("block", 0, key)]
        return self.over(q, sources, p, rope, at)

    def project_out(self, o: Node, p: Path, rope: Rope, at: Node | None = None) -> Node:
        """Turn back (values are turned keys), then the grouped low-rank output projection."""
        width = self.heads * self.head_dim // self.o_groups
        z = reshape(rope.back(rounded(o), at), self.o_groups, width)
        wo_a = p.wo_a.matrix(self.o_groups * self.o_rank, width)
        if self.wo_a_input == "production":
            z = self.linear.cast(z, wo_a)
        z = rounded(contract(z, wo_a, groups=self.o_groups))
        return self.linear(flatten(z), p.wo_b.matrix(self.hidden, self.o_groups * self.o_rank))


@dataclass(frozen=True)
class Indexer:
    """Scores compressed entries for each row with small keys of their own.

    ``record``: storage format of queries and keys. ``hadamard``: both are multiplied by the orthogonal Hadamard matrix
    first, which leaves their products as they are and spreads outliers over the groups of the format.
    """

    linear: Linear
    hidden: int
    heads: int
    dim: int
    topk: int
    q_rank: int
    record: DType
    hadamard: bool

    @staticmethod
    def read(c: Config, linear: Linear, record: DType, hadamard: bool) -> Indexer:
        """Sizes from a config; raises SpecError when ``index_head_dim`` does not fit the format."""
        i = Indexer(linear, c.integer("hidden_size"), c.integer("index_n_heads"), c.integer("index_head_dim"),
                    c.integer("index_topk"), c.integer("q_lora_rank"), record, hadamard)
        if record.is_block and i.dim % record.block[1]:
            raise c.error(f"index_head_dim does not divide into the groups of {record}", i.dim,
                          f"a multiple of {record.block[1]}", "use the option cache_format=f32")
        if hadamard and i.dim & (i.dim - 1):
            raise c.error("index_head_dim has no Hadamard matrix", i.dim, "a power of two",
                          "use the option cache_format=f32")
        return i

    def spread(self, x: Node) -> Node:
        """x [.., dim] times the Hadamard matrix over sqrt(dim), held in bf16; x itself when the model has none."""
        return rounded(contract(x, hadamard_matrix(self.dim)) * self.dim**-0.5) if self.hadamard else x

    def scores(self, x: Node, qr: Node, p: Path, rope: Rope, keys: Node, ratio: int) -> Node:
        """[entries/ratio] from the sub-layer's input and the low-rank query; -inf where an entry is not visible."""
        q = self.linear(qr, p.wq_b.matrix(self.heads * self.dim, self.q_rank))
        q = self.spread(rope(reshape(q, self.heads, self.dim)))
        if self.record.is_block:
            q = encode(q, self.record)
        w = self.linear(x, p.weights_proj.plain_matrix(self.heads, self.hidden), rounds=None)
        w = rounded(rounded(w) * (self.dim**-0.5 * self.heads**-0.5))
        return index_score(q, keys, w, ratio)
