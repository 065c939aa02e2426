"""The work that reports predict times with: what is read from a kernel's text is what the twin counts while it runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from ascend import on_twin
from ascend.test_kernels_regions import SCENES, fused_for_ascend, kernels
from cpu.harness import Array, Param, State, Step
from cuda.arguments import arguments

from deepinfer.backends.ascend950 import cost
from deepinfer.backends.ascend950.backend import FAMILIES
from deepinfer.backends.ascend950.reading import Kernel
from deepinfer.backends.ascend950.source import VECTOR, AscendSource
from deepinfer.backends.ascend950.target import CAPABILITIES
from deepinfer.backends.ascend950.twin.run import Twin
from deepinfer.backends.grid import Grid
from deepinfer.backends.work import Work
from deepinfer.codegen.kernels.spec import KernelSpec

__all__ = ["fused_for_ascend"]  # a fixture that every test here takes


def keys_met(spec: KernelSpec, made: Any, places: dict[Any, int], row: int) -> dict[str, int]:
    """How many keys of each source the row meets, and how it is drawn, by the names that the text has for them."""
    if spec.family == "draw":
        return {"items": 1, "mode": on_twin.LARGEST[0]}
    if spec.family not in ("attend", "score_select"):
        return {}
    pos = int(made.values[places["axis", "pos"]][row])
    if spec.family == "score_select":
        return {"items": 1, "visible": (pos + 1) // spec.get("ratio")}
    found = {}
    for n, (kind, width, keys, _, picked) in enumerate(spec.get("sources")):
        if kind == "window":
            found[f"count{n}"] = min(width, pos + 1 - int(made.values[places["state", keys, "valid"]][0]))
        elif kind == "selected":
            found[f"count{n}"] = spec.operands[picked].size if pos + 1 >= width else 0
        else:
            raise AssertionError(f"nobody counts the keys of a source {kind}")
    return found


def ran(source: AscendSource, twin: Twin, values: list[tuple[str, Any]], row: int) -> list[Counter[str]]:
    """What the cube cores and the vector cores did for one row, in one block, in the stage that does the work."""
    where = {p.where: i for i, p in enumerate(source.parameters)}
    for name, number in (("row_first", row), ("row_stop", row + 1)):
        values[where["launch", name]] = ("i32", number)
    for stage in source.stages:
        assert not (wrong := twin.complaints(stage.function, 1, values)), wrong
    return [Counter(did) for did in twin.did()]


def does(text: Kernel, core: int, known: dict[str, int], spec: KernelSpec, grid: Grid) -> Counter[str]:
    """What is read of a core for one row. The experts that a row picks are tiles of one input each."""
    if spec.family != "grouped_gemm":
        return text.did(core, known)
    one = {**known, "expert": 0, "t0": 0, "valid": 1}
    start, tile = (text.did(core, {**one, "items": n}) for n in (0, grid.times))
    return start + Counter({name: (n - start[name]) * grid.of for name, n in tile.items()})


def test_what_is_read_of_a_kernel_is_what_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kernel of a model, on one row: instructions, calls, copies, bytes of each path and products, exactly."""
    seen: dict[str, int] = {}

    def compare(spec: KernelSpec, step: Step, operands: Sequence[Array | Param | State | None], *, isa: str = "",
                rows: str = "") -> dict[int, Array]:
        source, twin = on_twin._MADE[spec.digest()]
        made = arguments(spec, source, step, operands, rows, np.array(on_twin.LARGEST * max(step.axis_rows)))
        row, places = made.rows - 1, {p.where: i for i, p in enumerate(source.parameters)}
        assert source.question is not None and source.work is not None
        known = {"row_first": row, "rows": row + 1, "stop": row + 1, **dict(source.question.known),
                 **keys_met(spec, made, places, row)}
        values = [(p.type, v) for p, v in zip(source.parameters, made.values, strict=True)]
        did = ran(source, twin, values, row)
        stage, text = source.stages[-1], Kernel(source.text, source.stages[-1].function)
        cores = [[0]] if stage.kind == VECTOR else [[cost.CUBE], [*cost.VECTORS]]
        for who, numbers in zip(did[-len(cores):], cores, strict=True):
            read = sum((does(text, core, known, spec, stage.grid) for core in numbers), Counter[str]())
            assert +read == +who, (spec.symbol, numbers, +read, +who)
        seen[spec.family] = seen.get(spec.family, 0) + 1
        return on_twin.run(spec, step, operands, rows=rows)

    for scene, families in ((SCENES[0], FAMILIES), (SCENES[1], ("draw",))):
        runner, found = kernels(scene)
        asked = [k for k in found if k.spec.family in families]
        on_twin.prepare([k.spec for k in asked])
        runner.launch = compare
        for k in asked:
            runner.check(k)
    assert set(seen) == set(FAMILIES), seen


