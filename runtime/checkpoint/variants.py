"""Checkpoint variants that are refused by name, with the one to take instead."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from deepinfer.errors import SpecError

SUPPORTED = "the official FP8/FP4 checkpoint, bf16, f32"
_USE = "use the official FP8/FP4 checkpoint, or convert this one to bf16"


def refuse_variants(config: Mapping[str, Any], files: Iterable[str], where: str,
                    quant_file: str | None = None) -> None:
    """Raises SpecError for a checkpoint in a format that this project does not read.

    ``files``: names in the folder or repository; ``quant_file``: text of ``hf_quant_config.json`` where there is one.
    """
    names = list(files)
    if any(n.startswith("quant_model_description") for n in names):
        raise _refused("a ModelSlim checkpoint (Ascend quantisation)", where, "quant_model_description*.json")
    safetensors = any(n.endswith(".safetensors") for n in names)
    if not safetensors and any(n.endswith(".gguf") for n in names):
        raise _refused("a GGUF file", where, next(n for n in names if n.endswith(".gguf")))
    if not safetensors and any(n.endswith((".bin", ".pt", ".pth")) for n in names):
        found = next(n for n in names if n.endswith((".bin", ".pt", ".pth")))
        raise SpecError("the weights are pickled torch files, which are not read", where=where, found=found,
                        allowed="safetensors files", next_step="convert them to safetensors")
    quant = config.get("quantization_config")
    if isinstance(quant, Mapping):
        _refuse_method(quant, f"{where}: quantization_config")
    elif quant_file is not None:
        _refuse_method(_quantization(quant_file), f"{where}: hf_quant_config.json")


def _quantization(text: str) -> Mapping[str, Any]:
    try:
        found = json.loads(text).get("quantization", {})
    except (ValueError, AttributeError):
        return {}
    return found if isinstance(found, Mapping) else {}


def _refuse_method(quant: Mapping[str, Any], where: str) -> None:
    words = json.dumps(quant, default=str).lower()
    if "nvfp4" in words:
        raise _refused("an NVFP4 checkpoint", where, _method(quant))
    method = quant.get("quant_method")
    if method in ("modelslim", "ascend"):
        raise _refused("a ModelSlim checkpoint (Ascend quantisation)", where, _method(quant))
    if method == "gguf":
        raise _refused("a GGUF checkpoint", where, _method(quant))
    if method not in (None, "fp8") or (method is None and quant.get("quant_algo")):
        raise _refused("a checkpoint quantised in another way", where, _method(quant))


def _method(quant: Mapping[str, Any]) -> str:
    keys = ("quant_method", "quant_algo", "format")
    return ", ".join(f"{k}={quant[k]}" for k in keys if quant.get(k)) or "quantised weights"


def _refused(what: str, where: str, found: str) -> SpecError:
    return SpecError(f"this is {what}, which is not supported", where=where, found=found, allowed=SUPPORTED,
                     next_step=_USE)
