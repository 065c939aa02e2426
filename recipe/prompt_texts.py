"""The fixed texts of the prompts, which are data of the models and stand in `prompt_texts.json`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources
from typing import Any


@dataclass(frozen=True)
class PromptTexts:
    """Texts the models were trained with; changing a byte changes what the model does."""

    tools_v41: str
    tools_v4: str
    tools_tail: str
    effort_high_v4: str
    effort_max_v4: str
    json_object_v4: str
    response_format: str
    apply_patch_description: str
    apply_patch_parameters: dict[str, Any]


def _read() -> PromptTexts:
    text = resources.files("deepinfer.recipe").joinpath("prompt_texts.json").read_text(encoding="utf-8")
    return PromptTexts(**json.loads(text))


PROMPT_TEXTS = _read()
