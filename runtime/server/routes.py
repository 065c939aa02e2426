"""The routes that generate: conversations of three APIs and plain completions."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from deepinfer.recipe import AnswerIdentity, ConvertedRequest, convert_request, resolve_max_tokens
from deepinfer.recipe.fields import Field, read_body
from deepinfer.runtime.sampling_params import SamplingParams
from deepinfer.runtime.server.answer import Answer, ConversationAnswer
from deepinfer.runtime.server.completion import CompletionAnswer, read_completion
from deepinfer.runtime.server.engine_response import EngineResponse
from deepinfer.runtime.server.extensions import (
    CACHE_CLASS_HEADER,
    plain_sampling,
    refuse_unbuilt_features,
    refuse_unbuilt_fields,
    sampling_extensions,
    set_cache_class,
)
from deepinfer.runtime.server.failures import HttpFailure
from deepinfer.runtime.server.forms import Form, asked_form, form_of, reasoning_end
from deepinfer.runtime.server.service import Service
from deepinfer.runtime.server.vocabulary import Vocabulary
from deepinfer.runtime.server.wire import Sampling
from deepinfer.runtime.store.settings import AGENT

_ID_PREFIX = {"chat": "chatcmpl-", "responses": "resp_", "messages": "msg_", "completion": "cmpl-"}

# besides the usual paths those of DeepSeek's own service, whose clients name no version
_CONVERSATIONS = {
    "/v1/chat/completions": "chat", "/chat/completions": "chat", "/beta/chat/completions": "chat",
    "/v1/responses": "responses", "/responses": "responses",
    "/v1/messages": "messages", "/anthropic/v1/messages": "messages",
}


@dataclass(frozen=True)
class Prepared:
    """A request that is ready for the engine. ``prompt_tokens`` are ids; ``answer`` reads what comes back."""

    ids: list[int]
    sampling: Sampling
    answer: Answer
    stream: bool


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

    async def respond(request: Request, prepare: Callable[[bytes, Vocabulary], Prepared]) -> Response:
        vocabulary = service.require_ready()
        body = await read_limited(request, service.settings.max_body)
        # converting and tokenising a long prompt takes a while; probes are answered meanwhile
        ready = await asyncio.to_thread(prepare, body, vocabulary)
        set_cache_class(ready.sampling, request.headers.get(CACHE_CLASS_HEADER))
        ticket = service.submit(ready.ids, ready.sampling)
        notes = request.state.notes
        notes.update(prompt_tokens=len(ready.ids), stream=ready.stream, engine_request=ticket.key)
        return EngineResponse(ticket, ready.answer, stream=ready.stream, path=request.url.path,
                              request_id=request.state.request_id, notes=notes, keep_alive=service.settings.keep_alive,
                              on_cut=service.metrics.cut)

    def conversation(api: str) -> Callable[[Request], Any]:
        async def route(request: Request) -> Response:
            return await respond(request, lambda body, vocabulary: _conversation(service, api, body, vocabulary))

        return route

    async def completions(request: Request) -> Response:
        return await respond(request, lambda body, vocabulary: _completion(service, body, vocabulary))

    async def count_tokens(request: Request) -> Response:
        vocabulary = service.require_ready()
        body = await read_limited(request, service.settings.max_body)
        converted = await asyncio.to_thread(_converted, service, "messages", read_body(body), vocabulary)
        ids = await asyncio.to_thread(vocabulary.prompt, converted)
        return JSONResponse({"input_tokens": len(ids)})

    for path, api in _CONVERSATIONS.items():
        _post(router, path, conversation(api), ["model", "input" if api == "responses" else "messages"])
    for prefix in ("", "/anthropic"):
        _post(router, f"{prefix}/v1/messages/count_tokens", count_tokens, ["model", "messages"])
    for path in ("/v1/completions", "/beta/completions"):
        _post(router, path, completions, ["model", "prompt"])
    return router


def _post(router: APIRouter, path: str, route: Callable[[Request], Any], required: list[str]) -> None:
    schema = {"type": "object", "required": required, "additionalProperties": True}
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    router.add_api_route(path, route, methods=["POST"], response_class=Response, response_model=None,
                         name=path, openapi_extra={"requestBody": body})


def _converted(service: Service, api: str, root: Field, vocabulary: Vocabulary) -> ConvertedRequest:
    """A body in neutral form; everything that is not built is refused."""
    refuse_unbuilt_fields(root)
    body = dict(root.value)
    if api == "chat" and "max_completion_tokens" in root and "max_tokens" not in root:
        body["max_tokens"] = body["max_completion_tokens"]
    request = convert_request(api, body, service.conversion(api, vocabulary))
    refuse_unbuilt_features(request)
    return request


def _conversation(service: Service, api: str, body: bytes, vocabulary: Vocabulary) -> Prepared:
    root = read_body(body)
    request = _converted(service, api, root, vocabulary)
    ids = vocabulary.prompt(request)
    sampling = plain_sampling(request, resolve_max_tokens(request, len(ids), service.max_model_len))
    if request.conversation.tools:
        sampling["cache_class"] = AGENT
    if api != "messages":  # whose API documents top_k as ignored
        sampling |= sampling_extensions(root)
    form = form_of(request, vocabulary.tokenizer)
    asked = asked_form(root, reasoning_end(request, vocabulary.tokenizer))
    if form is not None and asked is not None:
        raise HttpFailure(400, "structured_outputs cannot be combined with a format or with strict or forced tools.",
                          param="structured_outputs")
    sampling |= _with(form or asked)
    _check(sampling)
    identity = AnswerIdentity(_ID_PREFIX[api] + secrets.token_hex(12), request.model)
    answer = ConversationAnswer(request, identity, vocabulary.tokenizer, prompt_tokens=len(ids),
                                fingerprint=service.link.require_hello().fingerprint,
                                repair=service.settings.repair)
    return Prepared(ids, sampling, answer, request.stream)


def _completion(service: Service, body: bytes, vocabulary: Vocabulary) -> Prepared:
    root = read_body(body)
    refuse_unbuilt_fields(root)
    request = read_completion(root, vocabulary, service.max_model_len)
    if request.model not in service.settings.names:
        served = ", ".join(service.settings.names)
        raise HttpFailure(404, f"The model {request.model!r} is not served; served: {served}.", code="model_not_found",
                          param="model")
    sampling = request.sampling | sampling_extensions(root) | _with(asked_form(root))
    _check(sampling)
    answer = CompletionAnswer(request, _ID_PREFIX["completion"] + secrets.token_hex(12),
                              vocabulary.tokenizer if vocabulary.has_text else None,
                              service.link.require_hello().fingerprint)
    return Prepared(request.ids, sampling, answer, request.stream)


def _with(form: Form | None) -> Sampling:
    return {} if form is None else {"structured_outputs": form}


def _check(sampling: Sampling) -> None:
    """RequestError for a value that the engine would refuse."""
    SamplingParams(**sampling)
