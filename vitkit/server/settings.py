"""The limits of a server: every number that its operator can change."""

from __future__ import annotations

import ipaddress
import os
import re
from dataclasses import dataclass

from vitkit.errors import ConfigError
from vitkit.model import checks

LOCAL = ("localhost", "127.0.0.1", "[::1]")  # host names of requests from this machine


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The limits of a server; values that cannot work raise ConfigError.

    Args:
        max_batch: maximum images per forward pass.
        max_delay: maximum seconds that a decoded image waits for others that are still being decoded.
        max_queue: maximum images accepted and not yet answered; above it the answer is 503 with Retry-After.
        max_requests: maximum concurrent requests; above it the same 503. As many more may be arriving; when there are
            others, the one that has been arriving for longest is refused.
        max_files: maximum images per request.
        max_megabytes: maximum size of one request; all concurrent requests together may hold eight times as much.
        max_megapixels: maximum size of one image, read from its header before it is decoded.
        max_request_megapixels: maximum size of all images of one request together, and of all requests that one client
            has in progress.
        body_seconds: time in which a request must arrive.
        answer_seconds: time in which an accepted request is answered.
        threads: threads that decode images (default: one per core, at most 4).
        token: token that clients must send as `Authorization: Bearer TOKEN`; None for no token.
        hosts: host names under which the server can be reached, without ports; `*.example.com` for all subdomains.
            None for any.
        embed_in: address of a site that may show the page in a frame; None for no site.
    """

    max_batch: int = 16
    max_delay: float = 0.01
    max_queue: int = 256
    max_requests: int = 128
    max_files: int = 32
    max_megabytes: float = 32.0
    max_megapixels: float = 50.0
    max_request_megapixels: float = 400.0
    body_seconds: float = 30.0
    answer_seconds: float = 60.0
    threads: int = min(4, os.cpu_count() or 1)
    token: str | None = None
    hosts: tuple[str, ...] | None = None
    embed_in: str | None = None

    def __post_init__(self) -> None:
        for name in ("max_batch", "max_queue", "max_requests", "max_files", "threads"):
            checks.whole(name, getattr(self, name), 1)
        checks.number("max_delay", self.max_delay, 0, 10)
        for name in ("max_megabytes", "max_megapixels", "max_request_megapixels", "body_seconds", "answer_seconds"):
            checks.number(name, getattr(self, name), 0, open_low=True)
        if self.max_queue < self.max_files:
            raise ConfigError(
                f"max_queue must hold one full request; got {self.max_queue} for requests of up to "
                f"{self.max_files} files. Raise max_queue or lower max_files."
            )
        if self.max_request_megapixels < self.max_megapixels:
            raise ConfigError(
                f"max_request_megapixels must be at least max_megapixels; got {self.max_request_megapixels:g} for "
                f"images of up to {self.max_megapixels:g}."
            )
        if self.token is not None and (len(self.token) < 8 or not self.token.isascii() or " " in self.token):
            raise ConfigError(
                "token must have at least 8 ASCII characters and no space; make one with "
                "`python -c 'import secrets; print(secrets.token_urlsafe())'`."
            )
        if self.hosts is not None:
            object.__setattr__(self, "hosts", tuple(host_name(one) for one in self.hosts))
        if self.embed_in is not None and not self.embed_in.startswith(("https://", "http://")):
            raise ConfigError(
                f"embed_in must be a site's address such as https://huggingface.co; got {self.embed_in!r}."
            )


def host_name(text: str) -> str:
    """A host name as browsers send it, in lower case and without a port; an IPv6 address in brackets."""
    found = re.fullmatch(r"(\*|(?:\*\.)?[a-z0-9_.-]+|\[[a-f0-9:.]+\])(?::\d+)?", text.lower())
    try:
        if found is None or found[1].startswith("["):
            return f"[{ipaddress.IPv6Address(found[1].strip('[]') if found else text)}]"
    except ValueError:
        raise ConfigError(
            f"hosts must be names such as example.com, *.example.com or [::1]; got {text!r}. "
            f"Leave out the scheme and the path."
        ) from None
    return found[1]
