"""What is sampled in the end: bounds of the request, the values the modes force, the length that is left."""

from __future__ import annotations

from collections.abc import Sequence

from deepinfer.recipe.conversation import ConvertedRequest, Effort
from deepinfer.recipe.errors import ConversionError
from deepinfer.recipe.options import V41, Model

MOST_STOP_SEQUENCES = 16
MOST_TOP_LOGPROBS = 20
THINKING_TOP_P_FLOOR = 0.95
DEFAULT_LENGTH_CHAT = 8_192
DEFAULT_LENGTH_THINKING = 65_536
DEFAULT_LENGTH_THINKING_MAX = 131_072

EFFORTS: dict[str, Effort | None] = {
    "none": None,
    "minimal": Effort.LOW,
    "low": Effort.LOW,
    "medium": Effort.HIGH,
    "high": Effort.HIGH,
    "xhigh": Effort.XHIGH,
    "ultra": Effort.MAX,
    "max": Effort.MAX,
}
THINKING_TYPES = ("enabled", "disabled", "adaptive")


def resolve_thinking(
    thinking_type: str | None, effort: str | None, default: bool
) -> tuple[bool, Effort | None]:
    """Whether the answer starts with reasoning, and how much of it.

    The switch wins over the effort; an effort alone switches thinking on (`none`: off).
    """
    if thinking_type is not None:
        thinking = thinking_type != "disabled"
    elif effort is not None:
        thinking = effort != "none"
    else:
        thinking = default
    asked = EFFORTS[effort] if effort is not None else None
    return thinking, (asked or Effort.HIGH) if thinking else None


def check_sampling(temperature: float | None, top_p: float | None) -> None:
    """Refuse a temperature outside [0, 2] and a top_p outside (0, 1]."""
    if temperature is not None and not 0 <= temperature <= 2:
        raise ConversionError("Invalid temperature value, the valid range of temperature is [0, 2]")
    if top_p is not None and not 0 < top_p <= 1:
        raise ConversionError("Invalid top_p value, the valid range of top_p is (0, 1.0]")


def check_length(field: str, asked: int | None, bound: int) -> None:
    """Refuse a requested output length outside [1, bound]."""
    if asked is not None and not 1 <= asked <= bound:
        raise ConversionError(f"Invalid {field} value, the valid range of {field} is [1, {bound}]")


def check_stop(stop: Sequence[str]) -> tuple[str, ...]:
    """Refuse more than 16 stop sequences or an empty one."""
    if len(stop) > MOST_STOP_SEQUENCES:
        raise ConversionError(f"Stop string array too long: {len(stop)}")
    for index, sequence in enumerate(stop):
        if not sequence:
            raise ConversionError(
                f"Invalid 'stop[{index}]': empty string. Expected a string with minimum length 1, "
                "but got an empty string instead."
            )
    return tuple(stop)


def effective_sampling(
    model: Model, thinking: bool, has_tools: bool, temperature: float | None, top_p: float | None
) -> tuple[float, float]:
    """(temperature, top_p) as sampled: thinking fixes the first, the second depends on model, mode and tools."""
    asked = 1.0 if top_p is None else top_p
    if model.dialect == V41.dialect:
        used = max(asked, THINKING_TOP_P_FLOOR) if thinking else 1.0
    elif thinking:
        used = THINKING_TOP_P_FLOOR if has_tools else 1.0
    else:
        used = asked
    return (1.0 if thinking or temperature is None else temperature), used


def resolve_max_tokens(request: ConvertedRequest, prompt_tokens: int, context_limit: int) -> int:
    """How many tokens the answer may have once the prompt's length is known.

    Raises:
        ConversionError: the prompt, or the prompt and the requested answer, are longer than the context.
    """
    asked = request.inference.max_tokens
    wanted = prompt_tokens + (asked or 0)
    if wanted > context_limit:
        raise ConversionError(
            f"This model's maximum context length is {context_limit} tokens. However, you requested {wanted} "
            f"tokens ({prompt_tokens} in the messages, {asked or 0} in the completion). "
            "Please reduce the length of the messages or completion."
        )
    if asked is not None:
        return asked
    if not request.conversation.thinking:
        default = DEFAULT_LENGTH_CHAT
    elif request.conversation.effort is Effort.MAX:
        default = DEFAULT_LENGTH_THINKING_MAX
    else:
        default = DEFAULT_LENGTH_THINKING
    return max(1, min(default, context_limit - prompt_tokens))
