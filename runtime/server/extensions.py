"""Fields beyond the official APIs: sampling options under vLLM's names, and features that are not built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deepinfer.recipe import ConvertedRequest
from deepinfer.recipe.fields import Field
from deepinfer.runtime.server.failures import HttpFailure
from deepinfer.runtime.server.wire import Sampling
from deepinfer.runtime.store.settings import class_of

CACHE_CLASS_HEADER = "x-cache-class"
MOST_PRIORITY = 100
_LONGEST_ID = 9  # digits
TEMPLATE_SETTINGS = "chat_template_kwargs"
_GRAMMAR = "send structured_outputs with json, regex, choice or grammar"
_UNBUILT: Mapping[str, str] = {
    "guided_json": _GRAMMAR,
    "guided_regex": _GRAMMAR,
    "guided_choice": _GRAMMAR,
    "guided_grammar": _GRAMMAR,
    "functions": "send tools instead",
    "function_call": "send tool_choice instead",
    "audio": "audio is not built",
    "modalities": "answers are text only",
    "prediction": "predicted outputs are not built",
    "web_search_options": "there is no web search",
    "use_beam_search": "beam search is not built",
    "best_of": "ask for n answers, and choose",
    "prompt_logprobs": "use /v1/completions with echo and logprobs",
    TEMPLATE_SETTINGS: "there is no chat template; say it in the words of this API",
    "documents": "put documents into the messages",
    "lora_request": "adapters are not built",
    "include_stop_str_in_output": "answers end before a stop text",
    "skip_special_tokens": "control tokens are never shown as text",
    "truncate_prompt_tokens": "send fewer tokens; /tokenize counts them",
    "length_penalty": "beam search is not built",
    "continue_final_message": "send prefix: true in the last message",
    "add_generation_prompt": "an answer follows every conversation",
    "kv_transfer_params": "prefill and decode run in one process",
}

_CONVERSATIONS = "a plain completion has no conversation; use /v1/chat/completions"
_UNBUILT_IN_PLAIN: Mapping[str, str] = {"response_format": _GRAMMAR, "tools": _CONVERSATIONS,
                                        "messages": _CONVERSATIONS, "thinking": _CONVERSATIONS}

# what takes tokens away, and what a form of the answer is asked with
_NARROWING = ("allowed_token_ids", "bad_words", "logit_bias", "min_tokens")
_FORMS = ("structured_outputs", "response_format", "text", "output_config", "tools")
# values that ask for nothing, where that is not false or an empty list
_NOTHING: Mapping[str, tuple[Any, ...]] = {
    "skip_special_tokens": (True,), "add_generation_prompt": (True,), "modalities": (["text"],),
    "response_format": ({"type": "text"},), "thinking": ({"type": "disabled"},)}


def refuse_unbuilt_fields(root: Field, *, plain: bool = False) -> None:
    """Refuse, by name, a field that asks for something that is not built. ``plain``: the body has no conversation."""
    for name, why in {**_UNBUILT, **(_UNBUILT_IN_PLAIN if plain else {})}.items():
        found = root.optional(name)
        usual = (root.value.get("n", 1),) if name == "best_of" else _NOTHING.get(name, (False, [], {}))
        if found is not None and found.value not in usual:
            raise HttpFailure(400, f"{name} is not supported: {why}.", code="unsupported_field", param=name)


def template_settings(root: Field) -> dict[str, Any]:
    """What `chat_template_kwargs` of a Chat request says, as the fields of the API that say the same."""
    found = root.optional(TEMPLATE_SETTINGS)
    out: dict[str, Any] = {}
    for name in found.object().value if found is not None else ():
        assert found is not None
        if name in ("thinking", "enable_thinking"):
            out["thinking"] = {"type": "enabled" if found.required(name).boolean() else "disabled"}
        elif name == "reasoning_effort":
            out[name] = found.required(name).text()
        else:
            raise _unsupported(f"{TEMPLATE_SETTINGS}.{name}", "there is no chat template; known are thinking, "
                               "enable_thinking and reasoning_effort")
    return out


def refuse_unbuilt_features(request: ConvertedRequest) -> None:
    """Refuse a request whose form is right and that needs what this server does not have."""
    for image in request.image_sources:
        raise _unsupported(image.path.lstrip("."), "images are not read, vision is not built; this engine reads text")


def sampling_extensions(root: Field, *, top_k: bool = True) -> Sampling:
    """Sampling options under vLLM's names; their values are checked by SamplingParams.

    ``top_k``: whether it counts; the Messages API documents it as ignored.
    """
    out: Sampling = {}
    for name in ("top_k", "min_tokens") if top_k else ("min_tokens",):
        if (found := root.optional(name)) is not None:
            out[name] = _whole(found)
    for name in ("min_p", "repetition_penalty"):
        if (found := root.optional(name)) is not None:
            out[name] = found.number()
    if (found := root.optional("ignore_eos")) is not None:
        out["ignore_eos"] = found.boolean()
    for name in ("stop_token_ids", "allowed_token_ids"):
        if (found := root.optional(name)) is not None:
            out[name] = [_whole(item) for item in found.items()]
    if (found := root.optional("bad_words")) is not None:
        out["bad_words"] = [item.text() for item in found.items()]
    return out


def logit_bias(root: Field) -> Sampling:
    """What is added to logits, by token id."""
    found = root.optional("logit_bias")
    if found is None:
        return {}
    unfit = [name for name in found.object().value if not name.isdecimal() or len(name) > _LONGEST_ID]
    if unfit:
        raise HttpFailure(400, f"logit_bias has token ids as names; found {unfit[0][:40]!r}.", param="logit_bias")
    return {"logit_bias": {int(name): found.required(name).number() for name in found.value}}


@dataclass(frozen=True)
class Caller:
    """Who asks. ``tenant``: the name of the API key; None: there are no keys. ``cache_class``: what a header says of
    how long to keep what the request computes."""

    tenant: str | None
    cache_class: str | None


@dataclass(frozen=True)
class Handling:
    """What a request asks of scheduling and of the answer's form. ``priority``: smaller goes first."""

    priority: int
    debug: bool


