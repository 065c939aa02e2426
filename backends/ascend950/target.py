"""Ascend 950 as data: memories of a core, the SKUs that reports predict for, and what the skeletons carry."""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer.backends.base import Capabilities, Roof

ARCH = "dav-3510"
LANES = 64  # 32-bit lanes of a vector register
BLOCK = 32  # bytes: the grain of addresses in UB and L1, and of a row of a fractal
FRACTAL = 16  # rows of a fractal
VECTOR_BYTES = 256

# Usable bytes of the memories of one core, in the words of AscendC.
CAPACITY = {"UB": 253952, "L1": 524288, "L0A": 65536, "L0B": 65536, "L0C": 262144}
VECTOR_CORES = 2  # of one AI core
MOST_BLOCKS = 128  # of a launch, more than any chip has cores; the runner starts no more


@dataclass(frozen=True)
class Sku:
    """A product: AI cores, clock (Hz), bytes a cycle that a core reads from HBM, bytes of HBM."""

    name: str
    cores: int
    clock: float
    hbm_per_cycle: float
    hbm_bytes: int

    @property
    def read(self) -> float:
        """Bytes a second from HBM."""
        return self.cores * self.clock * self.hbm_per_cycle

    @property
    def multiply(self) -> float:
        """bf16 multiply-adds a second: 16 x 16 x 16 a cycle and core. Products of E4M3 take half the cycles."""
        return self.cores * self.clock * 4096.0


CORES = 32
SKUS = (
    Sku("Ascend 950PR (9589)", CORES, 1.65e9, 31.0, 128 << 30),
    Sku("Ascend 950DT (9581)", CORES, 1.65e9, 80.0, 144 << 30),
)

# Bytes a cycle of the paths of one core, and vector lanes: what the cost model (cost.py) divides by.
PATHS = {"L2": 100.0, "L1_L0": 256.0, "UB_L1": 128.0, "L0C_UB": 128.0}

LAUNCH = 4e-6  # seconds from one kernel of a stream to the next, assumed

CAPABILITIES = Capabilities(
    target="ascend950",
    prologue={},
    epilogue={"gemm": "element", "grouped_gemm": "element"},
    shared_input=True,
    draws=True,
    barrier_us=LAUNCH * 1e6,
    on_chip_bytes=CAPACITY["UB"],
    roofs=tuple(Roof(s.name, s.read, s.multiply, "published: bytes a cycle and core x cores x clock; 16 x 16 x 16 "
                                                 "bf16 multiply-adds a cycle and core",
                     s.clock, (("vector", s.cores * VECTOR_CORES), ("mix_1_2", s.cores)), LAUNCH) for s in SKUS),
)
