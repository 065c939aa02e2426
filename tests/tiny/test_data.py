"""The training text: dialogues in the official encoding, the baseline, the number formats, the figures."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from tools.train_tiny import formats, measure, ngram
from tools.train_tiny.chat import Call, Control, Dialogue, Turn, render
from tools.train_tiny.corpus import Document, clean, page_text, split
from tools.train_tiny.dialogues import make_dialogue
from tools.train_tiny.entries import entries
from tools.train_tiny.measure import Drafts

VECTORS = Path(__file__).parents[1] / "golden" / "recipe" / "vectors_dev.json.gz"
REFERENCE = """
.. module:: pack

.. function:: fold(text, width=70, \\
                   tail='')

   Fold the *text* so that no line is longer than :data:`WIDTH`.  Returns a list.

.. class:: Box(side)

   A box whose sides are all equal in length.

   .. method:: grow(by)

      Make every side of the box longer by that much.
"""


def reference() -> list[Document]:
    return [Document("CPython", "python3.11-doc/_sources/library/pack.rst.txt", REFERENCE)]


def test_a_dialogue_with_tools_and_thinking_is_rendered_as_the_official_encoder_does() -> None:
    with gzip.open(VECTORS, "rt", encoding="utf-8") as file:
        vectors = {vector["id"]: vector for vector in json.load(file)["encode"]}
    vector = vectors["chat/reasoning/agent-loop"]
    tool = vector["request"]["tools"][0]["function"]
    turns = (
        Turn("system", "s"),
        Turn("user", "q"),
        Turn("assistant", "", "R1", (Call("calc", {"expr": "1+1"}),)),
        Turn("tool", "2"),
        Turn("assistant", "It is 2.", "R2"),
        Turn("user", "and 3?"),
        Turn("assistant", "", "R3", (Call("calc", {"expr": "1+2"}),)),
        Turn("tool", "3"),
        Turn("assistant", "It is 3.", "R4"),
    )
    pieces = render(Dialogue(turns, (tool,), thinking=True))
    text = "".join(piece if isinstance(piece, str) else piece.spelling for piece in pieces)
    expected = vector["expect"]["v41"]
    assert text == expected["prompt"] + "R4</think>It is 3.<｜end▁of▁sentence｜>"
    controls, at = [], 0
    for piece in pieces:
        size = len(piece if isinstance(piece, str) else piece.spelling)
        controls += [[at, at + size]] if isinstance(piece, Control) else []
        at += size
    assert controls[: len(expected["special_ranges"])] == expected["special_ranges"]


def test_entries_carry_qualified_names_and_plain_summaries() -> None:
    found = {entry.name: entry for entry in entries(reference())}
    assert set(found) == {"pack.fold", "pack.Box", "pack.Box.grow"}
    assert found["pack.fold"].signature == "pack.fold(text, width=70, tail='')"
    assert found["pack.fold"].summary == "Fold the text so that no line is longer than `WIDTH`."


def test_scripted_dialogues_repeat_with_their_seed_and_end_with_an_answer() -> None:
    facts = entries(reference())
    first = [make_dialogue(random.Random(i), facts) for i in range(40)]
    assert first == [make_dialogue(random.Random(i), facts) for i in range(40)]
    assert all(dialogue.turns[-1].role == "assistant" and not dialogue.turns[-1].calls for dialogue in first)
    assert any(turn.calls for dialogue in first for turn in dialogue.turns)


def test_a_table_of_digits_is_no_training_text() -> None:
    assert clean("12 34 56 78\n" * 100) is None
    assert clean("A sentence of ordinary words stands here.\r\n" * 20) is not None


def test_a_page_keeps_its_main_part_alone() -> None:
    body = '<div class="body"><p>One<a class="headerlink">¶</a></p><p>two</p></div>'
    page = f'<div class="nav">menu</div>{body}<p>foot</p>'
    assert page_text(page).split() == ["One", "two"]


def test_a_held_out_document_that_repeats_training_text_is_dropped() -> None:
    lines = [f"this is line number {i} of some text" for i in range(40)]
    documents = [Document("p", f"path{i}", "\n".join(lines)) for i in range(2000)]
    training, held_out = split(documents)
    assert len(training) < len(documents)
    assert held_out == []


def test_the_baseline_is_a_distribution_over_the_vocabulary() -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 6, size=3000)
    levels = ngram.train(tokens)
    for history in (tokens[40:44], np.array([5, 5, 5, 5])):
        each = [ngram.losses(levels, np.append(history, token), 6)[0] for token in range(6)]
        assert np.exp(-np.array(each)).sum() == pytest.approx(1.0, abs=1e-9)


@pytest.mark.parametrize(
    ("kind", "pack"),
    [
        ("fp8_blocks", formats.pack_fp8_blocks),
        ("fp8_groups", formats.pack_fp8_rows),
        ("fp4_groups", formats.pack_fp4_rows),
    ],
)
def test_what_is_packed_unpacks_to_the_value_that_training_used(kind: str, pack: object) -> None:
    assert callable(pack)
    w = torch.randn(64, 96, generator=torch.Generator().manual_seed(2)) * 3
    w[0, :32] = 0
    assert torch.equal(formats.unpack(*pack(w)), formats.rounded(w, kind))
    assert torch.equal(formats.rounded(formats.rounded(w, kind), kind), formats.rounded(w, kind))


def test_e2m1_ties_go_to_the_even_code() -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -5.0])
    assert formats.e2m1(ties).tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, -0.0, -4.0]


def test_the_area_under_the_curve_counts_ordered_pairs() -> None:
    nan = float("nan")
    hits = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, nan]])
    sure = torch.tensor([[2.0, 1.0], [0.5, 3.0], [1.0, 9.0]])
    # Accepted 2.0, 0.5, 3.0 against rejected 1.0, 1.0: four of six pairs are in order.
    assert measure.area_under_curve(Drafts([1, 2, 0], hits, sure)) == pytest.approx(4 / 6)


def test_calibration_finds_the_temperature_that_overconfidence_needs() -> None:
    generator = torch.Generator().manual_seed(0)
    truth = torch.randn(20000, 1, generator=generator)
    hits = (torch.rand(20000, 1, generator=generator) < truth.sigmoid()).float()
    drafts = Drafts([], hits, truth * 2.5)
    (temperature,) = measure.calibrate(drafts)
    assert 2.2 < temperature < 2.8
    assert measure.calibration_error(drafts, [temperature]) < 0.5 * measure.calibration_error(drafts, [1.0])
