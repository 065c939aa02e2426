"""DeepSeek-V4.1-Flash (``DeepseekV41ForCausalLM``): text backbone and DSpark draft head.

An encoder half of window-only and ratio-2 layers and a decoder half of ratio-1 layers share a few compressed
key/value caches; four residual streams are mixed by shifted hyper-connections; n-gram tables (Engram) feed two
early layers; three draft layers propose a block of tokens from taps of the last layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
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
    absolute,
    backtrack,
    block_max,
    concat,
    const,
    contract,
    copysign,
    f32,
    flatten,
    fp4_e4m3,
    gather,
    group_positions,
    iadd,
    imod,
    imul,
    ixor,
    lookback,
    lt,
    maximum,
    mxfp4,
    mxfp8,
    output,
    reduce,
    reshape,
    ring_slack,
    rms_norm,
    rope_frequencies,
    rounded,
    rsqrt,
    scope,
    sigmoid,
    slice_,
    sqrt,
    top_k,
    total,
    where,
    within_blocks,
)
from deepinfer.dsl.types import i64
from deepinfer.model_specs import blocks, depth
from deepinfer.model_specs.attention import Indexer, LatentAttention
from deepinfer.model_specs.dspark import DSparkHeads, context_rows, draft_outputs, tap
from deepinfer.model_specs.engram import EngramTables, token_classes
from deepinfer.model_specs.v41_checks import check_layers, vision_tensors

ARCHITECTURE = "DeepseekV41ForCausalLM"
MODEL_TYPES = ("deepseek_v41",)
HUB_IDS = ("deepseek-ai/DeepSeek-V4.1-Flash-1017", "deepseek-ai/DeepSeek-V4.1-Flash")
BLOCK_TOKENS = 128

IGNORED_KEYS = blocks.BOOKKEEPING | {
    "image_token_id": "the vision part is not built yet", "vision_config": "the vision part is not built yet",
}


@dataclass
class Shared:
    """What a layer leaves to later layers: keys, values, and the entries picked."""

    kv: Node | None = None
    key: Node | None = None
    picked: Node | None = None
    blocks: Node | None = None
    taps: list[Node] = field(default_factory=list)


class V41:
    """The model text. ``c`` is the text config, ``s`` the declared states, ``p`` the root of parameter names."""

    def __init__(self, cfg: Config, opt: EngineOptions, headers: Mapping[str, StoredTensor] | None) -> None:
        self.top, self.opt = cfg, opt
        self.c = c = cfg.child("text_config")
        self._read_sizes(c)
        quant = cfg.child("quantization_config") if cfg.get("quantization_config", None) is not None else None
        storage, group = blocks.storage_of(quant, table=mxfp8(1, 32))
        if quant is not None:
            storage = blocks.expert_storage(storage, quant.one_of("expert_dtype", "fp4", "fp8", default="fp4"))
        self.params = Params(storage, headers)
        self.p = self.params.root()
        self.linear = blocks.Linear(mxfp8(1, group) if opt.act_format == "spec" else None)
        self.attn = LatentAttention.read(c, self.linear, opt.wo_a_input, head_norm=False)
        key_format = mxfp4(1, 32) if opt.cache_format == "spec" else f32
        self.indexer = Indexer.read(c, self.linear, key_format, hadamard=False)
        self.hc = blocks.HyperConnections(c.integer("hc_mult"), self.hidden, c.integer("hc_sinkhorn_iters"),
                                          c.number("hc_eps"), self.eps)
        self.ffn = blocks.Experts(self.linear, self.hidden, c.integer("moe_intermediate_size"),
                                  c.number("swiglu_limit"))
        self.route_scale = c.number("routed_scaling_factor")
        plain = Rope(rope_frequencies(self.rope_dim, c.number("rope_theta")))
        compressed = Rope(rope_frequencies(self.rope_dim, c.number("compress_rope_theta"), blocks.yarn_of(c)))
        self.ropes = {L: compressed if r else plain for L, r in enumerate(self.ratios)}
        self.draft_rope = plain
        self.heads_of_draft = DSparkHeads.read(c, self.hidden, self.vocab, self.layers) if self.drafts else None
        self.engram = EngramTables.read(c, self.layers) if c.get("engram_layer_ids", ()) else None
        self.s = self.declare()

    def _read_sizes(self, c: Config) -> None:
        c.ignore(IGNORED_KEYS)
        self.vocab, self.hidden = c.integer("vocab_size"), c.integer("hidden_size")
        self.layers, self.drafts = c.integer("num_hidden_layers"), c.integer("num_nextn_predict_layers", 0, 0)
        self.head_dim, self.rope_dim = c.integer("head_dim"), c.integer("qk_rope_head_dim")
        self.index_dim, self.index_topk = c.integer("index_head_dim"), c.integer("index_topk")
        self.eps, self.window = c.number("rms_norm_eps"), c.integer("sliding_window")
        self.max_positions = c.integer("max_position_embeddings")
        self.ratios = c.integers("compress_ratios")
        self.kv_sources = c.integers("kv_source_layer_ids")
        self.index_sources = c.integers("index_source_layer_ids")
        candidate = c.get("candidate_source_layer_id", None)
        self.candidate = -1 if candidate is None else c.integer("candidate_source_layer_id", -1)
        if self.candidate >= 0:
            self.candidate_blocks = c.integer("candidate_topk_blocks")
            self.candidate_size = c.integer("candidate_block_size")
        else:
            c.ignore(dict.fromkeys(("candidate_topk_blocks", "candidate_block_size"), "no candidate source layer"))
        self.experts, self.experts_per_tok = c.integer("n_routed_experts"), c.integer("num_experts_per_tok")
        c.one_of("n_shared_experts", 1)
        c.one_of("num_key_value_heads", 1)
        c.one_of("hidden_act", "silu")
        c.one_of("scoring_func", "sqrtsoftplus")
        c.one_of("topk_method", "noaux_tc")
        for key in ("norm_topk_prob",):
            c.one_of(key, True)
        for key in ("attention_bias", "tie_word_embeddings"):
            c.one_of(key, False, default=False)
        for key in ("hc_shifted", "dspark_target_attn_input", "use_fp4_sparse_kv"):
            c.one_of(key, True, default=True)
        if "index_k_source_layer_ids" in c:
            c.one_of("index_k_source_layer_ids", list(self.kv_sources))
        check_layers(self)

    # ---- state -------------------------------------------------------------------------------------------------
    @property
    def draft_tokens(self) -> int:
        return self.heads_of_draft.block if self.heads_of_draft else 0

    def source(self, ids: tuple[int, ...], layer: int) -> int:
        """The largest listed id that is not above the layer."""
        return max(i for i in ids if i <= layer)

    def declare(self) -> States:
        """Every state of the model; sizes, retention and licences are decided here and nowhere else."""
        s, opt, m = States(), self.opt, self.draft_tokens
        spec = opt.cache_format == "spec"
        slack = opt.ring_slack if opt.ring_slack is not None else ring_slack(m, opt.host_lag)
        row = (mxfp8(1, 32) if spec else f32)[self.head_dim]
        for name in [f"win.{L}" for L in range(self.layers)] + [f"draft.{i}" for i in range(self.drafts)]:
            s.add(Window(name, row, rows=self.window, slack=slack, absent_before=self.window))
        for L in self.kv_sources:
            r = self.ratios[L]
            s.add(Paged(f"kv.{L}", (fp4_e4m3(16) if spec else f32)[self.head_dim], tokens_per_entry=r))
            s.add(Paged(f"key.{L}", self.indexer.record[self.index_dim], tokens_per_entry=r))
            if r > 1:
                s.add(GroupTail(f"tail.{L}", f32[2 * self.head_dim], group=r, slack=backtrack(m)))
        return s

    def window_state(self, name: str) -> Window:
        state = self.s[name]
        assert isinstance(state, Window)
        return state

    # ---- attention ---------------------------------------------------------------------------------------------
    def latent(self, x: Node, L: int, p: Path) -> Node:
        """[T / ratio, head_dim]: one compressed latent per group of ``ratio`` positions, before RoPE."""
        ratio, w = self.ratios[L], p.wkv.plain_matrix(self.head_dim, self.hidden)
        if ratio == 1:
            z = self.linear(x, w)
        else:
            tail = self.s[f"tail.{L}"]
            assert isinstance(tail, GroupTail)
            gate = contract(x, p.wgate.plain_matrix(self.head_dim, self.hidden))
            z = rounded(tail.pool(contract(x, w), gate))
        return rms_norm(z, p.norm.vector(self.head_dim), self.eps)

    def write_entries(self, x: Node, L: int, p: Path, sh: Shared) -> None:
        """Full layers own keys and values: every later layer up to the next source reads these."""
        rope, at = self.ropes[L], group_positions(self.ratios[L])
        z = self.latent(x, L, p.compressor)
        k = contract(z, p.indexer.wk.plain_matrix(self.index_dim, self.head_dim))
        k = rms_norm(rounded(k), p.indexer.k_norm.vector(self.index_dim), self.eps)
        key, kv = self.s[f"key.{L}"], self.s[f"kv.{L}"]
        assert isinstance(key, Paged) and isinstance(kv, Paged)
        sh.key, sh.kv = key.append(rope(k, at)), kv.append(rope(z, at))

    def select(self, x: Node, qr: Node, L: int, p: Path, sh: Shared) -> None:
        """Full and Reindex layers choose the entries that they and the Reuse layers after them attend to."""
        assert sh.key is not None
        scores = self.indexer.scores(x, qr, p, self.ropes[L], sh.key, self.ratios[L])
        if self.candidate == L:
            sh.blocks = top_k(block_max(scores, self.candidate_size), self.candidate_blocks, f"candidates.{L}")
        elif 0 <= self.candidate < L:
            assert sh.blocks is not None
            scores = within_blocks(scores, sh.blocks, self.candidate_size)
        sh.picked = top_k(scores, self.indexer.topk, f"index_sel.{L}")

    def attention(self, x: Node, L: int, p: Path, sh: Shared) -> Node:
        rope, ratio = self.ropes[L], self.ratios[L]
        qr, q = self.attn.queries(x, p, rope)
        window = self.window_state(f"win.{L}").extend(self.attn.window_key(x, p, rope))
        sources = [Source("window", self.window, window)]
        if L in self.kv_sources:
            self.write_entries(x, L, p, sh)
        if L in self.index_sources:
            self.select(x, qr, L, p.indexer, sh)
        if ratio:
            assert sh.kv is not None
            sources.append(Source("selected", ratio, sh.kv, picked=sh.picked))
        return self.attn.over(q, sources, p, rope)

    def draft_attention(self, x: Node, i: int, p: Path) -> Node:
        return self.attn.over_block(x, p, self.window_state(f"draft.{i}"), self.window, self.draft_rope)

    # ---- mixture of experts ------------------------------------------------------------------------------------
    def expert_counts(self, L: int) -> tuple[int, int]:
        """(routed experts, experts per token) of a layer; layers past the backbone are draft layers."""
        d = self.heads_of_draft
        return (d.experts, d.experts_per_tok) if d and L >= self.layers else (self.experts, self.experts_per_tok)

    def moe(self, x: Node, p: Path, L: int, pin: str) -> Node:
        count, k = self.expert_counts(L)
        scores = blocks.affinity(x, p.gate.plain_matrix(count, self.hidden))
        picked = blocks.pick_experts(scores, p.gate.bias.f32(count), k, pin)
        weights = blocks.routing_weights(scores, picked, self.route_scale, 1e-20, normalise=k > 1)
        return self.ffn.mixture(x, p, count, picked, weights)

    # ---- one block, the whole step -------------------------------------------------------------------------------
    def norm(self, x: Node, p: Path) -> Node:
        return rms_norm(x, p.vector(self.hidden), self.eps)

    def block(self, h: Node, mix: Node, p: Path, L: int, sh: Shared) -> tuple[Node, Node]:
        """Streams and the mix for the next sub-layer. Each sub-layer reads with the mix of the one before it."""
        draft = L - self.layers
        pre, post, comb = self.hc.coefficients(h, p, "attn")
        with scope("attn"):
            x = self.norm(self.hc.collapse(h, mix), p.attn_norm)
            y = self.attention(x, L, p.attn, sh) if draft < 0 else self.draft_attention(x, draft, p.attn)
        h = self.hc.spread(y, h, post, comb)
        pre_ffn, post, comb = self.hc.coefficients(h, p, "ffn")
        with scope("ffn"):
            x = self.norm(self.hc.collapse(h, pre), p.ffn_norm)
            y = self.moe(x, p.ffn, L, f"experts.{L}" if draft < 0 else f"draft_experts.{draft}")
        return self.hc.spread(y, h, post, comb), pre_ffn

    def inject_engram(self, h: Node, L: int, p: Path) -> Node:
        """Add the n-gram memory of this position to each stream, gated by the stream's agreement with its key."""
        assert self.engram is not None
        e, n, d = self.engram, self.hc.mult, self.hidden
        ids = lookback(e.ngram - 1)
        classes = gather(self.p.token_classes.derived("token_classes", self.vocab), where(lt(ids, 0), e.pad_id, ids))
        rows, mixed = [], imul(slice_(classes, 0, 1), e.multipliers(L)[0])
        for order in range(1, e.ngram):
            mixed = ixor(mixed, imul(slice_(classes, order, order + 1), e.multipliers(L)[order]))
            rows.append(imod(mixed, const(e.moduli(L)[order - 1], i64)))
        index = iadd(concat(*rows), const(e.offsets(L), i64))
        entry = flatten(gather(p.embed.table(e.rows(L), e.head_dim), index))
        kv = self.linear(entry, p.wkv.matrix((n + 1) * d, e.columns * e.head_dim))
        key, value = reshape(slice_(kv, 0, n * d), n, d), slice_(kv, n * d, (n + 1) * d)
        weight = p.q_weight.vector(n, d, suffix="") * p.k_weight.vector(n, d, suffix="")
        inverse = self.inverse_rms(h) * self.inverse_rms(key)
        dot = total(h * weight * key, 1) * inverse * d**-0.5
        gate = sigmoid(copysign(sqrt(maximum(absolute(dot), 1e-6)), dot))
        return rounded(h + gate * reshape(value, 1, d))

    def inverse_rms(self, x: Node) -> Node:
        """1 / sqrt(mean(x^2) + eps) over the last dim (kept with size 1)."""
        return rsqrt(reduce(x * x, "mean", (-1,)) + self.eps)

    def streams(self) -> tuple[Node, Node]:
        """All streams start as the embedding; the first mix reads stream 0."""
        x = blocks.embedded(self.p, self.vocab, self.hidden)
        return self.hc.start(x), const([1.0] + [0.0] * (self.hc.mult - 1))

    def logits(self, x: Node, norm: Path) -> Node:
        return contract(self.norm(x, norm), self.p.head.vector(self.vocab, self.hidden))

    def step(self) -> None:
        """The backbone over this step's rows."""
        h, mix = self.streams()
        sh = Shared()
        for L in range(self.layers):
            p = self.p.layers[L]
            with scope(f"layers.{L}"):
                if self.engram and L in self.engram.layers:
                    with scope("engram"):
                        h = self.inject_engram(h, L, p.engram)
                if self.heads_of_draft and L in self.heads_of_draft.targets:
                    sh.taps.append(tap(h))
                h, mix = self.block(h, mix, p, L, sh)
        if self.heads_of_draft:
            self.extend_draft_context(sh.taps)
        with scope("head"):
            output("logits", self.logits(self.hc.collapse(h, mix), self.p.norm))

    def extend_draft_context(self, taps: list[Node]) -> None:
        """Context keys of the draft layers, made from the taps of this step's rows."""
        with scope("draft_context"):
            x = context_rows(taps, self.p.mtp[0], self.linear, self.eps)
            for i in range(self.drafts):
                key = self.attn.window_key(x, self.p.mtp[i].attn, self.draft_rope)
                self.window_state(f"draft.{i}").extend(key)

    def draft(self) -> None:
        """One block of draft tokens: rows [anchor, noise, ...] at positions n .. n + block - 1."""
        assert self.heads_of_draft is not None
        h, mix = self.streams()
        for i in range(self.drafts):
            with scope(f"mtp.{i}"):
                h, mix = self.block(h, mix, self.p.mtp[i], self.layers + i, Shared())
        x = self.hc.collapse(h, mix)
        last = self.p.mtp[self.drafts - 1]
        with scope("draft_heads"):
            draft_outputs(self.heads_of_draft, x, self.logits(x, last.norm), last)


