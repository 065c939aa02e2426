"""Measured schedules: a JSON file for a device, which the compiler replays on any machine.

An entry is keyed by the shapes and formats of a contraction; it holds for the skeleton that it was measured with (a
hash of its texts) and for a version of Triton. What has none takes the default schedule, and the report says so.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from deepinfer.backends.cuda_sm100.schedule import Schedule, Tile, default_schedule
from deepinfer.codegen.kernels.spec import KernelSpec
from deepinfer.errors import ArtifactError

FORMAT = 1
VARIABLE = "DEEPINFER_TUNING"
DEFAULT = "default"
TUNED = ("gemm", "grouped_gemm")
_BACKEND = Path(__file__).resolve().parents[1]
_IMPORTS = re.compile(rb"^(?:from \S+ )?import (?:\([^)]*\)|[^\n]*)\n", re.MULTILINE)
_TEXTS = ("templates/{}.py.jinja", "templates/contract.py.jinja", "expand.py", "families/{}.py", "families/contract.py")


def shapes(spec: KernelSpec) -> str:
    """The key of a contraction: ``gemm T [5120] mxfp8(1,32) x [1280,5120] mxfp8(32,32) ...``."""
    grouped = spec.family == "grouped_gemm"
    x = spec.operands[spec.get("x")]
    weights = [(i, 1) for i in spec.get("weights")] if grouped else spec.get("weights")
    parts = [spec.family, f"{list(x.dims)} {x.dtype}"]
    parts += [f"{g if g > 1 else ''}x {list(spec.operands[i].dims)} {spec.operands[i].dtype}" for i, g in weights]
    if grouped:
        parts.append(f"top {spec.operands[spec.get('experts')].dims[-1]}")
    return " ".join(parts).replace(", ", ",")


@lru_cache(maxsize=1)
def installed_triton() -> str:
    """Version of Triton, "" without one."""
    try:
        return version("triton")
    except PackageNotFoundError:
        return ""


@lru_cache(maxsize=8)
def skeleton(family: str) -> str:
    """Hash of the texts that a family's kernels are made with. What they import may move without measuring again."""
    texts = (_IMPORTS.sub(b"", (_BACKEND / t.format(family)).read_bytes()) for t in _TEXTS)
    return sha256(b"".join(texts)).hexdigest()[:16]


@dataclass(frozen=True)
class Database:
    """``entries`` by ``shapes``; ``skeletons``: of each family, as measured."""

    device: str
    target: str
    triton: str
    skeletons: Mapping[str, str]
    entries: Mapping[str, Any]

    @staticmethod
    def load(file: Path) -> Database:
        """ArtifactError for a file that is no database of this format."""
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
            if found["format"] != FORMAT:
                raise ArtifactError("a database of schedules has another format", where=str(file),
                                    found=found["format"], allowed=FORMAT, next_step="run deepinfer tune again")
            return Database(found["device"], found["target"], found["triton"], found["skeletons"], found["entries"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ArtifactError("a database of schedules cannot be read", where=str(file), found=error,
                                next_step=f"unset {VARIABLE}, or run deepinfer tune again") from None

    def save(self, file: Path) -> None:
        """Written aside, then renamed."""
        text = json.dumps({"format": FORMAT, "device": self.device, "target": self.target, "triton": self.triton,
                           "skeletons": dict(self.skeletons), "entries": dict(self.entries)}, indent=1, sort_keys=True)
        aside = file.with_name(file.name + ".new")
        with aside.open("w", encoding="utf-8") as f:
            f.write(text + "\n")
            f.flush()
            os.fsync(f.fileno())
        aside.replace(file)

    def schedule(self, spec: KernelSpec, triton: str) -> Schedule | None:
        """The measured schedule, unless it was measured with another skeleton or another Triton."""
        found = self.entries.get(shapes(spec))
        if found is None or self.triton != triton or self.skeletons.get(spec.family) != skeleton(spec.family):
            return None
        return Schedule.of(found["schedule"])


def database_for(target: str) -> Database | None:
    """The database that ``DEEPINFER_TUNING`` names, else the one that ships for the target, if any."""
    named = os.environ.get(VARIABLE, "")
    if named:
        found = Database.load(Path(named))
        if found.target != target:
            raise ArtifactError("a database of schedules is for another target", where=f"{VARIABLE}={named}",
                                found=found.target, allowed=target, next_step=f"unset {VARIABLE}")
        return found
    shipped = _BACKEND / "tuned" / f"{target}.json"
    return Database.load(shipped) if shipped.is_file() else None


# ---- choosing ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Timed:
    """A candidate at a number of rows."""

    schedule: Schedule
    tile: Tile
    rows: int
    skew: bool
    us: float


def choose(base: Schedule, timed: list[Timed]) -> tuple[Schedule, dict[str, float]]:
    """The best schedule, and its microseconds by rows. Parts hold for all rows, and are chosen where they were varied,
    with the rows up to which they are summed apart; each tile is then the best one for its rows, by the mean of its
    times over the best ones."""
    cases = {(t.rows, t.skew): min(x.us for x in timed if (x.rows, x.skew) == (t.rows, t.skew)) for t in timed}

    def score(found: list[Timed]) -> float:
        return math.fsum(math.log(t.us / cases[t.rows, t.skew]) for t in found) / max(1, len(found))

    def best(parts: int, apart: int, rows: int) -> tuple[float, Tile, list[Timed]]:
        here = [t for t in timed if t.tile.rows == rows]
        here = [t for t in here if t.schedule.parts == parts] or here
        mine = [t for t in here if (rows <= t.schedule.apart) == (rows <= apart)] or here
        options = [(score(own := [t for t in mine if t.tile == tile]), n, tile, own)
                   for n, tile in enumerate(dict.fromkeys(t.tile for t in mine))]
        s, _, tile, own = min(options, key=lambda o: o[:2])
        return s, tile, own

    classes = [t.rows for t in base.tiles if any(x.tile.rows == t.rows for x in timed)]
    options = sorted({(t.schedule.parts, t.schedule.apart) for t in timed})
    parts, apart = min(options, key=lambda o: math.fsum(best(o[0], o[1], r)[0] for r in classes if r))
    made, us = replace(base, parts=parts, apart=apart), dict[str, float]()
    for r in classes:
        _, tile, own = best(parts, apart, r)
        made = made.with_tile(tile)
        us |= {f"{t.rows}{' skewed' if t.skew else ''}": t.us for t in own}
    return made, us


def database_of(times: Mapping[str, Any], choices: Mapping[str, Any], specs: Mapping[str, KernelSpec],
                triton: str) -> Database:
    """From what ``measure`` made of the candidates of ``prepare``."""
    entries = {}
    for symbol, kernel in choices["kernels"].items():
        timed = []
        for case in times["times"]:
            if case["symbol"] == symbol:
                for n, us in zip(case["which"], case["us"], strict=True):
                    s = Schedule.of(kernel["choices"][n]["schedule"])
                    tile = Tile(**kernel["choices"][n]["tile"])
                    timed.append(Timed(s, tile, case["rows"], case["skew"], us))
        if timed:
            schedule, us_by_rows = choose(default_schedule(specs[symbol]), timed)
            entries[shapes(specs[symbol])] = {"schedule": schedule.as_json(), "us": us_by_rows}
    return Database(times["device"], choices["target"], triton,
                    {f: skeleton(f) for f in TUNED}, entries)
