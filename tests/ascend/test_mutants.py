"""Mistakes in generated kernels are seen: a fixed sample here, all of them in mutate.py."""

from __future__ import annotations

import json

import pytest
from ascend.mutants import mutants
from ascend.mutate import RESULT, sample, subjects, survivors

TEXT = """#include "di_kernel.h"
extern "C" __global__ __vector__ void k(__gm__ float* a) {
    asc_lock(PIPE_MTE2, 0);
    di_in(DI_UB(float, 0), a, n * 4);
    asc_unlock(PIPE_MTE2, 0);
    asc_vf_call<f>(DI_UB(float, 0), DI_UB(float, 256), n);
    asc_sync_pipe(PIPE_ALL);
}
"""


def test_every_kind_of_mistake_is_made() -> None:
    made = [str(m) for m in mutants(TEXT)]
    assert made == ["unlock line 3: PIPE_MTE2, 0", "shift line 4: DI_UB(float, 0)", "shrink line 4: di_in: n * 4",
                    "shift line 6: DI_UB(float, 0)", "shift line 6: DI_UB(float, 256)",
                    "swap line 6: DI_UB(float, 0) and DI_UB(float, 256)", "drop line 7: asc_sync_pipe(PIPE_ALL)"]
    assert all(m.text != TEXT and len(m.text.split("\n")) == len(TEXT.split("\n")) for m in mutants(TEXT))


FAMILIES = ("rowwise", "gemm", "grouped_gemm", "attend", "score_select")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sample_of_mistakes_is_seen(family: str) -> None:
    (subject,) = subjects([family])
    left, kinds, _ = survivors(subject, sample(subject, 4))
    assert sum(kinds.values()) == 4
    assert not [str(m) for m in left]


def test_the_committed_result_counts_what_it_lists() -> None:
    result = json.loads(RESULT.read_text())
    left = {k["kernel"]: len(k["survivors"]) for k in result["kernels"]}
    assert {name.split(":")[0] for name in left} >= set(FAMILIES)
    assert result["caught"] == result["mutants"] - sum(left.values())
    assert not any(left.values())
