"""Attention and index selections: every source, ties, and no dependence on how a sequence is cut."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from cpu.harness import Array, Param, Seq, State, Step, available_isas, held, rounded, run
from cpu.regions import decode_record, encode_record

from deepinfer.backends.cpu.families.score_select import FEW
from deepinfer.codegen.kernels.spec import KernelSpec, Operand, TileOp, TileProgram
from deepinfer.dsl.types import DType

RNG = np.random.default_rng(23)
WINDOW, BLOCK = 12, 16


def normal(*dims: int) -> Array:
    return RNG.standard_normal(dims).astype(np.float32)


@dataclass
class Scene:
    """A sequence of ``n`` rows with window keys, paged entries of ratio 2, and picks of every row."""

    n: int
    heads: int = 8
    dim: int = 64
    value_dim: int = 64
    kv_heads: int = 1
    split: bool = False
    record: str = "mxfp8(1,32)"
    entry: str = "fp4_e4m3(16)"
    k: int = 5
    ring: int = WINDOW + 3
    sources: tuple[str, ...] = ("window", "selected", "dense")
    rounds: str = "bf16"
    sink: bool = True
    data: dict[str, Array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        n, features = self.n, self.kv_heads * self.dim
        d = self.data
        d["q"] = rounded(normal(n, self.heads * self.dim))
        d["sink"] = normal(self.heads)
        wide = {"keys": features, "values": self.kv_heads * self.value_dim if self.split else features}
        for name, width in wide.items():
            d[f"w_{name}"] = encode_record(torch.from_numpy(normal(n, width)), self.dtype(self.record, width))
            d[f"e_{name}"] = encode_record(torch.from_numpy(normal(n // 2, width)), self.dtype(self.entry, width))
        picks = np.full((n, self.k), -1, np.int32)
        for i in range(n):
            seen = (i + 1) // 2
            some = RNG.permutation(seen)[: min(seen, self.k - 1)]
            picks[i, RNG.permutation(self.k)[: len(some)]] = some
        d["picks"] = picks

    @staticmethod
    def dtype(parts: str, width: int) -> DType:
        return DType.parse(f"{parts}[{width}]")

    def spec(self) -> KernelSpec:
        ops = [Operand("value", "T", (self.heads, self.dim), "bf16"), Operand("param", "-", (self.heads,), "f32")]
        names = ["keys", "values"] if self.split else ["keys"]
        handles: dict[str, int] = {}
        for kind, record in (("w", self.record), ("e", self.entry)):
            for name in names:
                width = self.kv_heads * (self.dim if name == "keys" else self.value_dim)
                handles[kind + name] = len(ops)
                detail = {"kind": "window" if kind == "w" else "paged", "first_position": 0, "ratio": 2}
                ops.append(Operand("state", "T", (width,), f"{record}[{width}]", detail=tuple(sorted(detail.items()))))
        picked = len(ops)
        ops.append(Operand("value", "T", (self.k,), "i32"))
        out = len(ops)
        ops.append(Operand("value", "T", (self.heads, self.value_dim), "f32", write=True))
        described = []
        for s in self.sources:
            kind, width = ("w", WINDOW) if s in ("window", "context") else ("e", 2)
            values = handles[kind + "values"] if self.split else -1
            described.append((s, width, handles[kind + "keys"], values, picked if s == "selected" else -1))
        attrs = {"q": 0, "sink": 1 if self.sink else -1, "sources": tuple(described), "scale": self.dim**-0.5,
                 "rounds": self.rounds, "kv_heads": self.kv_heads, "value_dim": self.value_dim, "heads": self.heads,
                 "head_dim": self.dim}
        dims = (self.heads, self.value_dim)
        program = TileProgram((TileOp("acc", (), dims, "f32", (("i", 0),)),
                               TileOp("store", (0,), dims, "f32", (("operand", out),))))
        return KernelSpec("attend", "T", tuple(ops), tuple(sorted(attrs.items())), (("epilogue", program),), title="t")

    def step(self, c: int, rows: int, start: int = 0) -> Step:
        blocks = [(7 * b + 2) % 11 for b in range(self.n // BLOCK + 1)]
        return Step([Seq(rows, c, slot=1, start_step=start, blocks=blocks)], ratios=(2,), block_tokens=BLOCK)

    def states(self, c: int, rows: int) -> list[State]:
        out = []
        for kind in "we":
            for name in ["keys", "values"] if self.split else ["keys"]:
                raw = self.data[f"{kind}_{name}"]
                if kind == "w":
                    base = np.full((2, self.ring, raw.shape[1]), 0xEE, np.uint8)
                    for p in range(max(0, c - self.ring), c):
                        base[1, p % self.ring] = raw[p]
                    out.append(State(base, np.ascontiguousarray(raw[c: c + rows])))
                else:
                    base = np.full((11, BLOCK // 2, raw.shape[1]), 0xEE, np.uint8)
                    for j in range(len(raw)):
                        base[(7 * (2 * j // BLOCK) + 2) % 11, j % (BLOCK // 2)] = raw[j]
                    out.append(State(base, None, 0, 2))
        return out

    def run(self, c: int, rows: int, *, start: int = 0, **how: Any) -> Array:
        d = self.data
        operands = [held(d["q"][c: c + rows], "bf16"), Param(d["sink"]), *self.states(c, rows), d["picks"][c: c + rows],
                    None]
        return run(self.spec(), self.step(c, rows, start), operands, **how)[len(operands) - 1]

    # ---- in numpy --------------------------------------------------------------------------------------------------
    def decoded(self, kind: str, name: str) -> Array:
        raw = self.data[f"{kind}_{name if self.split else 'keys'}"]
        width = self.kv_heads * (self.value_dim if self.split and name == "values" else self.dim)
        return decode_record(raw, self.dtype(self.record if kind == "w" else self.entry, width))

    def expected(self, i: int, c: int = 0, start: int = 0) -> Array:
        """Row i in f64; ``c``: first row of its step."""
        rows: list[tuple[Array, Array]] = []
        for s in self.sources:
            kind = "w" if s in ("window", "context") else "e"
            at: Any = range(max(start, i - WINDOW + 1), i + 1)
            if s == "context":
                at = range(max(start, c - WINDOW), c)
            elif s == "dense":
                at = range((i + 1) // 2)
            elif s == "selected":
                at = [p for p in self.data["picks"][i] if p >= 0]
            at = list(at)
            rows.append((self.decoded(kind, "keys")[at], self.decoded(kind, "values")[at]))
        keys, values = (np.concatenate(x).astype(np.float64) for x in zip(*rows, strict=True))
        out = np.zeros((self.heads, self.value_dim))
        for h in range(self.heads):
            g = h // (self.heads // self.kv_heads)
            kd, vd = self.dim, self.value_dim if self.split else self.dim
            s = keys[:, g * kd: (g + 1) * kd] @ self.data["q"][i].reshape(self.heads, -1)[h] * self.dim**-0.5
            m = max(s.max(initial=-1e30), -1e30)
            e = np.exp(s - m)
            below = e.sum() + (np.exp(self.data["sink"][h] - m) if self.sink else 0)
            p = rounded(e.astype(np.float32)).astype(np.float64) if self.rounds else e
            out[h] = p @ values[:, g * vd: g * vd + self.value_dim] / below
        return out.reshape(-1)


VARIANTS = {
    "one key head": {}, "wide": {"record": "f32", "entry": "f32", "rounds": ""},
    "grouped queries": {"kv_heads": 2, "record": "bf16", "entry": "mxfp8(1,32)", "split": True},
    "short values": {"value_dim": 32, "sink": False},
    "odd sizes": {"heads": 6, "dim": 48, "value_dim": 40, "split": True, "record": "bf16", "entry": "bf16"},
    "dense": {"sources": ("dense",), "n": 150}, "context": {"sources": ("context", "selected")},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_source_and_shape_equals_one_softmax_in_f64(name: str) -> None:
    s = Scene(**({"n": 44} | VARIANTS[name]))
    c = 20
    for isa in available_isas(s.spec()):
        got = s.run(c, s.n - c, isa=isa)
        for r in range(0, s.n - c, 5):
            want = s.expected(c + r, c)
            # A probability near the middle of two bf16 values may round either way: one such flip is 2^-9 of it.
            limit = 2.0**-9 if s.rounds else 1e-5
            assert np.abs(got[r] - want).max() <= limit * np.abs(want).max() + 1e-6, (isa, r)


@pytest.mark.parametrize("rounds", ["bf16", ""])
def test_only_the_weights_of_the_values_are_rounded(rounds: str) -> None:
    """Two keys, values 0 and 1: the result is (rounded weight) / (1 + weight)."""
    s = Scene(n=2, heads=1, dim=16, value_dim=16, split=True, record="f32", rounds=rounds, sink=False,
              sources=("window",))
    s.data["w_values"] = np.repeat(np.array([[0.0], [1.0]], np.float32), 16, 1).view(np.uint8)
    keys, scores = np.zeros((2, 16), np.float32), (0.0, -1.2)
    keys[:, 0] = np.array(scores) / s.dim**-0.5
    s.data["w_keys"] = keys.view(np.uint8)
    s.data["q"][:] = np.eye(1, 16, dtype=np.float32)
    p = np.exp(scores[1])
    want = float(rounded(np.float32([p]))[0] if rounds else p) / (1 + p)
    assert abs(rounded(np.float32([p]))[0] - p) > 1e-4
    assert np.allclose(s.run(0, 2)[1], want, rtol=1e-6)


def test_cutting_a_sequence_changes_no_bit() -> None:
    s = Scene(n=75)
    for isa in available_isas(s.spec()):
        whole = s.run(0, s.n, isa=isa)
        for cuts in ([1] * 75, [7] * 11, [16] * 5, [33, 42], [64, 11]):
            c = 0
            for rows in cuts:
                rows = min(rows, s.n - c)
                if rows:
                    assert np.array_equal(s.run(c, rows, isa=isa), whole[c: c + rows]), (isa, cuts, c)
                c += rows


def test_rows_before_the_first_valid_one_are_not_read() -> None:
    s = Scene(n=40, sources=("window",))
    got = s.run(30, 10, start=27)
    for r in (0, 3, 9):
        want = s.expected(30 + r, 30, start=27)
        assert np.abs(got[r] - want).max() <= 2.0**-8 * np.abs(want).max() + 1e-6


def test_a_row_that_sees_nothing_has_its_weight_on_the_sink() -> None:
    s = Scene(n=4, sources=("selected",))
    s.data["picks"][:] = -1
    assert not s.run(0, 4).any()


# ---- selections ----------------------------------------------------------------------------------------------------
HEADS, DIM = 6, 64


def selector(selections: list[dict[str, int]], ratio: int = 2, rounds: str = "bf16", within: int = 0) -> KernelSpec:
    record = f"mxfp4(1,32)[{DIM}]"
    ops = [Operand("value", "T", (HEADS, DIM), "mxfp4(1,32)"),
           Operand("state", "T", (DIM,), record, detail=(("kind", "paged"), ("ratio", ratio))),
           Operand("value", "T", (HEADS,), "bf16"), Operand("value", "T", (max(1, within),), "i32")]
    described = []
    for s in selections:
        pin = len(ops)
        ops.append(Operand("pin", "T", (s["k"],), "i32"))
        ops.append(Operand("value", "T", (s["k"],), "i32", write=True))
        described.append((("k", s["k"]), ("block", s.get("block", 0)), ("within", 3 if s.get("within") else -1),
                          ("within_block", s.get("within", 0)), ("pin", pin), ("out", pin + 1)))
    attrs = {"q": 0, "keys": 1, "w": 2, "ratio": ratio, "rounds": rounds, "heads": HEADS, "head_dim": DIM,
             "selections": tuple(described)}
    return KernelSpec("score_select", "T", tuple(ops), tuple(sorted(attrs.items())), title="t")


@dataclass
class Index:
    """Keys of ``entries`` entries, and queries of rows at positions from ``c``."""

    entries: int
    rows: int
    c: int
    ratio: int = 2
    equal: bool = False

    def __post_init__(self) -> None:
        t = DType.parse(f"mxfp4(1,32)[{DIM}]")
        some = normal(self.entries, DIM)
        if self.equal:
            some = some[RNG.integers(0, 3, self.entries)]
        self.raw = encode_record(torch.from_numpy(some), t)
        self.keys = decode_record(self.raw, t)
        q = torch.from_numpy(normal(self.rows * HEADS, DIM))
        self.q = decode_record(encode_record(q, t), t).reshape(self.rows, HEADS, DIM)
        self.w = rounded(normal(self.rows, HEADS))
        per = BLOCK // self.ratio
        count = self.entries // per + 1
        self.blocks = RNG.permutation(count).tolist()
        self.base = np.full((count, per, self.raw.shape[1]), 0xEE, np.uint8)
        for j in range(self.entries):
            self.base[self.blocks[j // per], j % per] = self.raw[j]

    def scores(self, r: int, rounds: str = "bf16") -> Array:
        held_ = rounded if rounds else (lambda x: x)
        dots = held_((self.q[r].astype(np.float64) @ self.keys.T.astype(np.float64)).astype(np.float32))
        total = np.zeros(self.entries, np.float32)
        for h in range(HEADS):
            total += held_(np.maximum(dots[h], 0) * self.w[r, h])
        total = held_(total)
        seen = (self.c + r + 1) // self.ratio
        return np.where(np.arange(self.entries) < seen, total, -np.inf)

    def run(self, spec: KernelSpec, listed: Array | None = None, pins: list[Array | None] | None = None,
            isa: str = "", threads: int = 1) -> list[Array]:
        step = Step([Seq(self.rows, self.c, blocks=self.blocks)], block_tokens=BLOCK)
        operands: list[Any] = [held(self.q.reshape(self.rows, -1), "bf16"), State(self.base, None, 0, self.ratio),
                               held(self.w, "bf16"), np.zeros((self.rows, 1), np.int32) if listed is None else listed]
        for i in range((len(spec.operands) - 4) // 2):
            operands += [pins[i] if pins else None, None]
        return [v for _, v in sorted(run(spec, step, operands, isa=isa, threads=threads).items())]


def first_rows(x: Index, rows: int) -> Index:
    """The same keys with the first rows only."""
    y = copy.copy(x)
    y.rows, y.q, y.w = rows, x.q[:rows], x.w[:rows]
    return y


def best(scores: Array, k: int) -> Array:
    order = np.argsort(-scores, kind="stable")[:k]
    order = np.where(scores[order] > -np.inf, order, -1)
    return np.pad(order, (0, k - len(order)), constant_values=-1)


def block_scores(scores: Array, block: int, seen: int) -> Array:
    padded = np.pad(scores, (0, -len(scores) % block), constant_values=-np.inf).reshape(-1, block).max(1)
    if seen:
        padded[(seen - 1) // block] = np.inf
    return padded


@pytest.mark.parametrize(("entries", "c", "equal"),
                         [(900, 1700, False), (900, 1700, True), (40, 0, False), (70, 120, True)])
def test_selections_are_the_best_first_and_of_equals_the_lower(entries: int, c: int, equal: bool) -> None:
    x = Index(entries, 6, c, equal=equal)
    spec = selector([{"k": 10, "block": 8}, {"k": 25}, {"k": 600}])
    for isa in available_isas(spec):
        blocks, few, many = x.run(spec, isa=isa)
        for r in range(x.rows):
            scores, seen = x.scores(r), (c + r + 1) // 2
            assert np.array_equal(blocks[r], best(block_scores(scores, 8, seen), 10)), (isa, r)
            assert np.array_equal(few[r], best(scores, 25)), (isa, r)
            assert np.array_equal(many[r], best(scores, 600)), (isa, r)


def test_scores_outside_the_listed_blocks_do_not_count() -> None:
    x = Index(800, 5, 1590)
    listed = np.stack([RNG.permutation(np.arange(-4, 100))[:12] for _ in range(5)]).astype(np.int32)
    listed[listed < 0] = -1
    spec = selector([{"k": 30, "within": 8}], within=12)
    (got,) = x.run(spec, listed)
    for r in range(5):
        inside = np.isin(np.arange(800) // 8, listed[r][listed[r] >= 0])
        assert np.array_equal(got[r], best(np.where(inside, x.scores(r), -np.inf), 30))


def test_a_pin_replaces_one_selection_and_leaves_the_others() -> None:
    x = Index(100, 3, 150)
    spec = selector([{"k": 4}, {"k": 6}])
    given = np.arange(12, dtype=np.int32).reshape(3, 4)
    pinned, free = x.run(spec, pins=[given, None])
    assert np.array_equal(pinned, given)
    assert np.array_equal(free, np.stack([best(x.scores(r), 6) for r in range(3)]))


@pytest.mark.parametrize("equal", [False, True])
def test_a_long_row_in_parts_selects_what_it_selects_in_one_piece(equal: bool) -> None:
    entries, few, many = 30_000, 3, FEW + 1  # a step of more rows takes each of them whole
    x = Index(entries, many, 2 * entries - many - 5, equal=equal)
    listed = np.stack([RNG.permutation(np.arange(-60, entries // 8))[:900] for _ in range(many)]).astype(np.int32)
    listed[listed < 0] = -1
    spec = selector([{"k": 40, "block": 8}, {"k": 512}, {"k": 30, "within": 8}], within=900)
    for isa in available_isas(spec):
        whole = x.run(spec, listed, isa=isa)
        y = first_rows(x, few)
        for threads in (1, 2):
            parts = y.run(spec, listed[:few], isa=isa, threads=threads)
            for a, b in zip(parts, whole, strict=True):
                assert np.array_equal(a, b[:few]), (isa, threads)


def test_unrounded_scores_stay_close_to_f64() -> None:
    x = Index(300, 4, 560)
    (got,) = x.run(selector([{"k": 20}], rounds=""))
    for r in range(4):
        scores = x.scores(r, "")
        assert np.allclose(scores[got[r]], np.sort(scores[scores > -np.inf])[::-1][:20], rtol=1e-5, atol=1e-5)


