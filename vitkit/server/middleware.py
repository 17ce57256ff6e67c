"""Checks that every request passes before it reaches the app, and the headers that every answer carries."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vitkit.errors import BadImage, Busy, RequestError, TooLarge, TooSlow, Unauthorised, VitkitError
from vitkit.server.fair import trim
from vitkit.server.pages import EXPLORE, MODEL
from vitkit.server.service import Service
from vitkit.server.settings import LOCAL
from vitkit.server.uploads import WrongType

log = logging.getLogger("vitkit")
T = TypeVar("T")


class WrongOrigin(RequestError):
    """A request that a page of another site made a browser send."""


class HeadTooLarge(RequestError):
    """A request whose head exceeds the limits."""


# The first row that matches gives an error's HTTP status; any other error that a client can cause is 422.
STATUS: dict[type[VitkitError], int] = {
    Unauthorised: 401,
    WrongOrigin: 403,
    HeadTooLarge: 431,
    TooLarge: 413,
    TooSlow: 408,
    WrongType: 415,
    Busy: 503,
    RequestError: 400,
}
OPEN = ("/healthz", "/readyz")  # answered without a token and under any host name, for health checks
SECRET = ("/v1/", "/metrics", "/openapi.json", f"{EXPLORE}{MODEL}")  # answered only with the token
HEAD_BYTES, HEAD_LINES = 32 * 1024, 100  # of the head of a request
# How much of a refused body is read before the answer is sent: bytes, seconds in all, seconds without data.
DISCARD = 64 * 2**20, 5.0, 0.5
LARGE_BODY = 2**20  # bytes
# What a request and a byte of it cost the event loop, roughly, in seconds of processor time.
REQUEST_SECONDS, BYTE_SECONDS = 0.002, 1e-8
TRIM_SECONDS = 1.0  # how soon memory is given back after a large request

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
# The explorable page alone may compile WebAssembly and start workers, and may share memory between them.
EXPLORE_POLICY = POLICY.replace("script-src 'self'", "script-src 'self' 'wasm-unsafe-eval'; worker-src 'self'")
EXPLORE_HEADERS = {
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Embedder-Policy": "require-corp",
}


def sentence_of(error: VitkitError) -> str:
    """What an error tells a client, who sends requests and does not see the command line."""
    if isinstance(error, BadImage):
        return f"{error.sentence} Send the file again, or convert it to JPEG or PNG."
    return str(error)


def error_response(error: VitkitError, service: Service) -> JSONResponse:
    """The answer to a request that failed: one sentence, and the error's name."""
    headers = {}
    if isinstance(error, Busy):
        headers["Retry-After"] = str(service.logits.retry_after() if service.ready else 5)
    if isinstance(error, Unauthorised):
        headers["WWW-Authenticate"] = "Bearer"
    status = next((status for kind, status in STATUS.items() if isinstance(error, kind)), 422)
    return JSONResponse({"error": sentence_of(error), "kind": type(error).__name__}, status, headers)


