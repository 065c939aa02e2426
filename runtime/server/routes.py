"""The routes that generate: conversations of three APIs and plain completions."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from deepinfer.recipe import AnswerIdentity, ConvertedRequest, convert_request, resolve_max_tokens
from deepinfer.recipe.fields import Field, read_body
from deepinfer.recipe.options import MAX_OUTPUT_TOKENS
from deepinfer.recipe.sampling import check_length
from deepinfer.runtime.sampling_params import SamplingParams
from deepinfer.runtime.server import openapi
from deepinfer.runtime.server.answer import Answer, ConversationAnswer, CountedAnswer
from deepinfer.runtime.server.choices import ChoicesAnswer, choices_asked
from deepinfer.runtime.server.completion import CompletionAnswer, read_completions
from deepinfer.runtime.server.engine_response import EngineResponse
from deepinfer.runtime.server.extensions import (
    CACHE_CLASS_HEADER,
    TEMPLATE_SETTINGS,
    Caller,
    Handling,
    cache_extensions,
    deadline,
    handling,
    logit_bias,
    narrowing,
    plain_sampling,
    refuse_unbuilt_features,
    refuse_unbuilt_fields,
    sampling_extensions,
    template_settings,
)
from deepinfer.runtime.server.failures import HttpFailure
from deepinfer.runtime.server.forms import Form, asked_form, form_of, reasoning_end
from deepinfer.runtime.server.service import Prompt, Service
from deepinfer.runtime.server.vocabulary import Vocabulary
from deepinfer.runtime.server.wire import Sampling

_ID_PREFIX = {"chat": "chatcmpl-", "responses": "resp_", "messages": "msg_", "completion": "cmpl-"}

# besides the usual paths those of DeepSeek's own service, whose clients name no version
_CONVERSATIONS = {
    "/v1/chat/completions": "chat", "/chat/completions": "chat", "/beta/chat/completions": "chat",
    "/v1/responses": "responses", "/responses": "responses",
    "/v1/messages": "messages", "/anthropic/v1/messages": "messages",
}

_BODIES = {"chat": openapi.CHAT, "responses": openapi.RESPONSES, "messages": openapi.MESSAGES}


@dataclass(frozen=True)
class Prepared:
    """A request that is ready for the engine. ``answer`` reads what comes back; ``narrowing``: fields that leave it
    fewer tokens to choose from."""

    prompts: list[Prompt]
    handling: Handling
    answer: Answer
    stream: bool
    narrowing: tuple[str, ...]


async def read_limited(request: Request, limit: int) -> bytes:
    """The body, or HttpFailure 413 as soon as it is longer than ``limit`` bytes."""
    too_large = HttpFailure(413, f"The request is larger than {limit} bytes.", code="request_too_large")
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > limit:
        raise too_large
    data = bytearray()
    async for piece in request.stream():
        data += piece
        if len(data) > limit:
            raise too_large
    return bytes(data)


def generation_routes(service: Service) -> APIRouter:
    """POST routes that run the engine."""
    router = APIRouter()

    async def respond(request: Request, prepare: Callable[[bytes, Vocabulary, Caller], Prepared]) -> Response:
        vocabulary = service.require_ready()
        body = await read_limited(request, service.settings.max_body)
        # converting and tokenising a long prompt takes a while; probes are answered meanwhile
        caller = Caller(request.state.tenant, request.headers.get(CACHE_CLASS_HEADER))
        ready = await asyncio.to_thread(prepare, body, vocabulary, caller)
        ticket = service.submit(ready.prompts, ready.handling.priority, ready.handling.debug)
        notes = request.state.notes
        notes.update(prompt_tokens=sum(len(p.ids) for p in ready.prompts), stream=ready.stream,
                     engine_request=ticket.key)
        return EngineResponse(ticket, ready.answer, stream=ready.stream, narrowing=ready.narrowing,
                              path=request.url.path, request_id=request.state.request_id, notes=notes,
                              keep_alive=service.settings.keep_alive, on_cut=service.metrics.cut)

    def conversation(api: str) -> Callable[[Request], Any]:
        async def route(request: Request) -> Response:
            return await respond(request, lambda *given: _conversation(service, api, *given))

        return route

    async def completions(request: Request) -> Response:
        return await respond(request, lambda *given: _completion(service, *given))

    async def count_tokens(request: Request) -> Response:
        vocabulary = service.require_ready()
        body = await read_limited(request, service.settings.max_body)
        converted = await asyncio.to_thread(_converted, service, "messages", read_body(body), vocabulary)
        ids = await asyncio.to_thread(vocabulary.prompt, converted)
        return JSONResponse({"input_tokens": len(ids)})

    for path, api in _CONVERSATIONS.items():
        _post(router, path, conversation(api), _BODIES[api])
    for prefix in ("", "/anthropic"):
        _post(router, f"{prefix}/v1/messages/count_tokens", count_tokens, openapi.COUNT_TOKENS)
    for path in ("/v1/completions", "/beta/completions"):
        _post(router, path, completions, openapi.COMPLETIONS)
    return router


def _post(router: APIRouter, path: str, route: Callable[[Request], Any], schema: openapi.Schema) -> None:
    router.add_api_route(path, route, methods=["POST"], response_class=Response, response_model=None,
                         name=path, openapi_extra=openapi.body_of(schema))


def _converted(service: Service, api: str, root: Field, vocabulary: Vocabulary) -> ConvertedRequest:
    """A body in neutral form; everything that is not built is refused."""
    body = dict(root.value)
    if api == "chat":
        body = template_settings(root) | body
        body.pop(TEMPLATE_SETTINGS, None)
    refuse_unbuilt_fields(Field(body))
    if api == "chat" and (most := root.integer_at("max_completion_tokens", 32)) is not None:
        check_length("max_completion_tokens", most, MAX_OUTPUT_TOKENS)
        body.setdefault("max_tokens", most)
    request = convert_request(api, body, service.conversion(api, vocabulary))
    refuse_unbuilt_features(request)
    return request


def _conversation(service: Service, api: str, body: bytes, vocabulary: Vocabulary, caller: Caller) -> Prepared:
    root = read_body(body)
    hello = service.link.require_hello()
    count = choices_asked(root, hello.slots) if api == "chat" else 1
    if count > 1:
        refuse_unbuilt_fields(Field({"n": count, "best_of": root.value.get("best_of")}))
        one = Field({**root.value, "n": 1, "best_of": 1})
    request = _converted(service, api, one if count > 1 else root, vocabulary)
    ids = vocabulary.prompt(request)
    sampling = plain_sampling(request, resolve_max_tokens(request, len(ids), service.max_model_len))
    sampling |= sampling_extensions(root, top_k=api != "messages")
    form = form_of(request, vocabulary.tokenizer)
    asked = asked_form(root, reasoning_end(request, vocabulary.tokenizer))
    if form is not None and asked is not None:
        raise HttpFailure(400, "structured_outputs cannot be combined with a format or with strict or forced tools.",
                          param="structured_outputs")
    sampling |= _with(form or asked)
    sampling |= _common(service, root, caller, count)
    identity = AnswerIdentity(_ID_PREFIX[api] + secrets.token_hex(12), request.model)
    answers = [ConversationAnswer(request, identity, vocabulary.tokenizer, prompt_tokens=len(ids),
                                  fingerprint=hello.fingerprint, repair=service.settings.repair)
               for _ in range(count)]
    SamplingParams(**sampling)  # RequestError for a value that the engine would refuse
    return _prepared(service, root, [Prompt(ids, sampling)], _together(answers, request.include_usage), request.stream)


def _completion(service: Service, body: bytes, vocabulary: Vocabulary, caller: Caller) -> Prepared:
    root = read_body(body)
    refuse_unbuilt_fields(root, plain=True)
    requests = read_completions(root, vocabulary, service.max_model_len, service.most_open)
    request = requests[0]
    if request.model not in service.settings.names:
        served = ", ".join(service.settings.names)
        raise HttpFailure(404, f"The model {request.model!r} is not served; served: {served}.", code="model_not_found",
                          param="model")
    hello = service.link.require_hello()
    count = choices_asked(root, hello.slots)
    common = sampling_extensions(root) | logit_bias(root) | _with(asked_form(root))
    common |= _common(service, root, caller, count)
    prompts = [Prompt(r.ids, r.sampling | common) for r in requests]
    answer_id = _ID_PREFIX["completion"] + secrets.token_hex(12)
    tokenizer = vocabulary.tokenizer if vocabulary.has_text else None
    answers = [CompletionAnswer(r, answer_id, tokenizer, hello.fingerprint, place * count + index)
               for place, r in enumerate(requests) for index in range(count)]
    for prompt in prompts:
        SamplingParams(**prompt.sampling)
    return _prepared(service, root, prompts, _together(answers, request.include_usage, count), request.stream)


def _prepared(service: Service, root: Field, prompts: list[Prompt], answer: Answer, stream: bool) -> Prepared:
    options = root.optional("stream_options")
    if stream and options is not None and options.flag_at("continuous_usage_stats"):
        answer = CountedAnswer(answer, sum(len(p.ids) for p in prompts))
    return Prepared(prompts, handling(root, priorities=service.settings.priorities), answer, stream,
                    narrowing(root, prompts[0].sampling))


def _common(service: Service, root: Field, caller: Caller, count: int) -> Sampling:
    """What every generating route takes."""
    return {"n": count, **deadline(root), **cache_extensions(root, caller, service.settings.retention)}


def _together(answers: Sequence[Answer], include_usage: bool, per_prompt: int | None = None) -> Answer:
    """``per_prompt``: answers to each prompt; None: all are to the same one."""
    if len(answers) == 1:
        return answers[0]
    return ChoicesAnswer(answers, per_prompt or len(answers), include_usage=include_usage)


def _with(form: Form | None) -> Sampling:
    return {} if form is None else {"structured_outputs": form}
