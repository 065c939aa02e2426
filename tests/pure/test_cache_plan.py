"""Cache, memory and checkpoint sizes on the real configs: every figure follows from the declared states and tensors."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.codegen.passes.narrow import narrow_model
from deepinfer.codegen.plan.cache_plan import CachePlan, cache_plan
from deepinfer.codegen.plan.memory_plan import (
    CheckpointSizes,
    Footprint,
    StepMemory,
    checkpoint_sizes,
    footprint,
)
from deepinfer.dsl import Config, EngineOptions, GroupTail, Model, Paged, StoredTensor, Window
from deepinfer.dsl.model import trace
from deepinfer.errors import ArtifactError, PlanError
from deepinfer.model_specs.registry import build_model

CONFIGS = Path(__file__).parents[1] / "golden" / "configs"
FLASH, V4_FLASH = "DeepSeek-V4.1-Flash", "DeepSeek-V4-Flash"
WINDOW_RECORD = 512 + 512 // 32
GLOBAL_RECORD, KEY_RECORD = 256 + 512 // 16, 64 + 128 // 32


def described(name: str, options: EngineOptions) -> tuple[Model, CachePlan]:
    model = build_model(Config.load(CONFIGS / name), options)
    return model, cache_plan(model, narrow_model(model, trace(model).graphs["step"])[1])


@cache
def plan(name: str, **options: object) -> CachePlan:
    return described(name, EngineOptions(**options))[1]  # type: ignore[arg-type]


@cache
def sizes(name: str) -> CheckpointSizes:
    return checkpoint_sizes(described(name, EngineOptions())[0])


# ---- what the prefix cache stores ----------------------------------------------------------------------------
def test_bytes_per_token_are_exact_fractions() -> None:
    flash = plan(FLASH)
    assert flash.bytes_per_token == 3 * Fraction(GLOBAL_RECORD + KEY_RECORD, 2) + GLOBAL_RECORD + KEY_RECORD == 890
    assert plan(V4_FLASH).bytes_per_token == Fraction(21 * (584 + 68), 4) + Fraction(20 * 584, 128)
    assert float(plan(V4_FLASH).bytes_per_token) == 3514.25


def test_a_block_holds_the_entries_of_its_positions() -> None:
    flash = plan(FLASH)
    assert flash.clock.block == 128
    assert flash.block_bytes == 128 * 890 == 113_920
    assert {p.name: p.block_bytes for p in flash.paged if p.name.endswith(".2")} == {
        "kv.2": 64 * GLOBAL_RECORD, "key.2": 64 * KEY_RECORD}


def test_a_page_is_a_multiple_of_its_largest_record_and_of_a_line() -> None:
    page = plan(FLASH).page_bytes
    assert page == 114_048
    assert page % GLOBAL_RECORD == 0 and page % 128 == 0


def test_a_resume_point_holds_the_windows_that_new_rows_read() -> None:
    flash = plan(FLASH)
    assert flash.resume_bytes == 20 * 128 * WINDOW_RECORD == 1_351_680
    assert {r.name for r in flash.rings if r.resume_rows} == {f"win.{i}" for i in range(20)}


def test_an_overlapping_compressor_needs_the_group_before_a_resume_point() -> None:
    tails = {r.name: r for r in plan(V4_FLASH).rings if r.kind == "grouptail"}
    assert {t.resume_rows for n, t in tails.items() if t.rows > 100} == {0}  # groups of 128 end at a block's edge
    assert {t.resume_rows for n, t in tails.items() if t.rows < 100} == {4}


# ---- rings ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("host_lag", "rows"), [(0, 133), (1, 139)])
def test_rings_hold_the_window_and_the_verifies_in_flight(host_lag: int, rows: int) -> None:
    windows = [r for r in plan(FLASH, host_lag=host_lag).rings if r.kind == "window"]
    assert len(windows) == 43 and {(r.rows, r.ring_rows) for r in windows} == {(128, rows)}


def test_raw_rows_of_open_groups_survive_a_rejected_verify() -> None:
    tails = [r for r in plan(FLASH).rings if r.kind == "grouptail"]
    assert [r.name for r in tails] == ["tail.2", "tail.8", "tail.14"]
    assert {(r.rows, r.ring_rows, r.resume_rows) for r in tails} == {(1, 7, 0)}
    assert sum(r.ring_bytes for r in tails) == 3 * 7 * 2 * 512 * 4


def test_the_layout_of_134_rows_comes_out_for_a_slack_of_six() -> None:
    wide = plan(FLASH, ring_slack=6)
    assert {r.ring_rows for r in wide.rings if r.kind == "window"} == {134}
    assert wide.ring_bytes(resumed=True) == 1_415_040
    assert wide.ring_bytes(resumed=False) == 1_627_296
    assert wide.slot_bytes == 1_415_040 + 1_627_296 + 86_016
    assert wide.resume_bytes == plan(FLASH).resume_bytes


# ---- the request clock ---------------------------------------------------------------------------------------
def test_the_clock_takes_its_constants_from_model_and_options() -> None:
    clock = plan(FLASH, replay="140").clock
    assert (clock.block, clock.window, clock.draft, clock.host_lag, clock.lookback) == (128, 128, 5, 0, 3)
    assert (clock.keep, clock.least_keep, clock.exact_keep) == (140, 128, 2541)
    assert (clock.rerun, clock.exact_rerun) == (128, 2540)
    assert plan(V4_FLASH).clock.rerun is None


@given(st.integers(1, 5000))
def test_a_sequence_has_blocks_for_all_its_rows_and_one_verify(tokens: int) -> None:
    clock = plan(FLASH).clock
    last_row = tokens - 1 + clock.draft
    assert clock.blocks(tokens) == last_row // clock.block + 1


# ---- what does not fit ---------------------------------------------------------------------------------------
def changed(name: str, state: str, **fields: object) -> None:
    model = build_model(Config.load(CONFIGS / name), EngineOptions())
    found = narrow_model(model, trace(model).graphs["step"])[1]
    model.states.by_name[state] = replace(model.states[state], **fields)  # type: ignore[type-var]
    cache_plan(model, found)


@pytest.mark.parametrize(("state", "fields", "sentence"), [
    ("kv.2", {"tokens_per_entry": 3}, "state kv.2: .* inside an entry; found 3 tokens per entry in blocks of 128"),
    ("tail.2", {"group": 3}, "state tail.2: .* inside an entry"),
    ("win.7", {"slack": 4}, "state win.7: .*verifies in flight; found 4; allowed >= 5"),
    ("tail.8", {"slack": 5}, "state tail.8: .*rejected verify; found 5; allowed >= 6"),
])
def test_a_state_that_breaks_the_clock_does_not_compile(state: str, fields: dict[str, object], sentence: str) -> None:
    with pytest.raises(PlanError, match=sentence):
        changed(FLASH, state, **fields)


def test_the_states_of_the_cases_above_are_of_the_kinds_they_are_meant_to_be() -> None:
    states = described(FLASH, EngineOptions())[0].states
    kinds = {"kv.2": Paged, "tail.2": GroupTail, "win.7": Window, "tail.8": GroupTail}
    assert {name: type(states[name]) for name in kinds} == kinds


# ---- checkpoint and memory -----------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "tensors", "size"), [
    (FLASH, 96_085, 510_286_023_000),
    (V4_FLASH, 69_187, 159_609_485_896),
    ("DeepSeek-V4-Flash-DSpark", 72_317, 166_878_536_440),
    ("DeepSeek-V4-Pro", 145_116, 864_704_792_696),
])
def test_the_declared_tensors_are_the_released_checkpoint(name: str, tensors: int, size: int) -> None:
    assert (sizes(name).tensors, sizes(name).disk_bytes) == (tensors, size)


def test_lookup_tables_may_stay_off_the_device() -> None:
    flash = sizes(FLASH)
    assert flash.table_bytes == (384_006_168 + 384_016_682) * (256 + 8)
    assert round(flash.disk_bytes / 1e9, 1) == 510.3
    assert round((flash.disk_bytes - flash.table_bytes) / 1e9, 1) == 307.5
    assert flash.weight_bytes == flash.disk_bytes - flash.table_bytes - flash.ignored_bytes + 8 * 129_280


def test_ignored_tensors_are_counted_and_give_a_reason() -> None:
    ignored = {i.pattern: i for i in sizes(FLASH).ignored}
    assert ignored["vision.*"].tensors == 3 + 32 * 8 and ignored["vision.*"].bytes == 823_685_120
    assert ignored["*.ffn.gate.bias_vl"].bytes == 4 * (40 * 384 + 3 * 128)
    assert all(i.reason for i in ignored.values())


def test_ignored_tensors_of_a_checkpoint_at_hand_are_its_own() -> None:
    model, _ = described(FLASH, EngineOptions())
    headers = {"vision.norm.weight": StoredTensor("F32", (3,)), "mtp.1.embed.weight": StoredTensor("BF16", (2, 2))}
    found = {i.pattern: (i.tensors, i.bytes) for i in checkpoint_sizes(model, headers).ignored if i.tensors}
    assert found == {"vision.*": (1, 12), "mtp.?.embed.weight": (1, 8)}


@cache
def footprint_of(name: str) -> Footprint:
    model, cache_ = described(name, EngineOptions())
    return replace(footprint(model, cache_), step=StepMemory(arena=1000, scratch=24))


def test_a_footprint_survives_the_manifest() -> None:
    found = footprint_of(FLASH)
    assert Footprint.from_dict(json.loads(json.dumps(found.as_dict()))) == found
    assert Footprint.from_dict(replace(found, step=None).as_dict()).step is None


@pytest.mark.parametrize("damage", [
    {"sizes": {}}, {"cache": {"clock": {}, "paged": [], "rings": []}}, {"step": {"a": 1}}])
def test_a_damaged_footprint_is_refused(damage: dict[str, object]) -> None:
    with pytest.raises(ArtifactError, match=r"^engines/x: .* damaged; .*compile the engine again"):
        Footprint.from_dict(footprint_of(FLASH).as_dict() | damage, "engines/x")


def test_config_keys_that_are_not_read_give_a_reason() -> None:
    assert footprint_of(FLASH).ignored_keys["vision_config"] == "the vision part is not built yet"


def test_memory_is_the_sum_of_what_the_runner_lays_out() -> None:
    """Rings and blocks of each state start on cache lines: 133 x 528 B take 1,098 of them."""
    m = footprint_of(FLASH).memory(8, 4096, threads=3)
    flash, tail = sizes(FLASH), -(-7 * 4096 // 64) * 64
    assert m.slots == 8 * (43 * 1098 * 64 + 3 * tail)
    assert m.block_count == 8 * 33 and m.blocks == m.block_count * 113_920
    assert (m.arena, m.scratch) == (1024, 3 * 64)
    assert m.total == flash.weight_bytes + m.slots + m.blocks + 1024 + 192
    assert m.tables == flash.table_bytes


@given(st.integers(1, 64), st.integers(1, 100_000))
def test_memory_grows_with_sequences_and_with_tokens(sequences: int, tokens: int) -> None:
    found = footprint_of(FLASH)
    here = found.memory(sequences, tokens)
    assert found.memory(sequences + 1, tokens).total > here.total
    assert found.memory(sequences, tokens + found.cache.clock.block).total > here.total


@pytest.mark.parametrize(("sequences", "tokens"), [(0, 1), (1, 0)])
def test_memory_of_nothing_is_refused(sequences: int, tokens: int) -> None:
    with pytest.raises(PlanError, match="at least one sequence of one token"):
        footprint_of(FLASH).memory(sequences, tokens)
