"""Blocks that more than one DeepSeek spec is written with: hyper-connections, experts, quantised linears."""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer.dsl import (
    Config,
    DType,
    Node,
    Path,
    Storage,
    Yarn,
    bf16,
    contract,
    encode,
    expand,
    flatten,
    gather,
    grouped_contract,
    maximum,
    minimum,
    mxfp4,
    mxfp8,
    reduce,
    reshape,
    rounded,
    rsqrt,
    scan,
    sigmoid,
    silu,
    slice_,
    softmax,
    softplus,
    sqrt,
    take,
    token_ids,
    top_k,
    total,
)
from deepinfer.errors import SpecError

# Keys of any config that change nothing of what is computed.
BOOKKEEPING = {
    "architectures": "chose this spec", "model_type": "chose this spec",
    "dtype": "storage follows the checkpoint's headers", "torch_dtype": "old spelling of dtype",
    "transformers_version": "bookkeeping", "bos_token_id": "used by the recipe", "eos_token_id": "used by the recipe",
    "pad_token_id": "used by the recipe", "initializer_range": "training only", "attention_dropout": "training only",
    "use_cache": "an engine always caches",
}


@dataclass(frozen=True)
class Linear:
    """``w . x`` with the activation cast that a quantised weight implies; ``act`` is that cast (None: none)."""

    act: DType | None

    def cast(self, x: Node, w: Node) -> Node:
        """x as the matrix w takes it: an FP8 or FP4 weight takes MXFP8 activations."""
        return encode(x, self.act) if self.act is not None and w.type.dtype.is_block else x

    def __call__(self, x: Node, w: Node, rounds: DType | None = bf16) -> Node:
        return rounded(contract(self.cast(x, w), w), rounds)


def storage_of(quant: Config | None, table: DType) -> tuple[Storage, int]:
    """Storage formats named by ``quantization_config`` (None: unquantised), and the activation group width."""
    if quant is None:
        return Storage(table=table), 32
    method = quant.get("quant_method")
    if method != "fp8":
        raise SpecError("this checkpoint's quantisation is not supported", where="config.json: quantization_config",
                        found=f"quant_method={method!r}", allowed="the official fp8 checkpoint, bf16, f32",
                        next_step="use the official FP8/FP4 checkpoint or convert it to bf16")
    quant.one_of("activation_scheme", "dynamic")
    quant.one_of("scale_fmt", "ue8m0")
    quant.one_of("fmt", "e4m3", default="e4m3")
    block = quant.integers("weight_block_size")
    if len(block) != 2 or min(block) < 1:
        raise SpecError("weight_block_size has a bad value", found=block, allowed="two positive integers")
    return Storage(mxfp8(*block), mxfp4(1, 32), table, bf16), block[1]


def expert_storage(storage: Storage, expert_dtype: str) -> Storage:
    """``expert_dtype`` fp4 or fp8 chooses how the routed experts are stored."""
    if expert_dtype == "fp4" or not storage.matrix.is_block:
        return storage
    return Storage(storage.matrix, storage.matrix, storage.table, storage.plain)


def yarn_of(cfg: Config) -> Yarn | None:
    """``rope_scaling`` of the compressed layers; both spellings of the kind key are in circulation."""
    if cfg.get("rope_scaling", None) is None:
        return None
    s = cfg.child("rope_scaling")
    s.one_of("rope_type" if "rope_type" in s else "type", "yarn")
    original = s.integer("original_max_position_embeddings", low=0)
    yarn = Yarn(s.number("factor"), s.number("beta_fast"), s.number("beta_slow"), original)
    return yarn if original > 0 else None


