"""What `info` and the manifest say an engine takes is what its runner allocates."""

from __future__ import annotations

import pytest
from compiled import checkpoint_of, engine_of
from golden.cases import load_case
from golden.engines import LIMITS

from deepinfer.codegen.describe import describe
from deepinfer.codegen.package import load_engine

ENGINES = [("v41_a_f32", "wide"), ("v41_c_quant", "bf16"), ("v4_mtp", "wide")]


@pytest.mark.parametrize(("name", "profile"), ENGINES)
@pytest.mark.parametrize(("sequences", "tokens", "threads"), [(1, 1, 1), (3, 300, 2), (8, 768, 5)])
def test_the_planned_bytes_are_those_that_the_runner_takes(name: str, profile: str, sequences: int, tokens: int,
                                                           threads: int) -> None:
    package = load_engine(engine_of(name, profile=profile, **LIMITS))
    planned = package.footprint.memory(sequences, tokens, threads)
    taken = package.memory(sequences, planned.block_count, threads)
    assert (planned.arena, planned.scratch, planned.slots, planned.blocks, planned.drawing) == (
        taken.arena, taken.scratch, taken.rings, taken.pages, taken.drawing)
    assert planned.total == taken.total + planned.weights


@pytest.mark.parametrize(("name", "profile"), ENGINES[:1])
def test_info_says_the_same_of_a_checkpoint_before_and_after_compiling(name: str, profile: str) -> None:
    options = load_case(name).formats | LIMITS | {"profile": profile}
    before = describe(str(checkpoint_of(name)), target="cpu", options=options)
    after = describe(str(engine_of(name, profile=profile, **LIMITS)))
    assert before.memory == after.memory
    assert before.footprint == after.footprint
    taken = load_engine(engine_of(name, profile=profile, **LIMITS)).memory(
        LIMITS["max_num_seqs"], after.memory.block_count, after.threads)
    assert after.memory.total - after.memory.weights == taken.total
