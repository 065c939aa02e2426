"""The routes that tell: probes, models, metrics, tokens."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

import deepinfer
from deepinfer.recipe import convert_request
from deepinfer.recipe.fields import Field, read_body
from deepinfer.runtime.server.export import CONTENT_TYPE
from deepinfer.runtime.server.extensions import refuse_unbuilt_features
from deepinfer.runtime.server.failures import HttpFailure
from deepinfer.runtime.server.link import State
from deepinfer.runtime.server.openapi import DETOKENIZE, TOKENIZE, body_of
from deepinfer.runtime.server.routes import read_limited
from deepinfer.runtime.server.service import Service
from deepinfer.runtime.server.vocabulary import Vocabulary

_PAGE = Path(__file__).with_name("page.html")
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
                               "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def status_routes(service: Service) -> APIRouter:
    """GET routes, and the two that turn text into ids and back."""
    router = APIRouter()
    link = service.link

    @router.get("/", include_in_schema=False)
    async def page() -> Response:
        """A small page to talk to the model; it loads nothing from anywhere else."""
        return Response(_PAGE.read_bytes(), media_type="text/html; charset=utf-8", headers=_PAGE_HEADERS)

    @router.get("/health")
    async def health() -> Response:
        """Alive, also while the engine starts or a step takes long; 503 with the reason when the engine is gone."""
        if link.state in (State.DOWN, State.STOPPED):
            return JSONResponse({"status": str(link.state), "reason": link.reason}, 503)
        return JSONResponse({"status": str(link.state)})

    @router.get("/ready")
    async def ready() -> Response:
        """Requests are taken: weights are loaded, the self check has passed, nobody is shutting down."""
        reason = service.not_ready
        if reason is not None:
            return JSONResponse({"status": "not ready", "reason": reason}, 503)
        return JSONResponse({"status": "ready", "fingerprint": link.require_hello().fingerprint})

    @router.get("/version")
    async def version() -> Response:
        hello = link.hello
        return JSONResponse({"version": deepinfer.__version__, "distribution": deepinfer.DISTRIBUTION,
                             "target": hello.target if hello else None,
                             "fingerprint": hello.fingerprint if hello else None})

    @router.get("/load")
    async def load() -> Response:
        snapshot = link.snapshot
        return JSONResponse({
            "open": service.open_requests, "running": snapshot.running if snapshot else 0,
            "waiting": snapshot.waiting if snapshot else 0, "free_blocks": snapshot.free_blocks if snapshot else 0,
            "blocks": link.hello.blocks if link.hello else 0})

    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(await service.metrics.text(), media_type=CONTENT_TYPE)

    @router.get("/v1/models")
    @router.get("/models")
    @router.get("/anthropic/v1/models")
    async def models() -> Response:
        cards = [_card(service, name) for name in service.settings.names]
        return JSONResponse({"object": "list", "data": cards, "has_more": False, "first_id": cards[0]["id"],
                             "last_id": cards[-1]["id"]})

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        if name not in service.settings.names:
            raise HttpFailure(404, f"The model {name!r} is not served; served: {', '.join(service.settings.names)}.",
                              code="model_not_found", param="model")
        return JSONResponse(_card(service, name))

    @router.post("/tokenize", openapi_extra=body_of(TOKENIZE))
    async def tokenize(request: Request) -> Response:
        vocabulary = service.require_ready()
        root = read_body(await read_limited(request, service.settings.max_body))
        ids = await asyncio.to_thread(_ids, service, root, vocabulary)
        pieces = [vocabulary.tokenizer.token_text(i) for i in ids] if root.flag_at("return_token_strs") else None
        return JSONResponse({"count": len(ids), "max_model_len": service.max_model_len, "tokens": ids,
                             "token_strs": pieces})

    @router.post("/detokenize", openapi_extra=body_of(DETOKENIZE))
    async def detokenize(request: Request) -> Response:
        vocabulary = service.require_ready()
        root = read_body(await read_limited(request, service.settings.max_body))
        ids = [item.integer(31) for item in root.required("tokens").items()]
        return JSONResponse({"prompt": vocabulary.tokenizer.decode(ids)})

    return router


def _ids(service: Service, root: Field, vocabulary: Vocabulary) -> list[int]:
    """Ids of `prompt`, in which nothing becomes a control token, or of the prompt that `messages` make."""
    if "messages" in root:
        body = {"model": service.settings.names[0], **root.value}
        request = convert_request("chat", body, service.conversion("chat", vocabulary))
        refuse_unbuilt_features(request)
        return vocabulary.prompt(request)
    return vocabulary.tokenizer.encode(root.required("prompt").text())


def _card(service: Service, name: str) -> dict[str, Any]:
    """A model as clients of both families read it."""
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(service.created))
    hello = service.link.hello
    sizes: dict[str, Any] = {}
    if hello is not None:
        sizes = {"max_model_len": service.max_model_len, "vocab_size": hello.vocab_size, "root": hello.model}
    return {"id": name, "object": "model", "created": service.created, "owned_by": deepinfer.DISTRIBUTION, **sizes,
            "type": "model", "display_name": name, "created_at": created}
