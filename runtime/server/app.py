"""The application: routes behind the gate, and every failure in the form of its API."""

from __future__ import annotations

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response

import deepinfer
from deepinfer.errors import RequestError
from deepinfer.runtime.server.failures import HttpFailure, error_response, of_request
from deepinfer.runtime.server.gate import Gate, Keys
from deepinfer.runtime.server.routes import generation_routes
from deepinfer.runtime.server.service import Service
from deepinfer.runtime.server.status_routes import status_routes


def make_app(service: Service) -> FastAPI:
    """The ASGI application of a service."""
    app = FastAPI(title="DeepInfer-AOT", version=deepinfer.__version__, docs_url=None, redoc_url=None)
    app.include_router(generation_routes(service))
    app.include_router(status_routes(service))

    def failed(request: Request, failure: HttpFailure) -> Response:
        return error_response(request.url.path, failure, request.state.request_id)

    @app.exception_handler(HttpFailure)
    async def _(request: Request, error: HttpFailure) -> Response:
        return failed(request, error)

    @app.exception_handler(RequestError)
    async def _(request: Request, error: RequestError) -> Response:
        return failed(request, of_request(error))

    @app.exception_handler(HTTPException)
    async def _(request: Request, error: HTTPException) -> Response:
        path, method = request.url.path, request.method
        message = {404: f"There is no route {path}.", 405: f"{method} is not allowed for {path}."}
        shown = message.get(error.status_code, str(error.detail))
        answer = failed(request, HttpFailure(error.status_code, shown))
        answer.headers.update(error.headers or {})
        return answer

    @app.exception_handler(ClientDisconnect)
    async def _(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=499)  # nobody reads it; the log does

    app.add_middleware(Gate, keys=Keys(service.settings.keys), metrics=service.metrics)
    if service.settings.origins:  # a browser's question beforehand shows no key, so this comes before the gate
        app.add_middleware(CORSMiddleware, allow_origins=service.settings.origins, allow_methods=["GET", "POST"],
                           allow_headers=["*"], expose_headers=["X-Request-Id", "Retry-After"])
    return app