def test_a_launch_takes_its_busiest_pipe_or_all_of_them() -> None:
    roof = CAPABILITIES.roofs[0]
    units = dict(roof.units)[VECTOR]
    pipes = (("S", 100.0), ("V", 300.0), ("MTE2", 50.0))
    beside, behind = (Work(VECTOR, (1, 1, 0, 1, 0), pipes, overlapped=o, start=(("V", 10.0),)) for o in (True, False))
    assert beside.cycles(roof, units, 0, 0.0) == {"S": 100.0, "V": 310.0, "MTE2": 50.0, "HBM": 0.0}
    assert beside.cycles(roof, units + 1, 0, 0.0)["V"] == 610.0  # one of the units has a second item
    assert beside.seconds(roof, units, 0, 0.0) == pytest.approx(roof.launch + 310 / roof.clock)
    assert behind.seconds(roof, units, 0, 0.0) == pytest.approx(roof.launch + 460 / roof.clock)
    slow = roof.read * 1e-3
    assert beside.seconds(roof, units, 0, slow) == pytest.approx(roof.launch + 1e-3)
    assert beside.seconds(roof, 0, 0, slow) == 0.0


def test_cores_of_a_block_work_beside_each_other_and_share_the_way_to_memory() -> None:
    cube = {"copies": 3, "bytes_in": 1000, "bytes_to_l0": 2560, "products": 7, "bytes_of_results": 1280}
    vector = {"copies": 5, "bytes_in": 500, "bytes_out": 200, "bytes_to_l1": 256, "instructions": 30, "functions": 2}
    assert cost.of_unit([cube, vector, vector], 1.0) == {
        "S": 5 * cost.COPY, "V": 30 + 2 * cost.CALL, "M": 7.0, "MTE1": 10.0, "MTE2": 10.0, "MTE3": 4.0, "FIX": 10.0,
        "L2": 24.0}


TEXT = """
template <class T> __simd_vf__ inline void di_own(__ubuf__ T* x, uint32_t n, uint32_t rows) {
    for (uint16_t r = 0; r < rows; ++r) {
        uint32_t left = n;
        for (uint16_t c = 0; c < (n + 63) / 64; ++c) {
            vector_bool m = asc_update_mask_b32(left);
            vector_float v;
            di_load(v, x + c * 64);
            if (c < 2) asc_abs(v, v, m);
            else asc_neg(v, v, m);
        }
    }
}
extern "C" __global__ __vector__ void di_text(__gm__ float* in, int32_t row_stop) {
    const int64_t rows = di_min64(di_gm_load(in), row_stop), most = rows > 5 ? 6 : rows;
    for (int64_t row = asc_get_block_idx(); row < rows; row += asc_get_block_num()) {
        if (row == 0) {
            di_in(DI_UB(uint8_t, 0), in, 100);
            continue;
        }
        asc_vf_call<di_own<KIND>>(DI_UB(KIND, 0), (uint32_t)most * 64, 3);
        if (di_gm_load(in + row) > 7) {
            di_out(in + row, DI_UB(uint8_t, 0), (uint32_t)di_min64(64, rows * 4));
        }
    }
}
"""


@pytest.mark.parametrize(("kind", "load"), [("float", 1), ("uint16_t", 2)])
def test_loops_branches_and_overloads_are_followed(kind: str, load: int) -> None:
    read = Kernel(TEXT.replace("KIND", kind), "di_text").did(0, {"rows": 4})
    assert read == {"copies": 4, "bytes_in": 100, "functions": 3, "instructions": 3 * 3 * 4 * (load + 1),
                    "bytes_out": 3 * 16}
    many = Kernel(TEXT.replace("KIND", kind), "di_text").did(0, {"rows": 100})  # first, second and last stand for all
    assert many["functions"] == 99 and many["bytes_out"] == 99 * 64


def test_a_question_divides_the_work_into_items_rows_and_keys() -> None:
    work = cost.Question("di_text", VECTOR, Grid()).work(TEXT.replace("KIND", "float"))
    assert dict(work.item)["MTE2"] == 1.0 and dict(work.item)["L2"] == 2.0 and not work.key and not work.row
