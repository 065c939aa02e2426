"""The scalar fields of a Chat Completions request."""

from __future__ import annotations

from deepinfer.recipe.errors import ConversionError
from deepinfer.recipe.fields import Field
from deepinfer.recipe.sampling import MOST_TOP_LOGPROBS, check_length, check_sampling, check_stop


class ChatSettings:
    """The scalar fields: read first, checked after the model is known."""

    def __init__(self, root: Field, bound: int) -> None:
        self.bound = bound
        self.max_tokens = root.integer_at("max_tokens", 32)
        self.temperature = root.number_at("temperature")
        self.top_p = root.number_at("top_p")
        self.penalties = {key: root.number_at(key) for key in ("frequency_penalty", "presence_penalty")}
        self.n = root.integer_at("n", 32)
        self.seed = root.integer_at("seed", 64)
        self.logprobs = root.flag_at("logprobs") or False
        self.top_logprobs = root.integer_at("top_logprobs", 8)
        self.stream = root.flag_at("stream") or False
        stream_options = root.optional("stream_options")
        self.has_stream_options = stream_options is not None
        self.include_usage = bool(stream_options and stream_options.flag_at("include_usage"))
        stop = root.optional("stop")
        if stop is None:
            self.stop: tuple[str, ...] = ()
        elif isinstance(stop.value, str):
            self.stop = (stop.text(),)
        else:
            self.stop = tuple(item.text() for item in stop.items())

    def check(self) -> None:
        if self.has_stream_options and not self.stream:
            raise ConversionError("stream_options should be set along with stream = true")
        if self.n is not None and self.n != 1:
            raise ConversionError("Invalid n value (currently only n = 1 is supported)")
        check_length("max_tokens", self.max_tokens, self.bound)
        check_sampling(self.temperature, self.top_p)
        for key, value in self.penalties.items():
            if value is not None and not -2 <= value <= 2:
                raise ConversionError(f"Invalid {key} value, the valid range of {key} is [-2, 2]")
        if self.seed is not None and self.seed >= 2**63:
            raise ConversionError("Invalid seed value, the valid range of seed is [0, 9223372036854775807]")
        if self.top_logprobs is not None:
            if not self.logprobs:
                raise ConversionError(
                    "Invalid top_logprobs and logprobs value, "
                    "logprobs must be set to true if top_logprobs is used."
                )
            if self.top_logprobs > MOST_TOP_LOGPROBS:
                raise ConversionError(
                    "Invalid top_logprobs value, "
                    f"the valid range of top_logprobs is [0, {MOST_TOP_LOGPROBS}]."
                )
        check_stop(self.stop)