class Middleware:
    """ASGI middleware around the app.

    Args:
        app: the app behind it.
        service: the service whose settings, readiness and metrics are used.
        paths: the paths that metrics name; all others are counted as `other`.
    """

    def __init__(self, app: ASGIApp, service: Service, paths: frozenset[str]) -> None:
        self.app, self.service, self.settings, self.paths = app, service, service.settings, paths
        self.max_bytes = int(self.settings.max_megabytes * 2**20)  # of one request
        self.max_held_bytes = 8 * self.max_bytes  # of all requests in progress together
        self.arriving: dict[RequestContext, None] = {}  # requests whose bodies are not complete, the oldest first
        self.in_progress = 0  # POST requests whose bodies are complete
        self.held = 0  # bytes of all bodies
        self.accepted = 0  # requests since the start
        self.answered = 0
        self.trimming = False  # whether memory will be given back soon
        self.advised = False  # whether the log has said how to allow a host name
        frames = self.settings.embed_in or "'none'"
        self.headers = {**HEADERS, "Content-Security-Policy": POLICY.format(frames=frames)}
        self.explore_headers = {
            **HEADERS,
            **EXPLORE_HEADERS,
            "Content-Security-Policy": EXPLORE_POLICY.format(frames=frames),
        }
        # Protects against DNS rebinding: a page of another site whose name was pointed at this machine.
        self.check_host = TrustedHostMiddleware(_host_is_allowed, self.settings.hosts or ("*",), www_redirect=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start, path = time.perf_counter(), scope["path"] if scope["path"] in self.paths else "other"
        client = (scope.get("client") or ("",))[0]
        headers = self.explore_headers if scope["path"].startswith(EXPLORE) else self.headers
        context = RequestContext(self, receive, send, headers, time.monotonic() + self.settings.body_seconds, client)
        self.accepted += 1
        self.service.metrics.in_progress.inc()
        try:
            if scope["path"] not in OPEN:
                await context.take_turn(REQUEST_SECONDS)
            await self.check(scope, receive, context)
            if scope["method"] == "POST" and path != "other":
                await context.gather()
            await self.app(scope, context.receive, context.send)
        except VitkitError as error:
            if not context.status:
                await error_response(error, self.service)(scope, context.receive, context.send)
        finally:
            context.leave()
            self.tidy(context.size)
            self.service.metrics.in_progress.dec()
            if context.complete:
                self.answered += 1
                self.service.metrics.requests.labels(path, str(context.status)).inc()
                self.service.metrics.seconds.labels(path).observe(time.perf_counter() - start)

    def tidy(self, size: int) -> None:
        """Soon after a large request, give its memory back to the system."""
        self.service.untidy |= size > LARGE_BODY
        if self.service.untidy and not self.trimming:
            loop, self.trimming = asyncio.get_running_loop(), True
            loop.call_later(TRIM_SECONDS, loop.run_in_executor, None, self._trim)

    def _trim(self) -> None:
        self.trimming = self.service.untidy = False
        trim()

    async def check(self, scope: Scope, receive: Receive, context: RequestContext) -> None:
        """Refuse a request for what its head says, before its body is read."""
        s, headers, path = self.settings, Headers(scope=scope), scope["path"]
        _check_head(scope, headers, context)
        if path in OPEN:
            return
        await self.check_host(scope, receive, self._refuse_host)
        if scope["method"] == "POST":
            self.check_origin(headers)
        if s.token is not None and path.startswith(SECRET):
            scheme, _, given = headers.get("authorization", "").partition(" ")
            right = secrets.compare_digest(given.strip().encode("utf-8", "replace"), s.token.encode())
            if scheme.lower() != "bearer" or not right:
                raise Unauthorised("This server requires a token: send the header `Authorization: Bearer TOKEN`.")
        if scope["method"] == "POST":
            length = headers.get("content-length", "0")
            if length.isdecimal() and (len(length) > 15 or int(length) > self.max_bytes):
                raise self.too_large()
            context.arrive()

    def check_origin(self, headers: Headers) -> None:
        """Refuse what a page of another site makes a browser send; programs send no Origin."""
        origin = headers.get("origin")
        if origin is None:
            return
        place = origin.partition("://")[2].lower()  # name[:port]
        # A page of another site cannot send X-Forwarded-Host without asking first, and is never allowed to.
        ours = (headers.get(name, "").lower() for name in ("host", "x-forwarded-host"))
        if place and any(place == host or host in (f"{place}:80", f"{place}:443") for host in ours):
            return
        name = place if place.endswith("]") else place.rpartition(":")[0] or place
        if any(_matches(name, host) for host in self.settings.hosts or () if host not in ("*", *LOCAL)):
            return
        self.advise("from a page of another site")
        raise WrongOrigin(
            "This server accepts no requests from pages of other sites. If the page is its own, reached through a "
            "proxy, the proxy must pass the Host header on."
        )

    async def _refuse_host(self, message: Message) -> None:
        self.advise("for another host name")
        raise RequestError(
            f"This server answers to {', '.join(self.settings.hosts or ())}; the request was for another host name. "
            f"Use one of these names."
        )

    def advise(self, what: str) -> None:
        """Tell the operator, once, about an option that clients need not know."""
        if not self.advised:
            log.warning("refused a request %s; if the name is this server's own, allow it with --allow-host.", what)
        self.advised = True

    def too_large(self) -> TooLarge:
        """The error for a body over the limit."""
        return TooLarge(
            f"The request is larger than the {self.settings.max_megabytes:g} MB that this server accepts. "
            f"Send fewer or smaller images."
        )


def _check_head(scope: Scope, headers: Headers, context: RequestContext) -> None:
    """Refuse a head over the limits, or one that says twice how long its body is."""
    size = len(scope.get("raw_path") or b"") + len(scope["query_string"])
    size += sum(len(name) + len(value) + 4 for name, value in scope["headers"])
    if size > HEAD_BYTES or len(scope["headers"]) > HEAD_LINES:
        raise HeadTooLarge(
            f"Expected a head of at most {HEAD_BYTES // 1024} KiB and {HEAD_LINES} header lines; got {size:,} bytes "
            f"and {len(scope['headers'])} lines. Send fewer or shorter headers."
        )
    if "transfer-encoding" in headers and "content-length" in headers:
        context.last = True  # what follows may be a second request, hidden from a proxy in front
        raise RequestError("The request has both Content-Length and Transfer-Encoding. Send one of them.")


def _matches(name: str, allowed: str) -> bool:
    """Whether a host name is allowed by a name or by `*.name`."""
    return name.endswith(allowed[1:]) if allowed.startswith("*.") else name == allowed


async def _host_is_allowed(scope: Scope, receive: Receive, send: Send) -> None:
    """The app behind `check_host`, which calls it for allowed host names and otherwise answers with `send`."""


@dataclass(eq=False)
class RequestContext:
    """One request in progress: measures and times its body, and adds our headers to its answer.

    Args:
        middleware: the middleware it passes through.
        read: the server's `receive`.
        write: the server's `send`.
        headers: the headers that its answer carries.
        deadline: when its body must have arrived, by `time.monotonic`.
        client: the address that it comes from.
    """

    middleware: Middleware
    read: Receive
    write: Send
    headers: dict[str, str]
    deadline: float
    client: str = ""
    size: int = 0  # bytes of its body so far
    more: bool = True  # whether there is more to come
    status: int = 0  # of the answer; 0 until it starts
    complete: bool = False
    last: bool = False  # whether to close the connection after the answer
    working: bool = False  # whether it has one of the places for requests in progress
    timer: asyncio.Timeout | None = None  # of what is being received
    why: str = ""  # why it was evicted
    parts: deque[Message] = field(default_factory=deque)  # of the body, that `gather` has read

    async def take_turn(self, seconds: float) -> None:
        """Charge the client for work that is about to be done, and wait if it has used too much."""
        pace = self.middleware.service.pace
        pace.charge(self.client, seconds)
        if wait := pace.wait(self.client):
            await asyncio.sleep(wait)

    def arrive(self) -> None:
        """Begin to receive the body; if too many are arriving, the oldest of the client with the most makes room."""
        arriving, most = self.middleware.arriving, self.middleware.settings.max_requests
        while len(arriving) >= most:
            greedy = Counter(one.client for one in arriving).most_common(1)[0][0]
            oldest = next(one for one in arriving if one.client == greedy)
            oldest.evict("many requests are arriving, and this one was the slowest to arrive")
        arriving[self] = None

    async def gather(self) -> None:
        """Read the whole body before the app sees the request: one that never ends costs no more than its bytes."""
        await self._in_time(self._gather)

    async def _gather(self) -> None:
        while self.more:
            message = await self._read()
            if message["type"] == "http.disconnect":
                self.more = False
                raise RequestError("The client disconnected before it had sent the whole request.")
            self.parts.append(message)

    def work(self) -> None:
        """Take a place among the requests in progress, now that the body is complete.

        Raises:
            Busy: all places are taken.
        """
        if self.middleware.arriving.pop(self, self) is self:
            return  # it was not a POST
        most = self.middleware.settings.max_requests
        if self.middleware.in_progress >= most:
            raise Busy(
                f"The server is busy: it already has {most} requests in progress, its limit. "
                f"Try again in {self.middleware.service.logits.retry_after()} s."
            )
        self.middleware.in_progress += 1
        self.working = True

    def evict(self, why: str) -> None:
        """Make room for other requests: the next part of the body counts as too late."""
        self.middleware.arriving.pop(self, None)
        self.deadline, self.why = 0.0, why
        if self.timer is not None and not self.timer.expired():
            self.timer.reschedule(asyncio.get_running_loop().time())

    def leave(self) -> None:
        """Give back everything that the request holds."""
        self.middleware.arriving.pop(self, None)
        self.middleware.held -= self.size
        self.middleware.in_progress -= self.working

    async def receive(self) -> Message:
        """Return the next part of the body."""
        if self.parts:
            return self.parts.popleft()
        return await (self._in_time(self._read) if self.more else self.read())  # the latter returns at a disconnect

    async def _in_time(self, receive: Callable[[], Awaitable[T]]) -> T:
        """Receive something before the deadline. One timer for a whole body keeps slow ones cheap."""
        try:
            async with asyncio.timeout(max(0.0, self.deadline - time.monotonic())) as self.timer:
                return await receive()
        except TimeoutError:
            if self.why:
                raise TooSlow(f"The server is busy: {self.why}. Try again.") from None
            raise TooSlow(
                f"The request did not arrive within {self.middleware.settings.body_seconds:g} s. Send a smaller one, "
                f"or use a faster connection."
            ) from None
        finally:
            self.timer = None

    async def _read(self) -> Message:
        if self.why:
            raise TimeoutError
        message = await self.read()
        await self.take_turn(len(message.get("body", b"")) * BYTE_SECONDS)
        self.size += len(message.get("body", b""))
        self.middleware.held += len(message.get("body", b""))
        self.more = bool(message.get("more_body"))
        if self.size > self.middleware.max_bytes:
            raise self.middleware.too_large()
        while self.middleware.held > self.middleware.max_held_bytes:
            others = [one for one in self.middleware.arriving if one is not self and one.size > self.size]
            if not others:
                raise Busy("The server is busy: its memory for requests is full. Try again in a moment.")
            largest = max(others, key=lambda one: one.size)
            largest.evict("its memory for requests is full, and this one was the largest")
            self.middleware.held -= largest.size
            largest.size = 0
        if not self.more:
            self.work()
        return message

    async def send(self, message: Message) -> None:
        """Send a part of the answer."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers.update(self.headers)
            headers.setdefault("Cache-Control", "no-store")
            if self.middleware.service.stopping or self.last:
                headers["Connection"] = "close"
            if self.status >= 400 and self.more and not self.last:
                await self.discard()
                if self.more:
                    headers["Connection"] = "close"
        await self.write(message)
        if message["type"] == "http.response.body" and not message.get("more_body"):
            self.complete = True

    async def discard(self) -> None:
        """Read some of what a refused client is still sending: it reads no answer before it has sent its request."""
        size, seconds, silence = DISCARD
        try:
            async with asyncio.timeout(seconds):
                while self.more and size > 0:
                    message = await asyncio.wait_for(self.read(), silence)
                    size -= len(message.get("body", b"")) or 1
                    self.more = bool(message.get("more_body"))
        except TimeoutError:
            pass
