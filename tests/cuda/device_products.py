"""Contractions at the sizes of a real config: random inputs on the device, references in float64 from torch."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np

SIZES = (1, 64, 4096, 8, 256, 1024)
_E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def bf16(x: np.ndarray) -> np.ndarray:
    """f32 -> bits of bf16, nearest even."""
    u = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)


def floats(h: np.ndarray) -> np.ndarray:
    return (h.astype(np.uint32) << 16).view(np.float32)


def device() -> str:
    """Where references are computed."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


class Product:
    """A gemm or grouped_gemm kernel."""

    def __init__(self, spec: dict[str, Any], kernel: dict[str, Any]) -> None:
        self.spec, self.kernel, self.symbol = spec, kernel, spec["symbol"]
        self.grouped = spec["family"] == "grouped_gemm"
        a, ops = spec["attrs"], spec["operands"]
        self.x, self.results = ops[a["x"]], a["results"]
        self.weights = [w if self.grouped else w[0] for w in a["weights"]]
        self.groups = 1 if self.grouped else a["weights"][0][1]
        self.slots = ops[a["experts"]]["dims"][-1] if self.grouped else 1
        self.k = self.x["dims"][-1]
        self.weight_bytes = sum(self._size(w) for w in self.weights)
        self.sizes = SIZES if self.k < 16384 else (1, 64, 256)
        self._known: dict[int, Any] = {}

    # ---- formats ---------------------------------------------------------------------------------------------------
    def _format(self, i: int) -> tuple[str, int, int, int, int]:
        o = self.spec["operands"][i]
        name, _, block = o["dtype"].partition("(")
        r, c = map(int, block[:-1].split(",")) if block else (0, 0)
        stack, n = (o["dims"][0], o["dims"][1]) if len(o["dims"]) == 3 else (1, o["dims"][0])
        return name, r, c, stack, n

    def _shapes(self, i: int) -> tuple[tuple[int, ...], tuple[int, ...] | None, Any]:
        name, r, c, stack, n = self._format(i)
        width = self.k // 2 if name == "mxfp4" else self.k
        scales = (stack, -(-n // r), -(-self.k // c)) if r else None
        return (stack, n, width), scales, {"bf16": np.uint16, "f32": np.float32}.get(name, np.uint8)

    def _size(self, i: int) -> int:
        data, scales, kind = self._shapes(i)
        return math.prod(data) * np.dtype(kind).itemsize + (math.prod(scales) if scales else 0)

    def bytes(self, rows: int) -> int:
        """Inputs and outputs once; of a stack the experts that are picked."""
        _, _, _, stack, _ = self._format(self.weights[0])
        share = len(np.unique(self._picks(rows))) / stack if self.grouped else 1.0
        values = sum(2 * math.prod(o["dims"]) * rows for o in self.spec["operands"] if o["role"] == "value")
        return int(self.weight_bytes * share) + values

    def flops(self, rows: int) -> int:
        inputs = self.slots if self.grouped else math.prod(self.x["dims"][:-1]) if self.groups == 1 else 1
        return 2 * rows * inputs * self.k * sum(self._format(w)[4] for w in self.weights)

    # ---- arguments -------------------------------------------------------------------------------------------------
    def _picks(self, rows: int) -> np.ndarray:
        _, _, _, stack, _ = self._format(self.weights[0])
        rng = np.random.default_rng(rows)
        return np.argsort(rng.random((rows, stack)), 1)[:, : self.slots].astype(np.int32)

    def _weight(self, i: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Codes and scales. Of a stack eight experts differ, of a matrix 1,024 rows; the others repeat them."""
        if i not in self._known:
            data, scales, kind = self._shapes(i)
            rng, some = np.random.default_rng(i), (min(data[0], 8), min(data[1], 1024), *data[2:])
            if kind == np.uint8:
                codes = rng.integers(0, 256, some, np.uint8)
                if self._format(i)[0] == "mxfp8":
                    codes[(codes & 0x7F) == 0x7F] = 0x30
            elif kind == np.uint16:
                codes = bf16(rng.standard_normal(some, np.float32) * 0.05)
            else:
                codes = rng.standard_normal(some, np.float32) * 0.05
            s = None if scales is None else rng.integers(118, 124, (some[0], *scales[1:]), np.uint8)
            self._known[i] = np.tile(codes, (1, -(-data[1] // some[1]), 1))[:, : data[1]], s
        return self._known[i]

    def _whole(self, x: np.ndarray, count: int) -> np.ndarray:
        return np.ascontiguousarray(np.concatenate([x] * -(-count // len(x)))[:count])

    def _values(self, rows: int) -> dict[int, np.ndarray]:
        out = {}
        for i, o in enumerate(self.spec["operands"]):
            if o["role"] != "value" or o["write"]:
                continue
            shape = (min(rows, 16), *o["dims"])
            if o["dtype"] == "i32":
                out[i] = self._picks(rows)
                continue
            rng = np.random.default_rng(i)
            some = rng.random(shape, np.float32) if o["dtype"] == "f32" else bf16(rng.integers(-64, 65, shape) / 16)
            out[i] = np.resize(some, (rows, *o["dims"]))
        return out

    def arguments(self, driver: Any, rows: int) -> tuple[list[Any], list[int], dict[int, Any]]:
        """ctypes values, what to free, and (address, shape) of each output."""
        given, kept, outputs, values = self._values(rows), [], {}, []
        addresses: dict[Any, int] = {}

        def place(key: Any, make: Any) -> int:
            if key not in addresses:
                x = make()
                addresses[key] = x if isinstance(x, int) else driver.upload(x)
                kept.append(addresses[key])
            return addresses[key]

        for _, kind, where in self.kernel["parameters"]:
            match where:
                case ["launch", what]:
                    values.append(ctypes.c_int32(0 if what == "row_first" else rows))
                case ["axis", "rows"]:
                    values.append(ctypes.c_uint64(place("n", lambda: np.array([rows], np.int32))))
                case ["axis", "step_row"]:
                    values.append(ctypes.c_uint64(place("r", lambda: np.arange(rows, dtype=np.int32))))
                case ["axis_of", _, "first"]:
                    values.append(ctypes.c_uint64(place("f", lambda: np.array([0, rows], np.int32))))
                case ["axis", _] | ["axis_of", _, _]:
                    values.append(ctypes.c_uint64(place("z", lambda: np.zeros(rows + 8, np.int64))))
                case ["value", i] if i in given:
                    values.append(ctypes.c_uint64(place(i, lambda i=i: given[i])))
                case ["value", i]:
                    o = self.spec["operands"][i]
                    like = np.zeros((rows, *o["dims"]), np.float32 if o["dtype"] == "f32" else np.uint16)
                    values.append(ctypes.c_uint64(place(i, lambda like=like: driver.alloc(like.nbytes))))
                    outputs[i] = values[-1].value, like
                case ["param", i, what]:
                    values.append(ctypes.c_uint64(place(
                        (i, what), lambda i=i, what=what: self._param(driver, i, what))))
                case ["scratch"]:
                    fixed, row = self.kernel["scratch"]["fixed"], self.kernel["scratch"]["row"]
                    values.append(ctypes.c_uint64(place("s", lambda size=fixed + row * rows: driver.alloc(size))))
                case _:
                    raise RuntimeError(f"no argument for {where}")
            del kind
        return values, kept, outputs

    def _param(self, driver: Any, i: int, what: str) -> Any:
        count = self._format(i)[3]
        codes, scales = self._weight(i)
        x = codes if what == "data" else scales
        assert x is not None
        if x.nbytes * count // len(x) < 64 << 20:
            return self._whole(x, count)
        return self._tiled(driver, x, count)

    def _tiled(self, driver: Any, x: np.ndarray, count: int) -> int:
        """Large stacks are filled on the device."""
        at = driver.alloc(x.nbytes * count // len(x))
        first = driver.upload(x)
        for e in range(0, count, len(x)):
            size = min(len(x), count - e) * x.nbytes // len(x)
            driver("cuMemcpyDtoD_v2", ctypes.c_uint64(at + e * x.nbytes // len(x)), ctypes.c_uint64(first),
                   ctypes.c_size_t(size))
        driver.free(first)
        return at

    # ---- reference -------------------------------------------------------------------------------------------------
    def _dense(self, i: int) -> Any:
        import torch

        codes, scales = self._weight(i)
        name, r, c, _, n = self._format(i)
        if name == "mxfp4":
            table = torch.tensor([*_E2M1, *(-v for v in _E2M1)], dtype=torch.float64, device=device())
            raw = torch.from_numpy(codes).to(device()).long()
            w = table[torch.stack((raw & 15, raw >> 4), -1).flatten(-2)]
        elif name == "mxfp8":
            w = torch.from_numpy(codes).to(device()).view(torch.float8_e4m3fn).double()
        else:
            w = torch.from_numpy(floats(codes) if name == "bf16" else codes).to(device()).double()
        if scales is not None:
            s = torch.pow(2.0, torch.from_numpy(scales).to(device()).double() - 127)
            w = w * s.repeat_interleave(r, 1)[:, :n].repeat_interleave(c, 2)[:, :, : self.k]
        return w

    def reference(self, rows: int) -> dict[int, np.ndarray]:
        """Outputs in float64 with the roundings of the epilogue."""
        import torch

        given = self._values(rows)
        x = torch.from_numpy(self._plain(given[self.spec["attrs"]["x"]])).to(device()).double()
        sums = []
        for i, dims in zip(self.weights, self.results, strict=True):
            w = self._dense(i)
            if self.grouped:
                picks = torch.from_numpy(self._picks(rows).astype(np.int64)).to(device()) % len(w)
                xs = x if x.dim() == 3 else x[:, None].expand(-1, self.slots, -1)
                out = torch.stack([torch.stack([w[picks[t, s]] @ xs[t, s] for s in range(self.slots)])
                                   for t in range(rows)])
            elif self.groups > 1:
                out = torch.einsum("tgk,grk->tgr", x, w[0].reshape(self.groups, -1, self.k))
            else:
                out = x @ w[0].T
            sums.append(out.reshape(rows, *dims))
        return self._epilogue(sums, given)

    @staticmethod
    def _plain(x: np.ndarray) -> np.ndarray:
        return floats(x) if x.dtype == np.uint16 else x

    def _epilogue(self, sums: list[Any], given: dict[int, np.ndarray]) -> dict[int, np.ndarray]:
        import torch

        known: list[Any] = []
        out: dict[int, np.ndarray] = {}
        simple = {"mul": torch.mul, "add": torch.add, "min": torch.minimum, "max": torch.maximum,
                  "sigmoid": torch.sigmoid, "sqrt": torch.sqrt, "sub": torch.sub,
                  "softplus": torch.nn.functional.softplus}
        for op, args, dims, attrs in self.spec["slots"]["epilogue"]:
            a = [known[i] for i in args]
            match op:
                case "acc":
                    known.append(sums[attrs["i"]])
                case "load":
                    known.append(torch.from_numpy(self._plain(given[attrs["operand"]])).to(device()).double())
                case "const":
                    known.append(torch.tensor(attrs["values"], dtype=torch.float64, device=device()).reshape(dims))
                case "round":
                    held = a[0].float()
                    known.append((held.bfloat16() if attrs["dtype"] == "bf16" else held).double())
                case "store":
                    known.append(None)
                    out[attrs["operand"]] = a[0].cpu().numpy()
                case "reshape":
                    known.append(a[0].reshape(a[0].shape[0], *dims))
                case _ if op in simple:
                    known.append(simple[op](*a))
                case _:
                    raise RuntimeError(f"no reference for {op}")
        return out

    @staticmethod
    def error(got: np.ndarray, want: np.ndarray) -> float:
        """Norm of the difference over the norm."""
        x = Product._plain(got).astype(np.float64)
        e = float(np.linalg.norm(x - want) / np.linalg.norm(want))
        return e if e == e else float("inf")


def products(specs: list[dict[str, Any]], table: dict[str, Any]) -> list[Product]:
    return [Product(s, table[s["symbol"]]) for s in specs if s["family"] in ("gemm", "grouped_gemm")
            and s["symbol"] in table]
