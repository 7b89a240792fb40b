"""uvicorn's HTTP protocol, with limits on heads, connections and clients that do not read.

`runtime.server.middleware` limits bodies.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from typing import Any

from pydantic_core import to_json
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from runtime.server.errors import ApiError
from runtime.server.options import ServerOptions

log = logging.getLogger(__name__)

HEAD_BYTES = 64 * 1024
"""Largest request line, headers and trailers together. What has no end yet may exceed it by one read of the socket."""
HEAD_FIELDS = 256
"""Most headers and trailers of a request."""
MAX_PIPELINED = 16
"""Most requests that a connection may send ahead of their answers."""
SPARE_FILES = 64
"""Files that the process may still open when all connections are taken; as many more connections get an error."""


def connection_limit(options: ServerOptions) -> int:
    """Connections that may be open at a time: what the options say, as far as the process may open so many files."""
    limit = options.max_connections
    if sys.platform == "win32":
        return limit
    import resource

    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    allowed = files - len(os.listdir("/dev/fd")) - 2 * SPARE_FILES
    if files != resource.RLIM_INFINITY and allowed < limit:
        limit = max(1, allowed)
        log.info("at most %d connections, because the process may open %d files (ulimit -n)", limit, files)
    return limit


class LimitedProtocol(HttpToolsProtocol):
    """Closes connections whose heads are too long or late, or whose clients do not take what they are sent.

    Where all connections are taken, a new one takes the place of the one that has been without a complete request for
    longest. Where there is none either, requests on it are answered with 503.

    Args:
        limit: connections that may be open at a time.
    """

    def __init__(self, *given: Any, options: ServerOptions, limit: int, **named: Any) -> None:
        super().__init__(*given, **named)
        self._options, self._limit = options, limit
        self._late: asyncio.TimerHandle | None = None  # while something of a request has to arrive
        self._unread: asyncio.TimerHandle | None = None  # while the client has to read
        self._in_head, self._fields, self._field_bytes = True, 0, 0
        self._progress, self._loose = False, 0  # bytes received since a part of a message was complete
        self._since, self._full = self.loop.time(), False
        self._cycles: list[RequestResponseCycle] = []  # those that are not answered; uvicorn forgets all but the last

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect()
        if len(self.connections) > self._limit:
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        self._arrived()
        self._disconnected()
        if self._unread is not None:
            self._unread.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._progress = False
        super().data_received(data)
        self._loose = 0 if self._progress else self._loose + len(data)
        if self._loose > HEAD_BYTES:
            self._refuse(_too_long())
        elif self._in_head and self._late is None:
            self._expect()

    # What the parser finds in it

    def on_message_begin(self) -> None:
        self._in_head, self._fields, self._field_bytes = True, 0, 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or a trailer."""
        if not self.transport.is_closing():
            super().on_header(name, value)
            self._fields += 1
            self._count(len(name) + len(value))

    def on_headers_complete(self) -> None:
        self._arrived()
        self._in_head, self._progress = False, True
        if self._full:
            message = f"all {self._limit} connections are taken; try again"
            self._refuse(ApiError(503, message, code="too_many_connections", headers={"retry-after": "1"}))
        if not self.transport.is_closing():
            super().on_headers_complete()
            self._cycles.append(self.cycle)
            if len(self.pipeline) > MAX_PIPELINED:
                self._refuse(_too_long())

    def on_body(self, body: bytes) -> None:
        self._progress = True
        if not self.transport.is_closing():
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._progress = True
        self._arrived()
        if not self.transport.is_closing():
            super().on_message_complete()

    # What is sent

    def on_response_complete(self) -> None:
        self._since = self.loop.time()
        self._cycles = [cycle for cycle in self._cycles if not cycle.response_complete]
        super().on_response_complete()
        if self.cycle.more_body:  # the application does not read the rest of its body, but it must end
            self._expect()
        self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._watch()

    def _watch(self) -> None:
        """Start the timeout of a client that does not read, if it has something to read."""
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
        if self.transport.get_write_buffer_size():
            self._unread = self.loop.call_later(self._options.send_seconds, self._give_up)

    def _give_up(self) -> None:
        """The client took nothing: neither so much that more may be written, nor the end of the answer."""
        if self.transport.get_write_buffer_size() and (self.flow.write_paused or not self._cycles):
            self._abort()

    # Limits

    @property
    def _idle(self) -> bool:
        """Whether no complete request is being answered."""
        return not self.transport.is_closing() and all(cycle.more_body for cycle in self._cycles)

    def _disconnected(self) -> None:
        """Tell every request that is being answered that the client has gone; uvicorn tells the last one only."""
        for cycle in self._cycles:
            cycle.disconnected = True
            cycle.message_event.set()

    def _abort(self) -> None:
        self._disconnected()
        self.transport.abort()

    def _make_room(self) -> None:
        still = [one for one in self.connections if not one.transport.is_closing()]
        idle = [one for one in still if one is not self and isinstance(one, LimitedProtocol) and one._idle]
        if len(still) <= self._limit:
            return
        if idle:
            message = "the connection was needed for another client; send the request again"
            min(idle, key=lambda one: one._since)._refuse(ApiError(408, message, code="timeout"))
            return
        self._full = True
        if len(still) > self._limit + SPARE_FILES:
            self.transport.abort()

    def _count(self, size: int) -> None:
        self._field_bytes += size
        if self._field_bytes > HEAD_BYTES or self._fields > HEAD_FIELDS:
            self._refuse(_too_long())

    def _expect(self) -> None:
        """Wait for the rest of a head, or of a body that is not read; most heads come whole and need no wait."""
        self._arrived()
        seconds = self._options.body_seconds
        error = ApiError(408, f"the request did not arrive within {seconds:g} s", code="timeout")
        self._late = self.loop.call_later(seconds, self._refuse, error)

    def _arrived(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _refuse(self, error: ApiError) -> None:
        """Answer and close; or only close, in the middle of another answer."""
        self._arrived()
        if self.transport.is_closing():
            return
        if self._cycles:
            self._abort()
            return
        body, fields = to_json(error.body), {"connection": "close", "content-type": "application/json"}
        fields |= {"content-length": str(len(body)), **(error.headers or {})}
        head = b"".join(b"%b: %b\r\n" % (name.encode(), value.encode()) for name, value in fields.items())
        self.transport.write(STATUS_LINE[error.status] + head + b"\r\n" + body)
        self.transport.close()
        self._watch()


def _too_long() -> ApiError:
    problem = f"more than {HEAD_BYTES} bytes or {HEAD_FIELDS} fields of headers, or {MAX_PIPELINED} requests ahead"
    return ApiError(431, problem, code="head_too_large")
