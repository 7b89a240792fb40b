"""What stands before every route: the client's key, limits of bodies, the count of responses. Plain ASGI."""

from __future__ import annotations

import asyncio
import hmac
import socket
from collections import Counter
from collections.abc import Callable
from hashlib import sha256
from ipaddress import IPv6Address, ip_address
from typing import NamedTuple

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.server.errors import ApiError, api_error
from runtime.server.options import ServerOptions

CLIENT = "mtad.client"
"""Key of an ASGI scope: the request's `Client`."""

BODIES_AT_ONCE = 32
"""The bodies of all requests together may take as much memory as so many of the largest bodies."""

_CLOSE = {"connection": "close"}


class Client(NamedTuple):
    """The sender of a request.

    Attributes:
        name: for fairness: one per API key, or per address where no keys are used.
        key: stands for the API key, without being it; empty where no keys are used.
    """

    name: str
    key: str = ""


class Guard:
    """ASGI middleware.

    However many requests arrive at once, each turn of the event loop begins one of them, so that turns stay short for
    the streams that run. A question for health does not line up.

    Args:
        responded: called with the path and status of each response.
    """

    def __init__(self, app: ASGIApp, options: ServerOptions, responded: Callable[[str, int], None]) -> None:
        self._app, self._options, self._responded = app, options, responded
        self._digests = [sha256(key.encode()).digest() for key in options.api_keys]
        self._one_per_turn = asyncio.Lock()
        self._body_bytes = 0  # bytes of bodies whose requests have not ended
        self._hosts = {name.lower() for name in (*options.allowed_host, "localhost", socket.gethostname())}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["app"] = self  # then Starlette raises what it has no route for, and does not answer in its own words
        begun, received = False, Counter[str]()

        async def counted(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                self._responded(scope["path"], message["status"])
            await send(message)

        try:
            headers = Headers(scope=scope)
            if CLIENT not in scope:  # of a replica, the gateway has checked it
                scope[CLIENT] = self._client(scope, headers)
            if scope["path"] != "/health":
                async with self._one_per_turn:
                    await asyncio.sleep(0)
            await self._app(scope, self._limited(headers, receive, received), counted)
        except ClientDisconnect:
            pass  # the client left while it was still sending, and cannot be answered
        except Exception as error:
            if begun:
                raise
            await api_error(error).response(scope, receive, counted)
        finally:
            self._body_bytes -= received.total()

    def _client(self, scope: Scope, headers: Headers) -> Client:
        """The client; for models, wherever the application is mounted, it must be an allowed one."""
        address = scope.get("client")
        client = Client(_network(address[0]) if address else "")
        if "/v1/" not in scope["path"]:
            return client
        if not self._digests:
            self._check_host(headers.get("host", ""))
            return client
        key = self._check_key(headers)
        return Client(key, key)

    def _check_key(self, headers: Headers) -> str:
        """Compares digests with every key, so that time tells nothing about any of them; returns what stands for it."""
        scheme, _, key = headers.get("authorization", "").partition(" ")
        digest = sha256(key.strip().encode("utf-8", errors="replace")).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if scheme.lower() != "bearer" or not any(matches):
            message = "wrong or no API key; send `Authorization: Bearer KEY`"
            raise ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
        return sha256(digest).hexdigest()

    def _check_host(self, host: str) -> None:
        """Without keys, only names of this server: a web page may have its own name lead here (DNS rebinding)."""
        name = host.lower().rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host.lower()
        if not name or name in self._hosts or name.endswith(".localhost") or _is_address(name.strip("[]")):
            return
        message = f"{name[:100]!r} is no known name of this server; start it with --allowed-host or API keys"
        raise ApiError(403, message, code="host_not_allowed")

    def _limited(self, headers: Headers, receive: Receive, received: Counter[str]) -> Receive:
        """`receive` within the limits of size and time; raises `ApiError`. Counts what it receives in `received`."""
        most, complete = self._options.max_body_bytes, False
        message = f"the body is larger than {most} bytes, the server's limit"
        too_large = ApiError(413, message, code="body_too_large", headers=_CLOSE)
        declared = headers.get("content-length", "0")
        if declared.isdecimal() and int(declared[:20]) > most:
            raise too_large
        deadline = asyncio.get_running_loop().time() + self._options.body_seconds

        async def limited() -> Message:
            nonlocal complete
            if complete:  # from now on it says when the client goes away
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                late = f"the body did not arrive within {self._options.body_seconds:g} s"
                raise ApiError(408, late, code="timeout", headers=_CLOSE) from None
            size = len(message.get("body", b""))
            received["body"] += size
            self._body_bytes += size
            complete = not message.get("more_body", False)
            if received["body"] > most:
                raise too_large
            if self._body_bytes > BODIES_AT_ONCE * most:
                problem = "too many large requests are being sent; try again"
                raise ApiError(503, problem, code="unavailable", headers={**_CLOSE, "retry-after": "1"})
            if complete:  # it may have come with many others
                async with self._one_per_turn:
                    await asyncio.sleep(0)
            return message

        return limited


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _network(address: str) -> str:
    """The addresses that one client is likely to have: one of version 4, or a network of 64 bits of version 6."""
    if ":" not in address or not _is_address(address):
        return address
    six = IPv6Address(address)
    return str(six.ipv4_mapped or IPv6Address(int(six) >> 64 << 64))
