"""How requests are converted: the model table, defaults, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from deepinfer.errors import SpecError
from deepinfer.recipe.errors import ConversionError

MAX_OUTPUT_TOKENS = 393_216
DROP = "drop"
REJECT = "reject"
FILL = "fill"


@dataclass(frozen=True)
class Model:
    """A model family: its name in `model_version` and its prompt dialect."""

    version: str
    dialect: str


V4 = Model("DeepseekV4Pro", "v4")
V41 = Model("DeepseekV41Flash", "v4.1")
MODELS: Mapping[str, Model] = MappingProxyType({"DeepSeek-V4-Pro": V4, "DeepSeek-V4.1-Flash": V41})
# what the hosted service serves besides, and how it reads the model names of Messages clients
HOSTED_MODELS: Mapping[str, Model] = MappingProxyType(
    {**MODELS, "deepseek-flash": V41, "deepseek-v4-flash": V41, "deepseek-v4-pro": V4}
)
CLAUDE_PREFIXES: tuple[tuple[str, Model], ...] = (("claude-opus", V4), ("claude", V41))


@dataclass(frozen=True)
class ConversionOptions:
    """Choices of the server, not of the client.

    Attributes:
        default_thinking: thinking mode when the request does not say.
        missing_reasoning: `fill` an absent reasoning of a tool turn with nothing, or `reject` the request.
        responses_web_search, messages_web_search: `drop` the server tool or `reject` the request.
        models: served names; anything else is refused.
        prefixes: beginnings of names that are served too; the first that fits counts.
        max_tokens_thinking, max_tokens_chat: upper bounds of the requested output length per mode.
    """

    default_thinking: bool = True
    missing_reasoning: str = FILL
    responses_web_search: str = DROP
    messages_web_search: str = REJECT
    models: Mapping[str, Model] = field(default_factory=lambda: MODELS)
    prefixes: tuple[tuple[str, Model], ...] = ()
    max_tokens_thinking: int = MAX_OUTPUT_TOKENS
    max_tokens_chat: int = MAX_OUTPUT_TOKENS

    def __post_init__(self) -> None:
        words = {
            "missing_reasoning": (FILL, REJECT),
            "responses_web_search": (DROP, REJECT),
            "messages_web_search": (DROP, REJECT),
        }
        for name, allowed in words.items():
            if getattr(self, name) not in allowed:
                raise SpecError("unknown choice", where=name, found=getattr(self, name), allowed=allowed)

    def model(self, name: str) -> Model:
        """The family behind a served name.

        Raises:
            ConversionError: the name is not served.
        """
        if name not in self.models:
            for beginning, model in self.prefixes:
                if name.startswith(beginning):
                    return model
            served = ", ".join(sorted(self.models))
            raise ConversionError(f"The supported API model names are {served}, but you passed {name}.")
        return self.models[name]

    def max_tokens(self, thinking: bool) -> int:
        return self.max_tokens_thinking if thinking else self.max_tokens_chat
