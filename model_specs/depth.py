"""Models of the first layers of a checkpoint, for machines that do not hold all of them.

A spec says which keys of its configs change with the number of layers (``first_layers``); what is left out is ignored
when the checkpoint is loaded, and drafts go, since they read the last layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any

from deepinfer.dsl import Config, Ignored, Model
from deepinfer.errors import SpecError

Raw = dict[str, Any]
_REASON = "of a layer that this engine leaves out (--layers)"


def first_layers(text: Mapping[str, Any], layers: int) -> Raw:
    """The keys of a DeepSeek text config for its first ``layers`` layers, without a draft head.

    Lists with an entry for each layer are cut, lists of layer ids keep those that are there. Raises SpecError when
    there are not so many layers, or fewer than two are asked for.
    """
    total = text["num_hidden_layers"]
    if not 2 <= layers <= total:
        raise SpecError("the model has no such number of first layers", where="--layers", found=layers,
                        allowed=f"2..{total}")
    out = {k: v for k, v in text.items() if not k.startswith("dspark_")}
    out |= {"num_hidden_layers": layers, "num_nextn_predict_layers": 0}
    if "compress_ratios" in out:
        out["compress_ratios"] = text["compress_ratios"][:layers]
    if "num_hash_layers" in out:
        out["num_hash_layers"] = min(layers, text["num_hash_layers"])
    for key in [k for k in out if k.endswith("_layer_ids")]:
        out[key] = [i for i in text[key] if i < layers]
    if out.get("candidate_source_layer_id", -1) >= layers:
        out = {k: v for k, v in out.items() if not k.startswith("candidate_")}
    if "engram_layer_ids" in out:
        out["engram_num_embeddings"] = text["engram_num_embeddings"][: len(out["engram_layer_ids"])]
        if not out["engram_layer_ids"]:
            out = {k: v for k, v in out.items() if not k.startswith("engram_")}
    return out


def cut_config(spec: ModuleType, config: Mapping[str, Any], layers: int) -> Raw:
    """A checkpoint's config for its first layers; SpecError when its spec has no such form."""
    if not hasattr(spec, "first_layers"):
        raise SpecError("this spec does not describe the first layers of a model alone", where="--layers", found=layers,
                        allowed="a spec with first_layers(config, layers)", next_step="leave --layers out")
    cut: Raw = spec.first_layers(config, layers)
    return cut


def cut_model(spec: ModuleType, model: Model, whole: Config, layers: int) -> Model:
    """A model built from a cut config, ready for checkpoints that hold everything."""
    text = whole.raw.get("text_config", whole.raw)
    gone = [f"layers.{i}.*" for i in range(layers, text["num_hidden_layers"])] + ["mtp.*"]
    return replace(model, ignored=(*(Ignored(p, _REASON) for p in gone), *model.ignored))
