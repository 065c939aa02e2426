"""One engine for every machine of its kind: whichever instruction set a processor lets it use, it gives one model's
results, and it says so when a processor lets it use none."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from compiled import checkpoint_of, engine_of
from golden.cases import load_case, row_errors, same_argmax
from golden.engines import LIMITS, fed
from golden.gates import V4_GATE

from deepinfer import LLM
from deepinfer.backends.base import ALL, HOST
from deepinfer.codegen.package.manifest import NAME
from deepinfer.errors import ArtifactError

VARIABLE = "DEEPINFER_CPU_ISA"
CASES = ("v4_mtp", "v41_c_quant")


def engine(name: str, isa: str) -> Path:
    return engine_of(name, isa, profile="wide", **LIMITS)


def built(folder: Path) -> list[str]:
    return list(json.loads((folder / NAME).read_text())["instruction_sets"])


def started(name: str, built_for: str, isa: str, copy: Path) -> LLM:
    """An engine under one instruction set. A library picks it when it is loaded, so each needs a file of its own."""
    os.environ[VARIABLE] = isa
    return LLM(shutil.copytree(engine(name, built_for), copy), checkpoint_of(name), threads=1, progress=False)


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(VARIABLE, "")  # put back afterwards
    yield


@pytest.mark.parametrize("name", CASES)
def test_every_instruction_set_gives_the_golden_logits(name: str, tmp_path: Path) -> None:
    case = load_case(name)
    found: dict[str, torch.Tensor] = {}
    for isa in built(engine(name, ALL)):
        try:
            with started(name, ALL, isa, tmp_path / isa) as llm:
                found[isa] = torch.from_numpy(fed(llm, case.ids))
        except ArtifactError as error:
            assert VARIABLE in str(error)
    assert {"portable", built(engine(name, HOST))[-1]} <= set(found)
    rows = case.golden.get("logits.rows", torch.arange(len(case.ids))).long()
    for isa, logits in found.items():
        errors = row_errors(logits[rows], case.golden["logits"])
        # Behind a stored value that falls the other way rows are a step apart; at least half of them stand before it.
        quantised = "spec" in case.formats.values()
        assert float(errors.median() if quantised else errors.max()) < V4_GATE, isa
        assert same_argmax(logits[rows], case.golden["logits"]) >= (0.99 if quantised else 1.0), isa
    if len(found) > 1:
        assert any(not torch.equal(found["portable"], other) for other in found.values())  # it was another code


def test_an_engine_of_one_instruction_set_is_refused_where_it_cannot_run(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError) as caught:
        started("v4_mtp", HOST, "of_another_machine", tmp_path / "engine")
    assert "runs none of the instruction sets of the engine" in str(caught.value)
    assert all(isa in str(caught.value) for isa in built(engine("v4_mtp", HOST))[-1:])


def test_one_instruction_set_gives_the_bits_that_all_of_them_give_here(tmp_path: Path) -> None:
    ids = load_case("v4_mtp").ids
    with (started("v4_mtp", ALL, "", tmp_path / "all") as every,
          started("v4_mtp", HOST, "", tmp_path / "host") as one):
        assert (fed(every, ids) == fed(one, ids)).all()