def first_layers(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """The config for the model's first ``layers`` layers (depth.py)."""
    return {**config, "text_config": depth.first_layers(config["text_config"], layers)}


def build(cfg: Config, options: EngineOptions, headers: Mapping[str, StoredTensor] | None = None) -> Model:
    """The V4.1-Flash family from its ``config.json``.

    ``headers``: what the checkpoint's safetensors headers hold; they decide the storage of each weight. Raises
    SpecError naming key, value found and values supported.
    """
    cfg.ignore(IGNORED_KEYS)
    m = V41(cfg, options, headers)
    entries = {"step": m.step} | ({"draft": m.draft} if m.drafts else {})
    vision = vision_tensors(cfg, m.hidden)
    prefixes = {L: f"layers.{L}" if L < m.layers else f"mtp.{L - m.layers}" for L in range(m.layers + m.drafts)}
    bias_vl = {f"{p}.ffn.gate.bias_vl": StoredTensor("F32", m.expert_counts(L)[:1]) for L, p in prefixes.items()}
    ignored = (
        Ignored("vision.*", "the vision part is not built yet", vision.tower),
        Ignored("aligner.*", "the vision part is not built yet", vision.aligner),
        Ignored("image_*", "the vision part is not built yet", vision.markers),
        Ignored("*.ffn.gate.bias_vl", "router bias of image positions; the vision part is not built yet", bias_vl),
        Ignored("mtp.?.embed.weight", "copy of embed.weight"), Ignored("mtp.?.head.weight", "copy of head.weight"),
    )
    return Model(
        name="deepseek_v41_flash", config=cfg, options=options, states=m.s, params=m.params, entries=entries,
        vocab_size=m.vocab, max_positions=m.max_positions, window=m.window, block_tokens=BLOCK_TOKENS,
        draft_tokens=m.draft_tokens, draft_filler=m.heads_of_draft.noise_token if m.heads_of_draft else 0,
        lookback_tokens=m.engram.ngram - 1 if m.engram else 0, replay="trained",
        ignored=ignored, derive={"token_classes": token_classes}, hub_ids=HUB_IDS, spec=__name__)
