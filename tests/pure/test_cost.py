"""Costs of launches against counts made by hand, and what the report does with them."""

from __future__ import annotations

import json
import re

import pytest

from deepinfer.backends.base import Roof
from deepinfer.codegen.plan.cost import LaunchCost, StepShape
from deepinfer.codegen.report.charts import Point, duration, links, roofline, size


def test_rows_of_an_axis_follow_from_the_step() -> None:
    shape = StepShape(sequences=3, rows=8, context=100, kept=5, wanted=2)
    assert [shape.on(a) for a in ("T", "T_kept", "T_wanted", "S", "T/4")] == [24, 15, 6, 3, 6]
    assert shape.seen(2) == pytest.approx((100 + 4.5) / 2)


def test_dense_weights_count_once_and_rows_each() -> None:
    cost = LaunchCost("T", weights=1000, row_bytes=10, row_macs=7)
    assert cost.bytes(StepShape(2, 3, 0, 3)) == 1000 + 6 * 10
    assert cost.macs(StepShape(2, 3, 0, 3)) == 6 * 7
    assert cost.bytes(StepShape(2, 0, 0, 0)) == 0


def test_experts_count_as_many_as_rows_are_expected_to_pick() -> None:
    cost = LaunchCost("T", experts=(8, 100, 2))
    assert cost.bytes(StepShape(1, 1, 0, 1)) == pytest.approx(200)
    assert cost.bytes(StepShape(2, 1, 0, 1)) == pytest.approx(100 * 8 * (1 - 0.75**2))
    assert cost.bytes(StepShape(1, 10_000, 0, 1)) == pytest.approx(800)


def test_a_window_is_read_as_far_as_it_reaches_and_entries_as_far_as_there_are() -> None:
    window = LaunchCost("T", windows=((128, 10),), key_macs=3)
    assert window.bytes(StepShape(1, 1, 1000, 1)) == 129 * 10
    assert window.bytes(StepShape(1, 1, 7, 1)) == 8 * 10
    assert window.macs(StepShape(1, 1, 1000, 1)) == 128 * 3
    picks = LaunchCost("T", picks=((64, 2, 5),))
    assert picks.bytes(StepShape(4, 1, 10_000, 1)) == 4 * 64 * 5
    assert picks.bytes(StepShape(4, 1, 19, 1)) == 4 * 10 * 5
    scan = LaunchCost("T", scans=((4, 6, 2, 0),))
    assert scan.bytes(StepShape(2, 1, 399, 1)) == 2 * 100 * 6
    assert scan.macs(StepShape(2, 1, 399, 1)) == 2 * 100 * 2
    few = LaunchCost("T", scans=((4, 6, 2, 10),))
    assert few.bytes(StepShape(2, 1, 399, 1)) == 2 * 10 * 6


def test_costs_survive_the_file() -> None:
    cost = LaunchCost("T", 3, (8, 100, 2), 5, 7, ((128, 10),), ((4, 6, 2, 0),), ((64, 2, 5),), 9)
    assert LaunchCost.from_dict(json.loads(json.dumps(cost.as_dict()))) == cost


def test_a_link_never_shares_a_lane_with_one_that_it_overlaps() -> None:
    text = links(6, [(0, 3), (1, 2), (2, 5), (3, 4)], {0})
    spans = [(int(a), int(b), x) for x, a, b in re.findall(r'H([\d]+)Q.*?data-a="(\d+)" data-b="(\d+)"', text)]
    assert len(spans) == 4
    for a, b, x in spans:
        assert not [s for s in spans if s != (a, b, x) and s[2] == x and a < s[1] and s[0] < b]


def test_points_lie_on_the_roof_until_they_are_measured() -> None:
    roof = Roof("a machine", 100.0, 1000.0, "made up")
    low = roofline(roof, [Point("k", "gemm", 1.0, None, 1.0)])
    half = roofline(roof, [Point("k", "gemm", 1.0, 50.0, 1.0)])
    assert "50% of the roof" in half and "of the roof" not in low
    assert low != half


def test_figures_are_short() -> None:
    assert [size(x) for x in (5, 1536, 13.19e9)] == ["5 B", "1.54 kB", "13.2 GB"]
    assert [duration(x) for x in (None, 0.0, 3e-7, 0.00125)] == ["-", "0", "300 ns", "1.25 ms"]
