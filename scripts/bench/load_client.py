"""A lean HTTP client that keeps requests in flight. The standard library alone.

`python -m scripts.bench.load_client` reads jobs and then one slice's settings a line from standard input, and
writes each slice's figures as a line of JSON: the client of `scripts.bench.server_load`, in a process of its own.

While a slice runs the client does what no client can leave out: it writes requests and notes what bytes came when. What
they say is read and compared with what it must be after the slice, so that this work, a client's own, takes no time
from the server it shares cores with.
"""

from __future__ import annotations

import itertools
import json
import selectors
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field

from scripts.bench.load_figures import Figures, Job


class _Chunks:
    """Events from a body in HTTP's chunked coding."""

    def __init__(self) -> None:
        self._coded, self._plain, self.complete = b"", b"", False

    def feed(self, data: bytes) -> list[bytes]:
        """The events that `data` completes."""
        if not data:
            raise ConnectionError("the connection was closed")
        self._coded += data
        while (at := self._coded.find(b"\r\n")) > 0:
            size = int(self._coded[:at], 16)
            if len(self._coded) < at + size + 4:
                break
            self._plain += self._coded[at + 2 : at + 2 + size]
            self._coded = self._coded[at + size + 4 :]
            self.complete = size == 0
        *events, self._plain = self._plain.split(b"\n\n")
        return events


_LAST = b"\r\n0\r\n\r\n"
"""How a chunked body ends; JSON, of which its events are made, has no line break."""


@dataclass
class _Exchange:
    """A request on its way, and what has come back of it: when, which bytes."""

    job: Job
    sent: float
    arrived: list[tuple[float, bytes]] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        """Whether all of a stream has come."""
        data = self.arrived[-1][1]
        if len(data) < len(_LAST):
            data = b"".join(part for _, part in self.arrived[-len(_LAST) :])
        return data.endswith(_LAST)

    @property
    def broken(self) -> bool:
        """Whether no stream will come, or no more of it."""
        return not self.arrived[-1][1] or not self.arrived[0][1].startswith(b"HTTP/1.1 200")

    def pieces(self) -> Iterator[tuple[float, list[int], str]]:
        head, body, done = b"", _Chunks(), False
        for when, data in self.arrived:
            if b"\r\n\r\n" not in head:
                head += data
                if not head:
                    raise ConnectionError("the connection was closed")
                status = head.split(b"\r\n", 1)[0].split()[1:2]
                if status != [b"200"]:
                    raise ConnectionError(f"HTTP status {b''.join(status).decode()}")
                data = head.partition(b"\r\n\r\n")[2]
                if not data:
                    continue
            for event in body.feed(data):
                if event == b"data: [DONE]":
                    done = True
                else:
                    choice = json.loads(event[6:])["choices"][0]
                    yield when, choice["token_ids"], choice["text"]
        if not done:
            raise ConnectionError("the stream ended early")


class HttpClient:
    """Streams completions over connections that stay open.

    Args:
        host, port: of the server.
        model: its name there.
        jobs: see `load_figures.drive`.
    """

    def __init__(self, host: str, port: int, model: str, jobs: Sequence[Job]) -> None:
        self._address, self._jobs = (host, port), jobs
        self._requests = [self._request(host, model, job) for job in jobs]

    @staticmethod
    def _request(host: str, model: str, job: Job) -> bytes:
        asked = {"model": model, "prompt": job.prompt, "seed": job.seed, "stream": True, "return_token_ids": True}
        body = json.dumps(asked | job.params).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body

    def drive(self, connections: int, seconds: float, first: int = 0) -> Figures:
        figures, order, exchanges = Figures(), itertools.count(first), list[_Exchange]()
        used, started = time.process_time(), time.perf_counter()
        end, running = started + seconds, 0
        with selectors.DefaultSelector() as selector:

            def send(connection: socket.socket | None) -> None:
                """The next request, on this connection or on a new one."""
                number = next(order) % len(self._jobs)
                exchange = _Exchange(self._jobs[number], time.perf_counter())
                exchanges.append(exchange)
                if connection is None:
                    connection = socket.create_connection(self._address)
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    selector.register(connection, selectors.EVENT_READ, exchange)
                else:
                    selector.modify(connection, selectors.EVENT_READ, exchange)
                connection.sendall(self._requests[number])

            for _ in range(connections):
                send(None)
                running += 1
            while running:
                for key, _ in selector.select(max(0.0, end - time.perf_counter()) if not figures.seconds else None):
                    connection, exchange = key.fileobj, key.data
                    assert isinstance(connection, socket.socket)
                    try:
                        data = connection.recv(2**16)
                    except ConnectionError:
                        data = b""
                    now = time.perf_counter()
                    exchange.arrived.append((now, data))
                    whole = exchange.whole
                    if whole and now < end:
                        send(connection)
                    elif whole or exchange.broken:
                        selector.unregister(connection)
                        connection.close()
                        running -= 1
                        if now < end:
                            time.sleep(0.1 / connections)  # refused, or broken off: do not flood
                            send(None)
                            running += 1
                if not figures.seconds and (now := time.perf_counter()) >= end:
                    figures.seconds, figures.processor = now - started, time.process_time() - used
        for exchange in exchanges:
            figures.count(exchange.job, exchange.sent, end, exchange.pieces())
        return figures


def main() -> None:
    """Entry point of the client's process."""
    settings = json.loads(sys.stdin.readline())
    client = HttpClient(**{**settings, "jobs": [Job(**job) for job in settings["jobs"]]})
    for line in sys.stdin:
        print(json.dumps(asdict(client.drive(**json.loads(line)))), flush=True)


if __name__ == "__main__":
    main()
