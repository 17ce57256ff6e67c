"""What every request passes before the app sees it: name, token, room, size and time; what every answer carries."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import MutableMapping
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vitkit.errors import Busy, RequestError, TooLarge, TooSlow, Unauthorised, VitkitError
from vitkit.serve.service import Service
from vitkit.serve.uploads import WrongType

# The first row that fits says what an error's status is; all other mistakes of a client's are 422.
STATUS: dict[type[VitkitError], int] = {
    Unauthorised: 401,
    TooLarge: 413,
    TooSlow: 408,
    WrongType: 415,
    Busy: 503,
    RequestError: 400,
}
OPEN = ("/healthz", "/readyz")  # answered without a token and whoever calls: for whoever keeps us running
SECRET = ("/v1/", "/metrics", "/openapi.json")
DISCARD = 64 * 2**20, 5.0, 0.5  # bytes, seconds and silence to which a refused body is read, to be heard

HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(self), microphone=(), geolocation=()",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
    "media-src 'self' blob:; base-uri 'none'; form-action 'none'; frame-ancestors {frames}"
)


def status_of(error: VitkitError) -> int:
    """The HTTP status of an error."""
    return next((status for kind, status in STATUS.items() if isinstance(error, kind)), 422)


def body_of(error: VitkitError) -> dict[str, str]:
    """What a client is told: the sentence that the command line prints, and the error's name."""
    return {"error": str(error), "kind": type(error).__name__}


class Middleware:
    """ASGI middleware around the app.

    Args:
        app: what is behind it.
        service: whose settings, readiness and metrics count.
        paths: paths that metrics name; the others are counted as `other`.
    """

    def __init__(self, app: ASGIApp, service: Service, paths: frozenset[str]) -> None:
        self.app, self.service, self.settings, self.paths = app, service, service.settings, paths
        self.inside = 0  # requests that are being answered
        self.held = 0  # bytes of their bodies
        self.accepted = 0  # of all times
        self.answered = 0
        self.policy = POLICY.format(frames=self.settings.embed_in or "'none'")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start, path = time.perf_counter(), scope["path"] if scope["path"] in self.paths else "other"
        visit = RequestContext(self, receive, send)
        self.inside += 1
        self.accepted += 1
        self.service.metrics.inside.inc()
        try:
            self.check(scope)
            await self.app(scope, visit.receive, visit.send)
        except VitkitError as error:
            await visit.refuse(error)
        finally:
            self.inside -= 1
            self.held -= visit.size
            self.service.metrics.inside.dec()
            if visit.complete:
                self.answered += 1
                self.service.metrics.requests.labels(path, str(visit.status)).inc()
                self.service.metrics.seconds.labels(path).observe(time.perf_counter() - start)

    def check(self, scope: Scope) -> None:
        """Refuse by what the request's head says."""
        s, headers, path = self.settings, Headers(scope=scope), scope["path"]
        if path in OPEN:
            return
        host = headers.get("host", "")
        name = host[: host.find("]") + 1] if host.startswith("[") else host.partition(":")[0]
        if s.hosts is not None and name.lower() not in s.hosts:
            raise RequestError(
                f"This server answers to {', '.join(s.hosts)}; the request was for another name. "
                f"Allow it with --allow-host."
            )
        if s.token is not None and path.startswith(SECRET):
            scheme, _, given = headers.get("authorization", "").partition(" ")
            right = secrets.compare_digest(given.strip().encode("utf-8", "replace"), s.token.encode())
            if scheme.lower() != "bearer" or not right:
                raise Unauthorised("This server wants its token: send the header `Authorization: Bearer TOKEN`.")
        if scope["method"] == "POST":
            if self.inside > s.max_requests:
                raise Busy(
                    f"The server is busy: {s.max_requests} requests are its limit. "
                    f"Try again in {self.service.logits.patience()} s."
                )
            length = headers.get("content-length", "0")
            if length.isdecimal() and (len(length) > 15 or int(length) > s.max_bytes):
                raise too_large(self)


def too_large(middleware: Middleware) -> TooLarge:
    """The error of a body over the limit."""
    return TooLarge(
        f"The request is larger than the {middleware.settings.max_megabytes:g} MB that this server takes. "
        f"Send fewer or smaller images."
    )


class RequestContext:
    """One request's way through the middleware: its body is counted and timed, its answer gets our headers."""

    def __init__(self, middleware: Middleware, receive: Receive, send: Send) -> None:
        self.middleware, self._receive, self._send = middleware, receive, send
        self.deadline = time.monotonic() + middleware.settings.body_seconds
        self.size, self.more, self.gone = 0, True, False
        self.status, self.started, self.complete = 0, False, False

    async def receive(self) -> Message:
        """The next part of the body."""
        if not self.more:
            return await self._receive()  # waits for the client to go away
        try:
            async with asyncio.timeout(max(0.0, self.deadline - time.monotonic())):
                message = await self._receive()
        except TimeoutError:
            raise TooSlow(
                f"The request did not arrive within {self.middleware.settings.body_seconds:g} s. Send it again, "
                f"smaller or over a faster line."
            ) from None
        self.size += len(message.get("body", b""))
        self.middleware.held += len(message.get("body", b""))
        self.more = bool(message.get("more_body"))
        self.gone = message["type"] == "http.disconnect"
        if self.size > self.middleware.settings.max_bytes:
            raise too_large(self.middleware)
        if self.middleware.held > self.middleware.settings.max_held_bytes:
            raise Busy("The server is busy: it holds as much as it can. Try again in a moment.")
        return message

    async def send(self, message: Message) -> None:
        """A part of the answer."""
        if message["type"] == "http.response.start":
            self.started, self.status = True, message["status"]
            headers = MutableHeaders(scope=_headers(message))
            for name, value in HEADERS.items():
                headers[name] = value
            headers["Content-Security-Policy"] = self.middleware.policy
            headers.setdefault("Cache-Control", "no-store")
            if self.middleware.service.stopping:
                headers["Connection"] = "close"
            if self.status >= 400 and self.more and not self.gone:
                await self.discard()
                if self.more:
                    headers["Connection"] = "close"
        await self._send(message)
        if message["type"] == "http.response.body" and not message.get("more_body"):
            self.complete = True

    async def discard(self) -> None:
        """Read some of what a refused client still sends: one who is writing does not hear an answer."""
        size, seconds, silence = DISCARD
        try:
            async with asyncio.timeout(seconds):
                while self.more and size > 0:
                    message = await asyncio.wait_for(self._receive(), silence)
                    size -= len(message.get("body", b"")) or 1
                    self.more = bool(message.get("more_body"))
        except TimeoutError:
            pass

    async def refuse(self, error: VitkitError) -> None:
        """Answer with an error's sentence."""
        if self.started:
            return
        body = json.dumps(body_of(error)).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            *((name.encode(), value.encode()) for name, value in extra(error, self.middleware.service).items()),
        ]
        await self.send({"type": "http.response.start", "status": status_of(error), "headers": headers})
        await self.send({"type": "http.response.body", "body": body})


def extra(error: VitkitError, service: Service) -> dict[str, str]:
    """Headers that an error's status calls for."""
    if isinstance(error, Busy):
        return {"Retry-After": str(service.logits.patience() if service.ready else 5)}
    return {"WWW-Authenticate": "Bearer"} if isinstance(error, Unauthorised) else {}


def _headers(message: Message) -> MutableMapping[str, Any]:
    message["headers"] = list(message.get("headers", []))
    return message
