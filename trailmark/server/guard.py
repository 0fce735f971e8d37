"""Who may ask: the door before the application."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trailmark.server.errors import RequestError
from trailmark.server.keys import is_loopback
from trailmark.server.metrics import Metrics

_MOST_HEADERS = 100
_OPEN = ("/health",)  # to a probe that has no key


class Guard:
    """Refuses what comes without a key; without keys, what a page of another site has a browser send.

    Args:
        keys: each as a client sends it. None: everybody on this machine may ask, under a name of loopback.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str], metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # a WebSocket: it is refused before it is one
            await send({"type": "websocket.close", "code": 1008})
            return
        status = 500

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        refusal = self._refusal(scope)
        try:
            if refusal is None:
                await self._app(scope, receive, counted)
            else:
                await refusal.response()(scope, receive, counted)
        finally:
            self._metrics.answered(getattr(scope.get("route"), "path", "other"), status)

    def _refusal(self, scope: Scope) -> RequestError | None:
        if len(scope["headers"]) > _MOST_HEADERS:
            return RequestError(431, f"headers: expected at most {_MOST_HEADERS}, there are more.")
        headers: dict[bytes, bytes] = dict(scope["headers"])
        if not self._digests:
            return _from_elsewhere(headers)
        if scope["path"] in _OPEN:
            return None
        kind, _, key = headers.get(b"authorization", b"").partition(b" ")
        digest = _digest(key.strip())
        # all are compared, each in a time that tells nothing of where they differ
        known = [hmac.compare_digest(digest, own) for own in self._digests]
        if kind.lower() == b"bearer" and any(known):
            return None
        return RequestError(
            401,
            "Incorrect API key provided: expected one of the server's, as Authorization: Bearer KEY.",
            code="invalid_api_key",
        )


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _from_elsewhere(headers: dict[bytes, bytes]) -> RequestError | None:
    """A page that a browser shows reaches loopback too: under its own site's name, or with its site as the origin."""
    host = headers.get(b"host", b"").decode("latin-1")
    if not is_loopback(f"//{host}"):
        return RequestError(403, "host: expected localhost or a loopback address, where no key is asked for.")
    origin = headers.get(b"origin")
    if origin is not None and not is_loopback(origin.decode("latin-1")):
        return RequestError(
            403, "origin: expected none or a page of this machine, where no key is asked for."
        )
    return None
