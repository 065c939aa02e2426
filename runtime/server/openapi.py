"""What `/openapi.json` says of request bodies. Every bound in it is enforced. A field that it does not list is ignored,
as the official APIs document it, or refused by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from deepinfer.recipe.chat_request import FORMATS, ROLES
from deepinfer.recipe.options import MAX_OUTPUT_TOKENS
from deepinfer.recipe.responses_request import FORMATS as TEXT_FORMATS
from deepinfer.recipe.sampling import EFFORTS, MOST_STOP_SEQUENCES, MOST_TOP_LOGPROBS, THINKING_TYPES
from deepinfer.runtime.server.extensions import MOST_PRIORITY

Schema = dict[str, Any]


def _words(allowed: Iterable[str]) -> Schema:
    return {"type": "string", "enum": list(allowed)}


def _list(items: Schema, **more: Any) -> Schema:
    return {"type": "array", "items": items, **more}


def _object(properties: Mapping[str, Schema], *required: str) -> Schema:
    return {"type": "object", "properties": dict(properties), "required": list(required)}


def _whole(least: int, most: int | None = None) -> Schema:
    return {"type": "integer", "minimum": least} | ({} if most is None else {"maximum": most})


_TEXT: Schema = {"type": "string"}
_FULL_TEXT: Schema = {"type": "string", "minLength": 1}
_FLAG: Schema = {"type": "boolean"}
_STOPS = _list(_FULL_TEXT, maxItems=MOST_STOP_SEQUENCES)
_STOP: Schema = {"oneOf": [_FULL_TEXT, _STOPS]}
_LENGTH = _whole(1, MAX_OUTPUT_TOKENS)
_THINKING = _object({"type": _words(THINKING_TYPES)})
_SAMPLING: Schema = {
    "temperature": {"type": "number", "minimum": 0, "maximum": 2},
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
}
_PENALTIES: Schema = {name: {"type": "number", "minimum": -2, "maximum": 2}
                      for name in ("presence_penalty", "frequency_penalty")}
_STREAM: Schema = {"stream": _FLAG}
_CHOICES: Schema = {"n": _whole(1), "seed": _whole(0, (1 << 63) - 1),
                    "stream_options": _object({"include_usage": _FLAG})}
_MODEL: Schema = {"type": "string", "description": "one of /v1/models"}
_EVERYWHERE: Schema = {
    "model": _MODEL,
    "cache_salt": {**_FULL_TEXT, "description": "shares cached prefixes with requests of the same salt and key only"},
    "replay": {"oneOf": [_words(("off", "exact")), _whole(1)],
               "description": "rows of the prompt that all layers compute; a number only where the model allows it"},
    "priority": {**_whole(-MOST_PRIORITY, MOST_PRIORITY), "description": "smaller goes first, if the server allows it"},
    "deadline": {"type": "number", "exclusiveMinimum": 0,
                 "description": "seconds after which the answer ends with what there is"},
    "debug": {**_FLAG, "description": "tell how the answer came about"},
    "structured_outputs": {"type": "object", "description": "the form of the answer"},
}
_BEYOND: Schema = {
    "top_k": _whole(-1), "min_p": {"type": "number", "minimum": 0, "maximum": 1},
    "repetition_penalty": {"type": "number", "exclusiveMinimum": 0}, "min_tokens": _whole(0), "ignore_eos": _FLAG,
    "stop_token_ids": _list(_whole(0)), "allowed_token_ids": _list(_whole(0), minItems=1),
    "bad_words": _list(_FULL_TEXT),
}
_PARTS: Schema = {"oneOf": [_TEXT, _list({"type": "object"})]}

_IDS = _list(_whole(0), minItems=1)


def _messages(roles: Iterable[str], **more: Any) -> Schema:
    return _list(_object({"role": _words(roles), "content": _PARTS}, "role"), **more)


CHAT = _object({
    **_EVERYWHERE, **_SAMPLING, **_PENALTIES, **_STREAM, **_CHOICES, **_BEYOND,
    "messages": _messages(ROLES, minItems=1), "thinking": _THINKING, "reasoning_effort": _words(EFFORTS),
    "max_tokens": _LENGTH, "max_completion_tokens": _LENGTH, "stop": _STOP, "logprobs": _FLAG,
    "top_logprobs": _whole(0, MOST_TOP_LOGPROBS),
    "tools": _list(_object({"type": _TEXT, "function": _object({"name": _FULL_TEXT}, "name")}, "type", "function")),
    "response_format": _object({"type": _words(FORMATS)}, "type"),
}, "model", "messages")

RESPONSES = _object({
    **_EVERYWHERE, **_SAMPLING, **_STREAM, **_BEYOND,
    "input": {"oneOf": [_TEXT, _list({"type": "object"})]}, "instructions": _TEXT, "max_output_tokens": _LENGTH,
    "reasoning": _object({"effort": _words(EFFORTS)}), "top_logprobs": _whole(0, MOST_TOP_LOGPROBS),
    "text": _object({"format": _object({"type": _words(TEXT_FORMATS)}, "type")}), "tools": _list({"type": "object"}),
}, "model", "input")

COUNT_TOKENS = _object({
    "model": _MODEL, "messages": _messages(("user", "assistant", "system"), minItems=1), "system": _PARTS,
    "thinking": _THINKING, "output_config": _object({"effort": _words(EFFORTS)}),
    "tools": _list(_object({"name": _FULL_TEXT}, "name")),
}, "model", "messages")

MESSAGES = _object({
    **_EVERYWHERE, **_SAMPLING, **_STREAM, **{name: of for name, of in _BEYOND.items() if name != "top_k"},
    **COUNT_TOKENS["properties"], "max_tokens": _whole(1), "stop_sequences": _STOPS,
}, "model", "messages")

COMPLETIONS = _object({
    **_EVERYWHERE, **_SAMPLING, **_PENALTIES, **_STREAM, **_CHOICES, **_BEYOND,
    "prompt": {"oneOf": [_TEXT, _IDS, _list({"oneOf": [_TEXT, _IDS]}, minItems=1)]},
    "logit_bias": {"type": "object", "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}},
    "suffix": _TEXT, "echo": _FLAG, "max_tokens": _whole(0),
    "logprobs": _whole(0, MOST_TOP_LOGPROBS), "stop": _STOP,
}, "model", "prompt")

TOKENIZE = _object({"prompt": _TEXT, "messages": _messages(ROLES), "return_token_strs": _FLAG})
DETOKENIZE = _object({"tokens": _list(_whole(0))}, "tokens")


def body_of(schema: Schema) -> dict[str, Any]:
    """What FastAPI adds to a route's description."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
