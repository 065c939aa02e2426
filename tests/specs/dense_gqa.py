"""A dense decoder with grouped-query attention, in the tensor names and config keys of Llama checkpoints.

Nothing of it is known outside this file: it shows what describing another model takes.
"""

from __future__ import annotations

from collections.abc import Mapping

from deepinfer.dsl import (
    Config,
    EngineOptions,
    Model,
    Node,
    Paged,
    Params,
    Path,
    Source,
    States,
    StoredTensor,
    attend,
    bf16,
    concat,
    const,
    contract,
    cos,
    f32,
    flatten,
    gather,
    output,
    positions,
    reshape,
    rms_norm,
    rope_frequencies,
    rounded,
    scope,
    silu,
    sin,
    slice_,
    to_float,
    token_ids,
)

ARCHITECTURE = "LlamaForCausalLM"
MODEL_TYPES = ("llama",)
HUB_IDS = ()
IGNORED_KEYS = {
    "architectures": "chose this spec", "model_type": "chose this spec", "torch_dtype": "the headers say it",
    "bos_token_id": "used by the recipe", "eos_token_id": "used by the recipe", "transformers_version": "bookkeeping",
    "initializer_range": "training only", "use_cache": "an engine always caches", "pretraining_tp": "training only",
}

FIXED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "rope_scaling": None}


class DenseGqa:
    """The model text; ``kv`` holds the keys and values of each layer, one record per position."""

    def __init__(self, c: Config, opt: EngineOptions, headers: Mapping[str, StoredTensor] | None) -> None:
        c.ignore(IGNORED_KEYS)
        for key, only in FIXED.items():
            c.one_of(key, only, default=only)
        self.vocab, self.hidden = c.integer("vocab_size"), c.integer("hidden_size")
        self.inner, self.layers = c.integer("intermediate_size"), c.integer("num_hidden_layers")
        self.heads, self.kv_heads = c.integer("num_attention_heads"), c.integer("num_key_value_heads")
        self.head_dim = c.integer("head_dim", default=self.hidden // self.heads)
        if self.heads % self.kv_heads:
            raise c.error("num_attention_heads is no multiple of num_key_value_heads", self.heads, self.kv_heads)
        self.eps, self.tied = c.number("rms_norm_eps"), c.one_of("tie_word_embeddings", True, False)
        self.max_positions = c.integer("max_position_embeddings")
        self.frequencies = rope_frequencies(self.head_dim, c.number("rope_theta"))
        self.p = Params(headers=headers).root()
        record = (bf16 if opt.profile == "bf16" and opt.cache_format == "spec" else f32)[self.kv_heads * self.head_dim]
        self.s = States()
        self.kv = [(self.s.add(Paged(f"key.{i}", record)), self.s.add(Paged(f"value.{i}", record)))
                   for i in range(self.layers)]

    def turned(self, x: Node) -> Node:
        """x [heads, head_dim] turned by its position: feature i pairs with feature i + head_dim / 2."""
        angle = to_float(reshape(positions(), 1)) * const(self.frequencies)
        half, c, s = self.head_dim // 2, cos(angle), sin(angle)
        a, b = slice_(x, 0, half), slice_(x, half, self.head_dim)
        return rounded(concat(a * c - b * s, b * c + a * s))

    def project(self, x: Node, p: Path, heads: int) -> Node:
        return reshape(rounded(contract(x, p.matrix(heads * self.head_dim, self.hidden))), heads, self.head_dim)

    def attention(self, x: Node, i: int, p: Path) -> Node:
        q = self.turned(self.project(x, p.q_proj, self.heads))
        key = self.kv[i][0].append(flatten(self.turned(self.project(x, p.k_proj, self.kv_heads))))
        value = self.kv[i][1].append(flatten(self.project(x, p.v_proj, self.kv_heads)))
        o = attend(q, [Source("dense", 1, key, values=value)], self.head_dim**-0.5, kv_heads=self.kv_heads)
        return rounded(contract(flatten(rounded(o)), p.o_proj.matrix(self.hidden, self.heads * self.head_dim)))

    def mlp(self, x: Node, p: Path) -> Node:
        gate = rounded(contract(x, p.gate_proj.matrix(self.inner, self.hidden)))
        up = rounded(contract(x, p.up_proj.matrix(self.inner, self.hidden)))
        return rounded(contract(rounded(silu(gate) * up), p.down_proj.matrix(self.hidden, self.inner)))

    def norm(self, x: Node, p: Path) -> Node:
        return rms_norm(x, p.vector(self.hidden), self.eps)

    def step(self) -> None:
        embed = self.p.model.embed_tokens.vector(self.vocab, self.hidden)
        h = rounded(gather(embed, token_ids()))
        for i in range(self.layers):
            p = self.p.model.layers[i]
            with scope(f"layers.{i}"):
                h = rounded(h + self.attention(self.norm(h, p.input_layernorm), i, p.self_attn))
                h = rounded(h + self.mlp(self.norm(h, p.post_attention_layernorm), p.mlp))
        head = embed if self.tied else self.p.lm_head.vector(self.vocab, self.hidden)
        output("logits", contract(self.norm(h, self.p.model.norm), head))


def build(cfg: Config, options: EngineOptions, headers: Mapping[str, StoredTensor] | None = None) -> Model:
    m = DenseGqa(cfg, options, headers)
    return Model(name="dense_gqa", config=cfg, options=options, states=m.s, params=m.p.params, entries={"step": m.step},
                 vocab_size=m.vocab, max_positions=m.max_positions, window=0, spec=__name__)
