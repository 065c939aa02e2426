"""Contractions of a real config on one H200, each beside its floor and the best public kernel on the same shapes.

    python tests/bench/bench_h200.py prepare CUBINS.zip    # without a GPU: compiles the schedules of the database
    python tests/bench/bench_h200.py run CUBINS.zip OUT.json    # on the device: numpy and the driver alone, a minute
    python tests/bench/bench_h200.py show OUT.json    # likewise `table`, for docs/performance.md

Times are microseconds a launch: median of graph replays over copies of the weights, the cache filled with other bytes
before each. The floor is bytes at 4.29 TB/s or multiply-adds at 795 TFLOP/s of bf16, whichever is larger, with each
input and output once. Bars: the best public kernel that runs in the checkpoint's exact formats; for dense FP8 the best
one at all, whose weights are quantised anew (h200_bars.json says which).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CONFIG = ROOT / "tests" / "golden" / "configs" / "DeepSeek-V4.1-Flash"
ROWS = (1, 8, 64, 256, 1024, 4096)
_RATE, _BF16 = 4.29e12, 795e12


def prepare(out: Path) -> None:
    """Compiles every contraction that has a bar, at the schedules that an engine takes."""
    from deepinfer.backends.cuda_sm100.schedule import default_schedule
    from deepinfer.backends.cuda_sm100.target import ARCHS
    from deepinfer.backends.cuda_sm100.toolchain import Toolchain
    from deepinfer.backends.cuda_sm100.tune.database import database_for, installed_triton, shapes
    from deepinfer.backends.cuda_sm100.tune.prepare import Bundle, emit
    from deepinfer.cli.tune import contractions

    bundle, database = Bundle("sm90"), database_for("sm90")
    specs = [s for s in contractions(str(CONFIG), "sm90", "").values() if shapes(s) in bars()]
    with Toolchain(ARCHS["sm90"], 2) as tools:
        for spec in specs:
            schedule = (database.schedule(spec, installed_triton()) if database else None) or default_schedule(spec)
            source = emit(spec, schedule)
            taken: dict[int, list[tuple[int, bool]]] = {}
            for n in ROWS:
                v = next(i for i, x in enumerate(source.variants) if not x.rows or n <= x.rows)
                taken.setdefault(v, []).extend((n, skew) for skew in (False, True) if f"{n}" + " skewed" * skew
                                               in bars()[shapes(spec)]["us"])
            for v, cases in taken.items():
                tile = schedule.tiles[v + len(schedule.tiles) - len(source.variants)]
                stages, entries = tools.variant(source, source.variants[v])
                made = list(zip(stages, entries, strict=True))
                bundle.add(spec, schedule, tile, source, made, cases)
            bundle.kernels[spec.symbol]["shapes"] = shapes(spec)
            print(spec.symbol, flush=True)
    print(bundle.write(out), "choices")


def bars() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((HERE / "h200_bars.json").read_text(encoding="utf-8"))
    return found["bars"]


def run(bundle: Path, out: Path) -> None:
    import zipfile

    sys.path.insert(0, str(ROOT / "backends" / "cuda_sm100" / "tune"))
    import measure

    result = measure.measure(bundle, lambda text: print(text, file=sys.stderr, flush=True))
    with zipfile.ZipFile(bundle) as z:
        kernels = json.loads(z.read("choices.json"))["kernels"]
    for t in result["times"]:
        kernel = kernels[t["symbol"]]
        t["shapes"], t["flops"] = kernel["shapes"], measure.flops(kernel, t["rows"])
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    show(out)


def show(file: Path) -> None:
    """A table: rows that are below their bar are marked."""
    result = json.loads(file.read_text(encoding="utf-8"))
    below = count = 0
    print(f"{result['device']}, driver {result['driver']}")
    for t in result["times"]:
        us, bar = min(t["us"]), bars()[t["shapes"]]["us"].get(f"{t['rows']}{' skewed' if t['skew'] else ''}")
        floor = max(t["floor_bytes"] / _RATE, t["flops"] / _BF16) * 1e6
        count, below = count + (bar is not None), below + (bar is not None and us < bar)
        name, skewed = bars()[t["shapes"]]["name"], " skewed" if t["skew"] else ""
        print(f"{name:24} {t['rows']:5}{skewed:7} {us:9.1f} us  floor {floor:8.1f} ({floor / us:4.0%})"
              f"  bar {bar or 0:8.1f} {'below' if bar and us < bar else ''}")
    print(f"{below} of {count} below their bar")


def table(file: Path) -> None:
    """The same as Markdown: time, share of the floor, bar; bold below it."""
    result = json.loads(file.read_text(encoding="utf-8"))
    print("| contraction, M = |", " | ".join(map(str, ROWS)), "|\n|" + "---|" * (len(ROWS) + 1))
    for name, skew in dict.fromkeys((t["shapes"], t["skew"]) for t in result["times"]):
        cells = []
        for n in ROWS:
            t = next((x for x in result["times"] if (x["shapes"], x["skew"], x["rows"]) == (name, skew, n)), None)
            if t is None:
                cells.append("")
                continue
            us, bar = min(t["us"]), bars()[name]["us"].get(f"{n}{' skewed' if skew else ''}")
            floor = max(t["floor_bytes"] / _RATE, t["flops"] / _BF16) * 1e6
            shown = f"{us:.0f}" if us >= 100 else f"{us:.1f}"
            cells.append(f"{f'**{shown}**' if bar and us < bar else shown} ({floor / us:.0%}; {bar:g})")
        print(f"| {bars()[name]['name']}{', skewed' if skew else ''} |", " | ".join(cells), "|")


if __name__ == "__main__":
    {"prepare": prepare, "run": run, "show": show, "table": table}[sys.argv[1]](*map(Path, sys.argv[2:]))
