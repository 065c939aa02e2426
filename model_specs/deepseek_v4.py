"""DeepSeek V4 (``DeepseekV4ForCausalLM``): V4-Flash and V4-Pro, with the MTP block or the DSpark head as draft.

Each layer keeps a window of keys; ``compress_ratios`` adds compressed entries to some: ratio 4 (CSA) pools overlapping
groups of four positions and an indexer picks entries, ratio 128 (HCA) pools plain groups and reads every entry. The
first layers choose their experts by token id. Four residual streams are mixed by hyper-connections; nothing else
passes from layer to layer.

Drafts. A *DSpark* head taps the outputs of a few layers; ``step`` extends the context windows of the draft layers and
``draft`` runs the block [anchor, noise, ...] at positions n .. n + block - 1. The *MTP* block joins the token at
position i with the streams that the last layer left at position i - 1 and predicts position i + 1; its row i is
turned by RoPE at i - 1. A row's key needs nothing but these two inputs, so ``step`` writes the keys of its own rows
(window ``draft.0``, whose first position is 1) and keeps the last row's streams (window ``streams``), and ``draft``
runs one row, [anchor] at position n. Both drafts write no state, and a rejected token needs no repair: its rows are
overwritten by the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from deepinfer.dsl import (
    Config,
    EngineOptions,
    GroupTail,
    Ignored,
    Model,
    Node,
    Paged,
    Params,
    Path,
    Rope,
    Source,
    States,
    StoredTensor,
    Window,
    backtrack,
    bf16,
    by_sequence,
    contract,
    draw,
    f32,
    flatten,
    gather,
    group_positions,
    imod,
    isub,
    mxfp4,
    mxfp8,
    output,
    positions,
    reshape,
    ring_slack,
    rms_norm,
    rope_frequencies,
    rounded,
    scope,
    token_ids,
    top_k,
)
from deepinfer.model_specs import blocks, depth
from deepinfer.model_specs.attention import Indexer, LatentAttention
from deepinfer.model_specs.dspark import DSparkHeads, context_rows, draft_outputs, tap

ARCHITECTURE = "DeepseekV4ForCausalLM"
MODEL_TYPES = ("deepseek_v4",)
HUB_IDS = ("deepseek-ai/DeepSeek-V4-Flash-0731", "deepseek-ai/DeepSeek-V4-Flash-DSpark",
           "deepseek-ai/DeepSeek-V4-Flash", "deepseek-ai/DeepSeek-V4-Pro-0813",
           "deepseek-ai/DeepSeek-V4-Pro-DSpark", "deepseek-ai/DeepSeek-V4-Pro")
BLOCK_TOKENS = 128
CSA, HCA = 4, 128
KEY_GROUP = 64  # features per scale of a stored key; the turned features stay unscaled

IGNORED_KEYS = blocks.BOOKKEEPING


class V4:
    """The model text. ``c`` is the config, ``s`` the declared states, ``p`` the root of parameter names."""

    def __init__(self, c: Config, opt: EngineOptions, headers: Mapping[str, StoredTensor] | None) -> None:
        self.c, self.opt = c, opt
        self._read_sizes()
        quant = c.child("quantization_config") if c.get("quantization_config", None) is not None else None
        storage, group = blocks.storage_of(quant, table=bf16)
        if quant is not None:
            storage = blocks.expert_storage(storage, c.one_of("expert_dtype", "fp4", "fp8"))
        else:
            c.ignore({"expert_dtype": "the checkpoint is not quantised"})
        self.params = Params(storage, headers)
        self.p = self.params.root()
        self.linear = blocks.Linear(mxfp8(1, group) if opt.act_format == "spec" else None)
        self.attn = LatentAttention.read(c, self.linear, opt.wo_a_input, head_norm=True)
        quantised = opt.cache_format == "spec"
        self.indexer = Indexer.read(c, self.linear, mxfp4(1, 32) if quantised else f32, hadamard=quantised)
        self.hc = blocks.HyperConnections(c.integer("hc_mult"), self.hidden, c.integer("hc_sinkhorn_iters"),
                                          c.number("hc_eps"), self.eps)
        self.ffn = blocks.Experts(self.linear, self.hidden, c.integer("moe_intermediate_size"),
                                  c.number("swiglu_limit"))
        self.route_scale = c.number("routed_scaling_factor")
        self.plain_rope = Rope(rope_frequencies(self.rope_dim, c.number("rope_theta")))
        self.compressed_rope = Rope(
            rope_frequencies(self.rope_dim, c.number("compress_rope_theta"), blocks.yarn_of(c)))
        self.s = self.declare()

    def _read_sizes(self) -> None:
        c = self.c
        c.ignore(IGNORED_KEYS)
        self.vocab, self.hidden = c.integer("vocab_size"), c.integer("hidden_size")
        self.layers, self.hash_layers = c.integer("num_hidden_layers"), c.integer("num_hash_layers", 0)
        self.head_dim, self.rope_dim = c.integer("head_dim"), c.integer("qk_rope_head_dim", 2)
        self.eps, self.window = c.number("rms_norm_eps"), c.integer("sliding_window")
        self.max_positions = c.integer("max_position_embeddings")
        self.experts, self.experts_per_tok = c.integer("n_routed_experts"), c.integer("num_experts_per_tok")
        for key, value in (("n_shared_experts", 1), ("num_key_value_heads", 1), ("hidden_act", "silu"),
                           ("scoring_func", "sqrtsoftplus"), ("topk_method", "noaux_tc"), ("norm_topk_prob", True),
                           ("attention_bias", False), ("tie_word_embeddings", False)):
            c.one_of(key, value)
        self.dspark: DSparkHeads | None = None
        if any(key.startswith("dspark_") for key in c.raw):
            self.dspark = DSparkHeads.read(c, self.hidden, self.vocab, self.layers,
                                           experts=(self.experts, self.experts_per_tok),
                                           names=("markov_w1", "markov_w2"))
            self.drafts = len(self.dspark.targets)  # the released configs keep num_nextn_predict_layers at 1
            c.one_of("num_nextn_predict_layers", 1, self.drafts)
        else:
            self.drafts = c.one_of("num_nextn_predict_layers", 0, 1)
        self.ratios = c.integers("compress_ratios")
        self._check()

    def _check(self) -> None:
        """What single keys cannot say; raises SpecError with key, value and what would be allowed."""
        c, whole = self.c, self.layers + self.drafts
        if len(self.ratios) != whole:
            raise c.error("compress_ratios must have one entry per layer and draft layer", len(self.ratios), whole)
        if set(self.ratios) - {0, CSA, HCA}:
            raise c.error("compress_ratios has an entry that this spec does not compute",
                          sorted(set(self.ratios) - {0, CSA, HCA}), (0, CSA, HCA))
        if any(self.ratios[self.layers:]):
            raise c.error("compress_ratios of draft layers must be 0", self.ratios[self.layers:], 0)
        if self.hash_layers > self.layers:
            raise c.error("num_hash_layers exceeds num_hidden_layers", self.hash_layers, f"<= {self.layers}")
        if self.experts_per_tok > self.experts:
            raise c.error("num_experts_per_tok exceeds n_routed_experts", self.experts_per_tok, f"<= {self.experts}")
        widest = min(self.head_dim - 1, c.integer("index_head_dim"))
        if self.rope_dim % 2 or self.rope_dim > widest:
            raise c.error("qk_rope_head_dim does not fit the heads", self.rope_dim, f"even, <= {widest}")
        still = self.head_dim - self.rope_dim
        if self.opt.cache_format == "spec" and still % KEY_GROUP:
            raise c.error("head_dim - qk_rope_head_dim does not divide into the scale groups of a stored key", still,
                          f"a multiple of {KEY_GROUP}", "use the option cache_format=f32")

    # ---- state -------------------------------------------------------------------------------------------------
    @property
    def draft_tokens(self) -> int:
        return self.dspark.block if self.dspark else self.drafts

    def declare(self) -> States:
        """Every state of the model; sizes and retention are decided here and nowhere else.

        Features that are stored unscaled are bf16, which is what they are rounded to before; the profile without
        rounding keeps them in f32.
        """
        s, opt, m = States(), self.opt, self.draft_tokens
        slack = opt.ring_slack if opt.ring_slack is not None else ring_slack(m, opt.host_lag)
        plain = f32 if opt.profile == "wide" else bf16
        row = f32[self.head_dim]
        if opt.cache_format == "spec":
            row = mxfp8(1, KEY_GROUP)[self.head_dim - self.rope_dim] + plain[self.rope_dim]

        def tail(name: str, ratio: int, dim: int) -> GroupTail:
            width = 2 * dim if ratio == CSA else dim  # an overlapping group speaks for itself and for the next one
            return s.add(GroupTail(name, f32[2 * width], group=ratio, overlap=ratio == CSA, slack=backtrack(m)))

        self.windows = [s.add(Window(f"win.{L}", row, rows=self.window, slack=slack)) for L in range(self.layers)]
        compressed = {L: r for L, r in enumerate(self.ratios) if r}
        self.kv = {L: s.add(Paged(f"kv.{L}", row, tokens_per_entry=r)) for L, r in compressed.items()}
        self.tails = {L: tail(f"tail.{L}", r, self.head_dim) for L, r in compressed.items()}
        picking, dim = [L for L, r in compressed.items() if r == CSA], self.indexer.dim
        self.keys = {L: s.add(Paged(f"key.{L}", self.indexer.record[dim], tokens_per_entry=CSA)) for L in picking}
        self.key_tails = {L: tail(f"key_tail.{L}", CSA, dim) for L in picking}
        first = 0 if self.dspark else 1  # row 0 of the MTP block would need the streams of position -1
        self.contexts = [s.add(Window(f"draft.{i}", row, rows=self.window, slack=slack, first_position=first))
                         for i in range(self.drafts)]
        if self.drafts and not self.dspark:
            self.streams = s.add(Window("streams", plain[self.hc.mult * self.hidden], rows=1, slack=slack))
        return s

    # ---- attention ---------------------------------------------------------------------------------------------
    def entries(self, x: Node, p: Path, tail: GroupTail, dim: int, rope: Rope) -> Node:
        """[T / group, dim]: one entry per completed group, turned at the group's first position; f32 up to the norm."""
        width = 2 * dim if tail.overlap else dim
        values = contract(x, p.wkv.plain_matrix(width, self.hidden))
        place = gather(p.ape.f32(tail.group, width), imod(positions(), tail.group))
        gates = contract(x, p.wgate.plain_matrix(width, self.hidden)) + place
        pooled = rounded(tail.pool(values, gates))
        return rope(rms_norm(pooled, p.norm.vector(dim), self.eps), group_positions(tail.group))

    def pick(self, x: Node, qr: Node, L: int, p: Path, rope: Rope) -> Node:
        """[index_topk]: the compressed entries that a row of a CSA layer attends to."""
        key = self.entries(x, p.compressor, self.key_tails[L], self.indexer.dim, rope)
        keys = self.keys[L].append(self.indexer.spread(key))
        return top_k(self.indexer.scores(x, qr, p, rope, keys, CSA), self.indexer.topk, f"index_sel.{L}")

    def attention(self, L: int, x: Node, p: Path) -> Node:
        ratio = self.ratios[L]
        rope = self.compressed_rope if ratio else self.plain_rope
        qr, q = self.attn.queries(x, p, rope)
        window = self.windows[L].extend(self.attn.window_key(x, p, rope))
        sources = [Source("window", self.window, window)]
        if ratio:
            kv = self.kv[L].append(self.entries(x, p.compressor, self.tails[L], self.head_dim, rope))
            if ratio == CSA:
                sources.append(Source("selected", ratio, kv, picked=self.pick(x, qr, L, p.indexer, rope)))
            else:
                sources.append(Source("dense", ratio, kv))
        return self.attn.over(q, sources, p, rope)

    # ---- one block, the whole step -------------------------------------------------------------------------------
    def norm(self, x: Node, p: Path) -> Node:
        return rms_norm(x, p.vector(self.hidden), self.eps)

    def moe(self, x: Node, p: Path, hashed: bool, pin: str) -> Node:
        """Hashed layers look their experts up by token id; the router's scores weigh them all the same."""
        count, k = self.experts, self.experts_per_tok
        scores = blocks.affinity(x, p.gate.plain_matrix(count, self.hidden))
        if hashed:
            picked = gather(p.gate.tid2eid.integers(self.vocab, k, below=count), token_ids())
        else:
            picked = blocks.pick_experts(scores, p.gate.bias.f32(count), k, pin)
        weights = blocks.routing_weights(scores, picked, self.route_scale, 0.0, normalise=True)
        return self.ffn.mixture(x, p, count, picked, weights)

    def block(self, h: Node, p: Path, attend: Callable[[Node, Path], Node], hashed: bool, pin: str) -> Node:
        """Streams after attention and experts; each reads with a mix made from the streams that enter it."""
        pre, post, comb = self.hc.coefficients(h, p, "attn")
        with scope("attn"):
            y = attend(self.norm(self.hc.collapse(h, pre), p.attn_norm), p.attn)
        h = self.hc.spread(y, h, post, comb)
        pre, post, comb = self.hc.coefficients(h, p, "ffn")
        with scope("ffn"):
            y = self.moe(self.norm(self.hc.collapse(h, pre), p.ffn_norm), p.ffn, hashed, pin)
        return self.hc.spread(y, h, post, comb)

    def logits(self, x: Node, p: Path) -> Node:
        return contract(self.norm(x, p.norm), self.p.head.vector(self.vocab, self.hidden))

    def step(self) -> None:
        """The backbone over this step's rows."""
        h, taps = self.hc.start(blocks.embedded(self.p, self.vocab, self.hidden)), list[Node]()
        for L in range(self.layers):
            with scope(f"layers.{L}"):
                attend = partial(self.attention, L)
                h = self.block(h, self.p.layers[L], attend, L < self.hash_layers, f"experts.{L}")
                if self.dspark and L in self.dspark.targets:
                    taps.append(tap(h))
        if self.drafts:
            with scope("draft_context"):
                self.extend_context(h, taps)
        with scope("head"):
            output("logits", self.logits(self.hc.head(h, self.p), self.p))

    # ---- drafts ------------------------------------------------------------------------------------------------
    def extend_context(self, h: Node, taps: list[Node]) -> None:
        """Keys of this step's rows for the draft layers."""
        if self.dspark:
            x, at = context_rows(taps, self.p.mtp[0], self.linear, self.eps), None
        else:
            p, at = self.p.mtp[0], isub(positions(), 1)
            u = self.joined(self.streams.extend(flatten(h)))
            x = self.norm(self.hc.collapse(u, self.hc.mix(u, p, "attn")), p.attn_norm)
        for i, window in enumerate(self.contexts):
            window.extend(self.attn.window_key(x, self.p.mtp[i].attn, self.plain_rope, at))

    def joined(self, streams: Node) -> Node:
        """Input streams of the MTP block: this row's token, and what the last layer left at the position before."""
        p, d = self.p.mtp[0], self.hidden
        before = reshape(self.streams.previous(streams, positions()), self.hc.mult, d)
        token = self.norm(blocks.embedded(self.p, self.vocab, d), p.enorm)
        e, h = p.e_proj.matrix(d, d), p.h_proj.matrix(d, d)
        return rounded(reshape(self.linear(token, e), 1, d) + self.linear(self.norm(before, p.hnorm), h))

    def draft_block(self, h: Node, i: int, context: int, at: Node | None = None) -> Node:
        def attend(x: Node, p: Path) -> Node:
            return self.attn.over_block(x, p, self.contexts[i], context, self.plain_rope, at)

        with scope(f"mtp.{i}"):
            return self.block(h, self.p.mtp[i], attend, False, f"draft_experts.{i}")

    def draft_dspark(self) -> None:
        """One block of draft tokens: rows [anchor, noise, ...] at positions n .. n + block - 1."""
        assert self.dspark is not None
        h = self.hc.start(blocks.embedded(self.p, self.vocab, self.hidden))
        for i in range(self.drafts):
            h = self.draft_block(h, i, self.window)
        last = self.p.mtp[self.drafts - 1]
        with scope("draft_heads"):
            x = self.hc.head(h, last)
            draft_outputs(self.dspark, x, self.logits(x, last), last)

    def draft_mtp(self) -> None:
        """One draft token: the row [anchor] at position n. Publishes ``tokens`` [1], ``draft_logits`` and
        ``base_logits`` [1, vocab] per sequence; this head states no confidence."""
        at = isub(positions(), 1)
        h = self.draft_block(self.joined(self.streams.handle()), 0, self.window - 1, at)
        with scope("draft_heads"):
            z = by_sequence(self.logits(self.hc.head(h, self.p.mtp[0]), self.p.mtp[0]), 1)
            output("tokens", draw(z))
            output("draft_logits", z)
            output("base_logits", z)


def first_layers(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """The config for the model's first ``layers`` layers (depth.py)."""
    return depth.first_layers(config, layers)


def build(cfg: Config, options: EngineOptions, headers: Mapping[str, StoredTensor] | None = None) -> Model:
    """The V4 family from its ``config.json``.

    ``headers``: what the checkpoint's safetensors headers hold; they decide the storage of each weight. Raises
    SpecError naming key, value found and values supported.
    """
    m = V4(cfg, options, headers)
    entries = {"step": m.step} | ({"draft": m.draft_dspark if m.dspark else m.draft_mtp} if m.drafts else {})
    ignored = () if m.drafts else (Ignored("mtp.*", "the config describes no draft head"),)
    return Model(
        name="deepseek_v4", config=cfg, options=options, states=m.s, params=m.params, entries=entries,
        vocab_size=m.vocab, max_positions=m.max_positions, window=m.window, block_tokens=BLOCK_TOKENS,
        draft_tokens=m.draft_tokens, draft_filler=m.dspark.noise_token if m.dspark else 0, replay="exact_only",
        ignored=ignored, hub_ids=HUB_IDS, spec=__name__)
