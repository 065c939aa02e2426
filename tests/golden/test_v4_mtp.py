"""The MTP draft of a V4 preview checkpoint: one drafted token after any number of rows, however they were fed.

``v4_mtp`` holds a random three-layer model (HCA, CSA, window only; the MTP block after them), a prompt, and what an
independent reference computes for it in float64: ``mtp.logits`` row t comes from the streams at position t and the
token at position t + 1.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from golden.cases import load_case
from torch import Tensor

from deepinfer.dsl.interpreter import ReferenceSession

# An f32 run of the reference lies 8e-6 from its f64 run; logits reach 14.
TOLERANCE = 2e-4
WINDOW = 20
# Around the first rows, the window's edge, and the ends of CSA and HCA groups.
PLACES = (0, 1, 2, 3, 4, 17, 18, 19, 20, 21, 22, 39, 40, 41, 126, 127, 128, 129, 148, 149)
NewSession = Callable[[], ReferenceSession]


@pytest.fixture(scope="module")
def golden() -> dict[str, Tensor]:
    return load_case("v4_mtp").golden


@pytest.fixture(scope="module")
def new_session() -> NewSession:
    return load_case("v4_mtp").session


@pytest.fixture(scope="module")
def ids(golden: dict[str, Tensor]) -> list[int]:
    return [*golden["input_ids"].tolist(), int(golden["mtp.next_ids"][-1])]


def distance(s: ReferenceSession, anchor: int, golden: dict[str, Tensor]) -> float:
    """Of the draft that follows the rows fed so far, from the golden logits."""
    drafted = s.draft(anchor).outputs
    expected = golden["mtp.logits"][len(s.ids) - 1]
    assert int(drafted["tokens"]) == int(drafted["draft_logits"].argmax())
    return float((drafted["draft_logits"][0, 0] - expected).abs().max())


@pytest.mark.parametrize("chunk", [None, 1, 7, (50, 1, 64, 3)])
def test_the_backbone_of_a_model_with_an_mtp_block_is_right(
        new_session: NewSession, golden: dict[str, Tensor], chunk: int | tuple[int, ...] | None) -> None:
    logits = new_session().feed(golden["input_ids"].tolist(), chunk=chunk)
    assert (logits - golden["logits"]).abs().max() < TOLERANCE


def test_a_draft_after_every_row_predicts_what_the_reference_does(
        new_session: NewSession, golden: dict[str, Tensor], ids: list[int]) -> None:
    s = new_session()
    for t in range(2 * WINDOW + 2):
        s.feed(ids[t: t + 1])
        assert distance(s, ids[t + 1], golden) < TOLERANCE, f"draft after row {t}"


@pytest.mark.parametrize("t", PLACES)
def test_a_draft_after_a_prompt_in_one_piece_is_the_same(
        new_session: NewSession, golden: dict[str, Tensor], ids: list[int], t: int) -> None:
    s = new_session()
    s.feed(ids[: t + 1])
    assert distance(s, ids[t + 1], golden) < TOLERANCE


@pytest.mark.parametrize("t", [1, 2, 19, 20, 41, 128])
def test_a_rejected_draft_leaves_no_trace(
        new_session: NewSession, golden: dict[str, Tensor], ids: list[int], t: int) -> None:
    s = new_session()
    s.feed(ids[:t])
    s.feed([ids[t], (ids[t + 1] + 1) % 128])  # verified together; the second one was wrong
    s.rewind(t + 1)
    assert distance(s, ids[t + 1], golden) < TOLERANCE


def test_a_draft_writes_nothing(new_session: NewSession, golden: dict[str, Tensor], ids: list[int]) -> None:
    s = new_session()
    s.feed(ids[:30])
    s.draft(3)
    s.draft(5)
    assert distance(s, ids[30], golden) < TOLERANCE