def cache_extensions(root: Field, caller: Caller, retention: Mapping[str, int] | None) -> Sampling:
    """How the prefix cache treats a request: retention class, tenant, replay.

    A tenant shares with nobody; `cache_salt` parts its requests further. ``retention``: by class, of the store
    that blocks go to; it keeps a secret for each tenant on disk, so that clients cannot be allowed to make up names.
    None: there is no store.
    """
    out: Sampling = {"cache_class": class_of(bool(root.value.get("tools")), caller.cache_class, retention or {})}
    salt = root.text_at("cache_salt")
    if salt is not None and retention is not None:
        raise _unsupported("cache_salt", "this server has a prefix store, where the API key alone parts tenants")
    if salt == "":
        raise HttpFailure(400, "cache_salt needs at least one character.", param="cache_salt")
    if salt or caller.tenant:
        out["cache_salt"] = f"{caller.tenant or ''}/{salt}" if salt else caller.tenant
    if (replay := root.optional("replay")) is not None:
        out["replay"] = replay.value if isinstance(replay.value, str) else _whole(replay)
    return out


def handling(root: Field, *, priorities: bool) -> Handling:
    """`priority` and `debug`. ``priorities``: whether clients may say who goes first."""
    found = root.optional("priority")
    priority = 0 if found is None else _whole(found)
    if priority and not priorities:
        raise _unsupported("priority", "this server was started without --allow-priority")
    if abs(priority) > MOST_PRIORITY:
        raise HttpFailure(400, f"priority must be between -{MOST_PRIORITY} and {MOST_PRIORITY}; found {priority}.",
                          param="priority")
    return Handling(priority, root.flag_at("debug") or False)


def narrowing(root: Field, sampling: Sampling) -> tuple[str, ...]:
    """Fields of a request that leave it fewer tokens to choose from: two of them may contradict each other."""
    forms = _FORMS if "structured_outputs" in sampling else ()
    return tuple(name for name in (*_NARROWING, *forms) if root.value.get(name))


def deadline(root: Field) -> Sampling:
    """Seconds after which the answer ends with what there is."""
    found = root.number_at("deadline")
    return {} if found is None else {"deadline": found}


def _whole(field: Field) -> int:
    if isinstance(field.value, bool) or not isinstance(field.value, int):
        raise field.wrong("a whole number")
    return field.value


def _unsupported(field: str, why: str) -> HttpFailure:
    return HttpFailure(400, f"{field} is not supported: {why}.", code="unsupported_field", param=field)


def plain_sampling(request: ConvertedRequest, max_tokens: int) -> Sampling:
    """What a converted request asks of sampling, as arguments of SamplingParams."""
    asked: dict[str, Any] = {"temperature": request.inference.temperature, "top_p": request.inference.top_p,
                             "max_tokens": max_tokens}
    if request.inference.seed is not None:
        asked["seed"] = request.inference.seed
    if request.inference.logprobs:
        asked["logprobs"] = request.inference.top_logprobs or 0
    return asked
