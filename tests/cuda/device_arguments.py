"""Random arguments of any kernel on a device: a step of equal sequences, and operands by their formats. Needs numpy."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

BLOCK = 128  # positions of a cache block
_POOL = 8192  # blocks at most
_ALIGNED = 4096


@dataclass(frozen=True)
class Shape:
    """``rows`` of one sequence (``prefill``) or of as many, the last at position ``context - 1``."""

    rows: int
    context: int
    prefill: bool = False

    @property
    def seqs(self) -> int:
        return 1 if self.prefill else self.rows

    @property
    def width(self) -> int:
        return -(-self.context // BLOCK)

    def step(self) -> dict[str, np.ndarray]:
        n = self.rows
        if self.prefill:
            pos = np.arange(self.context - n, self.context, dtype=np.int64)
            return {"seq": np.zeros(n, np.int32), "pos": pos, "first": np.array([0, n], np.int32), "c": pos[:1]}
        pos = np.full(n, self.context - 1, np.int64)
        return {"seq": np.arange(n, dtype=np.int32), "pos": pos, "first": np.arange(n + 1, dtype=np.int32), "c": pos}


def bf16(x: np.ndarray) -> np.ndarray:
    u = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)


def plain(dtype: str) -> Any:
    """How values lie in memory."""
    return {"f32": np.float32, "i32": np.int32, "i64": np.int64}.get(dtype, np.uint16)


class Arguments:
    """ctypes values in the order of the parameters; ``outputs``: address and likeness by operand."""

    def __init__(self, driver: Any, spec: dict[str, Any], table: dict[str, Any], records: dict[int, np.ndarray],
                 shape: Shape, seed: int = 0) -> None:
        self.driver, self.spec, self.table, self.shape = driver, spec, table, shape
        self.records, self.rng = records, np.random.default_rng(seed)
        self.step, self.kept, self.outputs = shape.step(), list[int](), dict[int, tuple[int, np.ndarray]]()
        self._made: dict[Any, int] = {}
        self.values = [self._value(kind, where) for _, kind, where in table["parameters"]]

    def free(self) -> None:
        for at in self.kept:
            self.driver.free(at)

    def poison(self) -> None:
        for at, like in self.outputs.values():
            self.driver("cuMemsetD8_v2", ctypes.c_uint64(at), 0x7B, ctypes.c_size_t(like.nbytes))

    def results(self) -> dict[int, np.ndarray]:
        self.driver.synchronize()
        return {i: self.driver.download(at, like) for i, (at, like) in self.outputs.items()}

    # ---- parameters ------------------------------------------------------------------------------------------------
    def _value(self, kind: str, where: list[Any]) -> Any:
        found = self._number(where)
        if found is not None:
            return ctypes.c_int64(found) if kind == "i64" else ctypes.c_int32(found)
        key = tuple(where)
        if key not in self._made:
            x = self._array(where)
            self._made[key] = x if isinstance(x, int) else self.driver.upload(x)
            self.kept.append(self._made[key])
        return ctypes.c_uint64(self._made[key])

    def _number(self, where: list[Any]) -> int | None:
        match where:
            case ["launch", what]:
                return 0 if what == "row_first" else self.shape.rows
            case ["seq", "width"]:
                return self.shape.width
            case ["step", "block_tokens"]:
                return BLOCK
            case ["state", i, "stride"]:
                return self._stride(i)
            case ["state", _, "has_fresh"]:
                return 1
            case ["pin", _, "given"]:
                return 0
        return None

    def _array(self, where: list[Any]) -> np.ndarray | int:
        n, seqs = self.shape.rows, self.shape.seqs
        match where:
            case ["axis", "rows"]:
                return np.array([n], np.int32)
            case ["axis", "step_row"]:
                return np.arange(n, dtype=np.int32)
            case ["axis", what] | ["axis_of", _, what]:
                return self.step[what]
            case ["seq", "blocks"]:
                return self.rng.integers(0, self._blocks(), (seqs, self.shape.width), dtype=np.int32)
            case ["seq", "slot"]:
                return np.arange(seqs, dtype=np.int32)
            case ["seq", "c"] | ["state", _, "from"]:
                return self.step["c"]
            case ["seq", _] | ["state", _, "valid"]:
                return np.zeros(seqs, np.int64)
            case ["state", _, "first"]:
                return self.step["first"]
            case ["state", i, what]:
                return self._state(i, what)
            case ["value", i]:
                return self._operand(i)
            case ["param", i, what]:
                return self._param(i, what == "scale")
            case ["pin", _]:
                return np.zeros(4, np.int32)
            case ["scratch"]:
                s = self.table["scratch"]
                entries = -(-self.shape.width * BLOCK // s["ratio"] // _ALIGNED) * _ALIGNED
                at: int = self.driver.alloc(s["fixed"] + s["row"] * n + s["entry"] * entries)
                return at
        raise RuntimeError(f"no argument for {where}")

    # ---- operands --------------------------------------------------------------------------------------------------
    def _operand(self, i: int) -> np.ndarray | int:
        o, n = self.spec["operands"][i], self.shape.rows
        if o["write"]:
            like = np.zeros((n, *o["dims"]), plain(o["dtype"]))
            at: int = self.driver.alloc(like.nbytes)
            self.outputs[i] = at, like
            return at
        if o["dtype"] == "i32":
            return self._picks(i, o["dims"])
        x = self.rng.standard_normal((min(n, 64), *o["dims"]), np.float32)
        x = np.concatenate([x] * -(-n // len(x)))[:n]
        return x if o["dtype"] == "f32" else bf16(x)

    def _picks(self, i: int, dims: tuple[int, ...]) -> np.ndarray:
        """Different entries, blocks or experts for each row."""
        a, k = self.spec["attrs"], dims[-1]
        among = self.shape.context
        if self.spec["family"] == "grouped_gemm":
            among = self.spec["operands"][a["weights"][0]]["dims"][0]
        for s in a.get("sources", ()):
            among = among // s[1] if s[4] == i else among
        for s in map(dict, a.get("selections", ())):
            among = among // s["within_block"] if s["within"] == i else among
        some = np.stack([self.rng.choice(among, k, replace=False) for _ in range(min(self.shape.rows, 64))])
        return np.concatenate([some] * -(-self.shape.rows // len(some)))[: self.shape.rows].astype(np.int32)

    def _param(self, i: int, scale: bool) -> np.ndarray:
        o = self.spec["operands"][i]
        name, _, block = o["dtype"].partition("(")
        if not block:
            x = self.rng.standard_normal(o["dims"], np.float32) * 0.05
            return x if name == "f32" else bf16(x)
        r, c = map(int, block[:-1].split(","))
        *lead, rows, width = o["dims"]
        if scale:
            return self.rng.integers(118, 124, (*lead, -(-rows // r), -(-width // c)), np.uint8)
        if name == "mxfp4":
            return self.rng.integers(0, 256, (*lead, rows, width // 2), np.uint8)
        return self.rng.integers(0, 256, (*lead, rows, width), np.uint8) & 0xF7

    # ---- states ----------------------------------------------------------------------------------------------------
    def _detail(self, i: int, key: str) -> Any:
        return self.spec["operands"][i]["detail"].get(key)

    def _stride(self, i: int) -> int:
        per = BLOCK // self._detail(i, "ratio") if self._detail(i, "kind") == "paged" else self._detail(i, "ring_rows")
        return -(-int(per * self._detail(i, "record_bytes")) // 16) * 16

    def _blocks(self) -> int:
        return min(_POOL, self.shape.seqs * self.shape.width)

    def _state(self, i: int, what: str) -> np.ndarray:
        record = self._detail(i, "record_bytes")
        if what == "fresh":
            return self._records(i, self.shape.rows * record)
        count = self._blocks() if self._detail(i, "kind") == "paged" else self.shape.seqs
        whole = self._records(i, self._stride(i) // record * record)
        one = np.concatenate([whole, np.zeros(self._stride(i) - len(whole), np.uint8)])
        return np.tile(one, count)

    def _records(self, i: int, size: int) -> np.ndarray:
        """Bytes of random records; a block begins anywhere among them."""
        raw = np.ascontiguousarray(self.records[i]).reshape(-1)
        return np.tile(raw, math.ceil(size / len(raw)))[:size]