@dataclass(frozen=True)
class HyperConnections:
    """Manifold-constrained hyper-connections: ``mult`` residual streams [mult, d] mixed by learned, input-dependent
    coefficients; the mixing matrix is made doubly stochastic by Sinkhorn steps."""

    mult: int
    hidden: int
    iters: int
    eps: float
    norm_eps: float

    def statistics(self, h: Node, fn: Node) -> Node:
        """``fn . flatten(h)`` divided by the root mean square of all mult * d entries, f32."""
        flat = flatten(h)
        return contract(flat, fn) * rsqrt(reduce(flat * flat, "mean", (-1,)) + self.norm_eps)

    def coefficients(self, h: Node, p: Path, name: str) -> tuple[Node, Node, Node]:
        """(pre [n], post [n], comb [n, n]) of one sub-layer from the streams that enter it; comb's first index is
        the old stream."""
        n = self.mult
        pre = self.mix(h, p, name)
        post = 2.0 * sigmoid(self._part(h, p, name, 1, n, 2 * n))
        comb = softmax(reshape(self._part(h, p, name, 2, 2 * n, (2 + n) * n), n, n)) + self.eps
        comb = comb / (total(comb, 0) + self.eps)

        def step(c: Node) -> Node:
            c = c / (total(c, 1) + self.eps)
            return c / (total(c, 0) + self.eps)

        return pre, post, scan(comb, self.iters - 1, step)

    def mix(self, h: Node, p: Path, name: str) -> Node:
        """[n]: how a sub-layer's input is made of the streams that enter it (pre)."""
        return sigmoid(self._part(h, p, name, 0, 0, self.mult)) + self.eps

    def _part(self, h: Node, p: Path, name: str, i: int, start: int, stop: int) -> Node:
        """Affine image of the statistics' features start .. stop - 1; i: which of the three scales is theirs."""
        n = self.mult
        fn = getattr(p, f"hc_{name}_fn").f32((2 + n) * n, n * self.hidden)
        scale, base = getattr(p, f"hc_{name}_scale").f32(3), getattr(p, f"hc_{name}_base").f32((2 + n) * n)
        m = self.statistics(h, fn)
        return slice_(m, start, stop) * slice_(scale, i, i + 1) + slice_(base, start, stop)

    def start(self, x: Node) -> Node:
        """All streams [mult, d] equal to x [d]."""
        return expand(reshape(x, 1, self.hidden), self.mult, self.hidden)

    def head(self, h: Node, p: Path) -> Node:
        """Streams -> [d] with a learned, input-dependent mix (``hc_head_fn``, ``_scale``, ``_base``)."""
        n = self.mult
        z = self.statistics(h, p.hc_head_fn.f32(n, n * self.hidden))
        return self.collapse(h, sigmoid(z * p.hc_head_scale.f32(1) + p.hc_head_base.f32(n)) + self.eps)

    def collapse(self, h: Node, mix: Node) -> Node:
        """``sum_k mix_k h_k`` -> [d], held in bf16."""
        return rounded(flatten(total(reshape(mix, self.mult, 1) * h, 0)))

    def spread(self, y: Node, h: Node, post: Node, comb: Node) -> Node:
        """New stream k = ``post_k y + sum_j comb_jk h_j``, held in bf16."""
        n, d = self.mult, self.hidden
        mixed = total(reshape(comb, n, n, 1) * reshape(h, n, 1, d), 0)
        return rounded(reshape(post, n, 1) * reshape(y, 1, d) + reshape(mixed, n, d))


@dataclass(frozen=True)
class Experts:
    """Shared expert and routed experts with SwiGLU and clamps; ``limit`` <= 0: no clamp."""

    linear: Linear
    hidden: int
    inner: int
    limit: float

    def activate(self, gate: Node, up: Node, weight: Node | None) -> Node:
        """``weight * silu(min(gate, L)) * clamp(up, -L, L)``, held in bf16: the routing weight multiplies before w2."""
        if self.limit > 0:
            gate, up = minimum(gate, self.limit), maximum(minimum(up, self.limit), -self.limit)
        t = silu(gate) * up
        return rounded(t if weight is None else weight * t)

    def shared(self, x: Node, p: Path) -> Node:
        w1, w3 = p.w1.matrix(self.inner, self.hidden), p.w3.matrix(self.inner, self.hidden)
        t = self.activate(self.linear(x, w1), self.linear(x, w3), None)
        return self.linear(t, p.w2.matrix(self.hidden, self.inner))

    def routed(self, x: Node, p: Path, count: int, picked: Node, weights: Node) -> Node:
        """[k, d]: what each picked expert adds, weighted."""
        e, k = p.each, picked.type.size
        w1, w3 = e.w1.stacked(count, self.inner, self.hidden), e.w3.stacked(count, self.inner, self.hidden)
        gate = rounded(grouped_contract(self.linear.cast(x, w1), picked, w1))
        up = rounded(grouped_contract(self.linear.cast(x, w3), picked, w3))
        t = self.activate(gate, up, reshape(weights, k, 1))
        w2 = e.w2.stacked(count, self.hidden, self.inner)
        return rounded(grouped_contract(self.linear.cast(t, w2), picked, w2))

    def mixture(self, x: Node, p: Path, count: int, picked: Node, weights: Node) -> Node:
        """Sum over the picked experts (f32, in the order of ``picked``) plus the shared expert, held in bf16."""
        routed = flatten(total(self.routed(x, p.experts, count, picked, weights), 0))
        return rounded(routed + self.shared(x, p.shared_experts))


def affinity(x: Node, gate: Node) -> Node:
    """Router score of each expert: ``sqrt(softplus(gate . x))``, f32."""
    return sqrt(softplus(contract(x, gate)))


def pick_experts(scores: Node, bias: Node, k: int, pin: str) -> Node:
    """The k experts with the largest biased score; the bias only chooses."""
    return top_k(scores + bias, k, pin)


def routing_weights(scores: Node, picked: Node, scale: float, eps: float, normalise: bool) -> Node:
    """[k] weights of the picked experts; normalised: divided by their sum plus ``eps`` (0: by their sum)."""
    w = take(scores, picked)
    if normalise:
        w = w / (total(w, 0) + eps if eps else total(w, 0))
    return w * scale


def embedded(p: Path, vocab: int, hidden: int) -> Node:
    """Embedding [hidden] of each row's token."""
    return rounded(gather(p.embed.vector(vocab, hidden), token_ids()))


