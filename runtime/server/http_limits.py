"""uvicorn's HTTP protocol, with limits on the head of a request; `runtime.server.middleware` limits bodies."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

HEAD_BYTES = 64 * 1024
"""Largest request line and headers together; what comes in one read from the socket may exceed it."""


class LimitedProtocol(HttpToolsProtocol):
    """Closes connections whose next request's head is too long, or does not arrive in time.

    Args:
        head_seconds: in which a head must arrive, counted from the connection or from the head's first byte.
    """

    def __init__(self, *given: Any, head_seconds: float, **named: Any) -> None:
        super().__init__(*given, **named)
        self._head_seconds = head_seconds
        self._head_timer: asyncio.TimerHandle | None = None  # only while a head is not complete
        self._head_bytes, self._in_head = 0, True

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_arrived()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._in_head and (self.cycle is None or self.cycle.response_complete):
            self._head_bytes, self._in_head = 0, True
        self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head:
            self._wait()
            if self._head_bytes > HEAD_BYTES:
                self._refuse(431)

    def on_headers_complete(self) -> None:
        self._head_arrived()
        super().on_headers_complete()

    def _wait(self) -> None:
        """For the rest of a head; most come whole and are not waited for."""
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self._head_seconds, self._refuse, 408)

    def _head_arrived(self) -> None:
        self._in_head = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, status: int) -> None:
        self._head_arrived()
        if not self.transport.is_closing():
            self.transport.write(STATUS_LINE[status] + b"content-length: 0\r\nconnection: close\r\n\r\n")
            self.transport.close()
