"""What every request passes: its id, the API key, the log line."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import secrets
import time
from collections.abc import Iterable
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deepinfer.runtime import events
from deepinfer.runtime.server.failures import HttpFailure, error_response
from deepinfer.runtime.server.service import MetricsBook

_LOGGER = logging.getLogger("deepinfer")
_ID = re.compile(r"[A-Za-z0-9._:\-]{1,128}")
_QUIET = frozenset({"/health", "/ready", "/version", "/metrics"})  # probes that come every few seconds get no line
_OPEN = _QUIET | {"/"}  # what needs no key


def tenant_of(key: str) -> str:
    """The name under which the prefix cache and its store know whoever has a key."""
    return hashlib.sha256(b"deepinfer tenant\0" + key.encode()).hexdigest()[:32]


class Keys:
    """API keys, compared in constant time by their hashes."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = {tenant_of(key): hashlib.sha256(key.encode()).digest() for key in keys}

    def __bool__(self) -> bool:
        return bool(self._digests)

    def tenant(self, headers: Headers) -> str | None:
        """Whose key a request shows, as `Authorization: Bearer` or `x-api-key`; None: nobody's."""
        shown = headers.get("x-api-key", "")
        scheme, _, token = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            shown = token.strip()
        digest = hashlib.sha256(shown.encode("utf-8", "surrogateescape")).digest()
        found = [name for name, known in self._digests.items() if hmac.compare_digest(digest, known)]
        return found[0] if found else None


class Gate:
    """ASGI middleware around all routes. What a route did not foresee ends that request alone, with a 500."""

    def __init__(self, app: ASGIApp, keys: Keys, metrics: MetricsBook) -> None:
        self._app, self._keys, self._metrics = app, keys, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, path = Headers(scope=scope), scope["path"]
        given = headers.get("x-request-id", "")
        request_id = given if _ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"
        notes: dict[str, Any] = {}
        tenant = self._keys.tenant(headers)
        scope.setdefault("state", {}).update(request_id=request_id, notes=notes, tenant=tenant)
        began, status = time.monotonic(), 0

        async def send_marked(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(raw=message.setdefault("headers", []))["X-Request-Id"] = request_id
            await send(message)

        try:
            if self._keys and path not in _OPEN and tenant is None:
                self._metrics.refused("unauthorized")
                failure = HttpFailure(401, "No valid API key was sent: use Authorization: Bearer KEY or x-api-key.",
                                      code="invalid_api_key")
                await error_response(path, failure, request_id)(scope, receive, send_marked)
            else:
                await self._app(scope, receive, send_marked)
        except Exception as error:  # of this request only: the others go on
            _LOGGER.error("a bug in the server, request %s", request_id, exc_info=error)
            if not status:
                failure = HttpFailure(500, "The server met a bug of its own; its log has the details.",
                                      code="internal_error")
                await error_response(path, failure, request_id)(scope, receive, send_marked)
        finally:
            route = scope.get("route")
            known = getattr(route, "path", None)
            self._metrics.answered(known or "none", status)
            if path not in _QUIET:
                events.info("request", id=request_id, method=scope["method"], route=known or "none", status=status,
                            seconds=round(time.monotonic() - began, 4), **notes)
