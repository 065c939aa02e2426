"""Layer lists other than the released ones: every legal V4.1 topology goes through all passes."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from pure.test_fusion import PlanOnly

from deepinfer.codegen.lower import lower
from deepinfer.dsl import Config, EngineOptions
from deepinfer.errors import SpecError
from deepinfer.model_specs.registry import build_model

CASE = Path(__file__).parents[1] / "golden" / "cases" / "v41_a_f32" / "config.json"


def config(**keys: Any) -> dict[str, Any]:
    """The config of a golden case, without Engram, with other text keys."""
    raw: dict[str, Any] = json.loads(CASE.read_text())
    raw.pop("oracle", None)
    text = {k: v for k, v in raw["text_config"].items() if not k.startswith("engram_")}
    raw["text_config"] = text | {"engram_layer_ids": []} | keys
    return raw


def topology(seed: int) -> dict[str, Any]:
    """Rising ratios 0, 2, 1 over 4 to 8 layers, sources and selections at random places, a candidate source or none."""
    r = random.Random(seed)
    plain, paired, single = r.randint(0, 2), r.randint(1, 3), r.randint(1, 4)
    ratios = [0] * plain + [2] * paired + [1] * single
    first = {plain, plain + paired}
    kv = sorted(first | {i for i in range(plain, len(ratios)) if r.random() < 0.2})
    index = sorted(set(kv) | {i for i in range(plain, len(ratios)) if r.random() < 0.4})
    after = [i for i in index if i >= kv[-1]]
    candidate = r.choice([None, after[0]])
    return {"num_hidden_layers": len(ratios), "compress_ratios": ratios + [0] * 3, "kv_source_layer_ids": kv,
            "index_source_layer_ids": index, "candidate_source_layer_id": candidate,
            "dspark_target_layer_ids": sorted({len(ratios) - 1, len(ratios) - 2})}


def plan(keys: dict[str, Any]) -> int:
    model = build_model(Config(config(**keys)), EngineOptions())
    return len(lower(model, PlanOnly(), "cpu").lowered.specs)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(12))
def test_a_random_topology_lowers(seed: int) -> None:
    assert plan(topology(seed))


def test_candidates_that_only_the_last_layer_reads_are_picked_where_their_scores_are() -> None:
    """The last layer runs for the wanted rows; the candidate source, whose own selection more rows need, does not."""
    assert plan({"num_hidden_layers": 6, "compress_ratios": [0, 2, 2, 1, 1, 1, 0, 0, 0], "kv_source_layer_ids": [1, 3],
                 "index_source_layer_ids": [1, 2, 3, 5], "candidate_source_layer_id": 3,
                 "dspark_target_layer_ids": [3, 4, 5]})


def test_engram_layers_outside_the_model_are_refused() -> None:
    raw = json.loads(CASE.read_text())
    raw.pop("oracle", None)
    raw["text_config"]["engram_layer_ids"] = [1, 30]
    with pytest.raises(SpecError, match=r"engram_layer_ids must be rising layer ids; found 1, 30; allowed 0\.\.9"):
        build_model(Config(raw), EngineOptions())


def test_architectures_and_model_type_must_agree() -> None:
    raw = config() | {"model_type": "llama"}
    with pytest.raises(SpecError, match="architectures and model_type name different models"):
        build_model(Config(raw), EngineOptions())
