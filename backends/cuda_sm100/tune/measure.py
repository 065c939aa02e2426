"""Times the stages of candidates on the device of this machine. Needs numpy and the driver alone: no compiler.

    python measure.py CANDIDATES RESULT.json
"""

from __future__ import annotations

import ctypes
import json
import math
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from deepinfer.backends.cuda_sm100.driver import Driver, blocks_of
else:  # where it runs there may be nothing but this folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from driver import Driver, blocks_of

FLUSH = 192 << 20
_COLD = 400 << 20  # bytes of weights that a replay goes through at least, unless that takes too many copies
_REPEATS = 9


class Pools:
    """Weights of all kernels lie in a few large areas of random bytes."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.areas: dict[str, tuple[int, int]] = {}
        self.taken: dict[str, int] = {}

    def take(self, kind: str, size: int) -> int:
        """Address of ``size`` bytes of a kind: ``codes``, ``scales``, ``bf16``, ``f32``."""
        size = -(-size // 256) * 256
        at, have = self.areas.get(kind, (0, 0))
        used = self.taken.get(kind, 0)
        if used + size > have:
            if have:
                self.driver.free(at)
                raise Grown
            at, have = self._make(kind, max(size, 1 << 30))
            self.areas[kind] = at, have
        self.taken[kind] = used + size
        return at + used

    def _make(self, kind: str, size: int) -> tuple[int, int]:
        block = _random(kind, 32 << 20)
        at = self.driver.alloc(size)
        first = self.driver.upload(block)
        for o in range(0, size, block.nbytes):
            self.driver("cuMemcpyDtoD_v2", ctypes.c_uint64(at + o), ctypes.c_uint64(first),
                        ctypes.c_size_t(min(block.nbytes, size - o)))
        self.driver.free(first)
        return at, size

    def reset(self, need: dict[str, int]) -> None:
        """Gives all back, and sees to it that ``need`` bytes fit."""
        self.taken = {}
        for kind, size in need.items():
            at, have = self.areas.get(kind, (0, 0))
            if have < size:
                if have:
                    self.driver.free(at)
                self.areas[kind] = self._make(kind, size)


class Grown(Exception):
    """More was taken than was asked for."""


def _random(kind: str, size: int) -> np.ndarray:
    rng = np.random.default_rng(len(kind))
    if kind == "scales":
        return rng.integers(118, 124, size, np.uint8)
    if kind == "codes":
        x = rng.integers(0, 256, size, np.uint8)
        x[(x & 0x7F) == 0x7F] = 0x31
        return x
    x = rng.standard_normal(size // 4, np.float32) * 0.05
    return x.view(np.uint16)[1::2].repeat(2).copy() if kind == "bf16" else x


class Arguments:
    """Values of the parameters of a kernel for a number of rows."""

    def __init__(self, driver: Driver, pools: Pools, kernel: dict[str, Any], rows: int, seed: int, skew: bool,
                 shared: dict[Any, int]) -> None:
        self.driver, self.pools, self.kernel, self.rows = driver, pools, kernel, rows
        self.seed, self.skew, self.shared = seed, skew, shared
        self.own: dict[Any, int] = {}

    def values(self, parameters: list[Any], scratch: int) -> list[Any]:
        return [self._one(kind, where, scratch) for _, kind, where in parameters]

    def _place(self, key: Any, make: Callable[[], np.ndarray], own: bool = False) -> ctypes.c_uint64:
        table = self.own if own else self.shared
        if key not in table:
            table[key] = self.driver.upload(make())
        return ctypes.c_uint64(table[key])

    def _one(self, kind: str, where: list[Any], scratch: int) -> Any:
        n, operands = self.rows, self.kernel["operands"]
        match where:
            case ["launch", what]:
                return ctypes.c_int32(0 if what == "row_first" else n)
            case ["axis", "rows"]:
                return self._place(("rows", n), lambda: np.array([n], np.int32))
            case ["axis", "step_row"]:
                return self._place(("step_row", n), lambda: np.arange(n, dtype=np.int32))
            case ["axis_of", _, "first"]:
                return self._place(("first", n), lambda: np.array([0, n], np.int32))
            case ["axis", _] | ["axis_of", _, _]:
                return self._place(("zero", n), lambda: np.zeros(n + 8, np.int64))
            case ["value", i] if operands[i]["dtype"] == "i32":
                return self._place(("picks", i), lambda: picks(self.kernel, n, self.seed, self.skew), True)
            case ["value", i]:
                o = operands[i]
                size = n * math.prod(o["dims"]) * (4 if kind == "*f32" else 2)
                if o["write"]:
                    return self._place(("out", i, size), lambda: np.zeros(size, np.uint8))
                return self._place(("in", i, size), lambda: np.resize(
                    _random("f32" if kind == "*f32" else "bf16", 4 << 20), size // (4 if kind == "*f32" else 2)))
            case ["param", i, what]:
                if ("param", i, what) not in self.own:
                    pool, size = area(operands[i], what)
                    self.own["param", i, what] = self.pools.take(pool, size)
                return ctypes.c_uint64(self.own["param", i, what])
            case ["scratch"]:
                return ctypes.c_uint64(scratch)
        raise RuntimeError(f"no argument for {where}")


def area(operand: dict[str, Any], what: str) -> tuple[str, int]:
    """(kind, bytes) of a weight or its scales."""
    name, _, block = operand["dtype"].partition("(")
    *stack, n, k = operand["dims"]
    count = math.prod(stack)
    if what == "scale":
        r, c = map(int, block[:-1].split(","))
        return "scales", count * -(-n // r) * -(-k // c)
    if name in ("mxfp8", "mxfp4"):
        return "codes", count * n * k // (1 if name == "mxfp8" else 2)
    return name, count * n * k * (4 if name == "f32" else 2)


def picks(kernel: dict[str, Any], rows: int, seed: int, skew: bool) -> np.ndarray:
    """Distinct experts of each row, drawn evenly or with weights 1 / (rank + 4)."""
    slots, experts = kernel["slots"], kernel["experts"]
    rng = np.random.default_rng([rows, seed])
    weight = 1.0 / (rng.permutation(experts) + 4.0) if skew else np.ones(experts)
    return np.argsort(rng.exponential(size=(rows, experts)) / weight, 1)[:, :slots].astype(np.int32)


def weight_bytes(kernel: dict[str, Any]) -> dict[str, int]:
    need: dict[str, int] = {}
    for _, _, where in kernel["choices"][0]["parameters"]:
        if where[0] == "param":
            kind, size = area(kernel["operands"][where[1]], where[2])
            need[kind] = need.get(kind, 0) + -(-size // 256) * 256
    return need


def floor_bytes(kernel: dict[str, Any], rows: int, skew: bool) -> int:
    """Inputs, outputs and weights once, of experts those that are picked."""
    share = len(np.unique(picks(kernel, rows, 0, skew))) / kernel["experts"] if kernel["experts"] else 1.0
    values: int = sum(rows * math.prod(o["dims"]) * (4 if o["dtype"] in ("f32", "i32") else 2)
                      for o in kernel["operands"] if o["role"] == "value")
    return int(sum(weight_bytes(kernel).values()) * share + values)


def flops(kernel: dict[str, Any], rows: int) -> int:
    """Multiply-adds, two each: with every weight, or every one of a picked expert."""
    weights: int = sum(math.prod(o["dims"][-2:]) for o in kernel["operands"] if o["role"] == "param")
    return 2 * rows * weights * int(kernel["slots"])


def time_kernel(driver: Driver, pools: Pools, blob: bytes, kernel: dict[str, Any], rows: int, skew: bool,
                choices: list[dict[str, Any]], flush: int) -> list[float]:
    """Microseconds of each choice (its stages) at a number of rows: median of replays of a graph that goes through
    copies of the weights, the cache filled with other bytes before each."""
    need = weight_bytes(kernel)
    copies = max(1, min(8, _COLD // max(1, sum(need.values()))))
    if kernel["experts"]:  # other experts each time, out of one set
        copies = 4 if rows <= 2 else 2 if rows <= 64 else 1
    pools.reset({kind: size * (1 if kernel["experts"] else copies) for kind, size in need.items()})
    shared: dict[Any, int] = {}
    sets = [Arguments(driver, pools, kernel, rows, c, skew, shared) for c in range(copies)]
    if kernel["experts"]:
        for s in sets:
            pools.taken = {}
            s.values(kernel["choices"][0]["parameters"], 0)
    out = []
    scratch = driver.alloc(max(c["scratch"][0] + c["scratch"][1] * rows for c in choices) + 256)
    for choice in choices:
        values = [s.values(choice["parameters"], scratch) for s in sets]

        def work(choice: dict[str, Any] = choice, values: list[Any] = values) -> None:
            for v in values:
                for stage in choice["stages"]:
                    blocks = blocks_of(stage["grid"], rows)
                    if blocks:
                        driver.launch(driver.function(blob, stage), blocks, stage, v)

        work()
        driver.synchronize()
        graph = driver.capture(work)
        out.append(round(driver.timed(graph, (flush, FLUSH), _REPEATS) / copies, 2))
        driver("cuGraphExecDestroy", graph)
    driver.free(scratch)
    for key, at in [*shared.items(), *((k, a) for s in sets for k, a in s.own.items() if k[0] != "param")]:
        driver.free(at)
        del key
    return out


def measure(bundle: Path, progress: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Times of all choices of a bundle: ``{device, driver, times: [{symbol, rows, skew, us: [..], floor_bytes}]}``."""
    with zipfile.ZipFile(bundle) as z:
        blob, table = z.read("cubins.bin"), json.loads(z.read("choices.json"))
    driver = Driver()
    pools, flush = Pools(driver), driver.alloc(FLUSH)
    times = []
    for symbol, kernel in table["kernels"].items():
        for rows, skew, which in kernel["cases"]:
            progress(f"{symbol} {rows}")
            us = time_kernel(driver, pools, blob, kernel, rows, skew, [kernel["choices"][i] for i in which], flush)
            times.append({"symbol": symbol, "rows": rows, "skew": skew, "which": which, "us": us,
                          "floor_bytes": floor_bytes(kernel, rows, skew)})
    return {"device": driver.name(), "driver": driver.version(), "times": times}


def main(bundle: str, out: str) -> None:
    result = measure(Path(bundle), lambda text: print(text, file=sys.stderr, flush=True))
    Path(out).write_text(json.dumps(result, indent=1), encoding="utf-8")
    for t in result["times"]:
        best = min(t["us"])
        print(f"{t['symbol'][:46]:46} {t['rows']:5}{'s' if t['skew'] else ' '} best {best:9.2f} us "
              f"{t['floor_bytes'] / best / 1e6:5.2f} TB/s  {t['which'][t['us'].index(best)]} of {t['us']}")


if __name__ == "__main__":
    main(*sys.argv[1:])
