"""A closed loop of requests, each answer checked, and a lean HTTP client for it. The standard library alone.

`python -m scripts.load_client` reads jobs and then one slice's settings a line from standard input, and writes each
slice's figures as a line of JSON: the client of `scripts.server_load`, in a process of its own.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Job:
    """A request and its answer.

    Attributes:
        prompt: text.
        seed: of its random numbers.
        params: other fields of the request.
        token_ids, text: what must come back.
    """

    prompt: str
    seed: int
    params: dict[str, Any]
    token_ids: list[int]
    text: str


@dataclass
class Figures:
    """One slice.

    Attributes:
        seconds: its length, as measured.
        tokens, all: that arrived in it; those that arrived later as well.
        answers: requests that ended with exactly the tokens and the text they must have.
        wrong: what else happened, in words; requests still running at the end are waited for and count.
        first, block: seconds from sending to the first tokens, and between two arrivals of a request.
        processor: seconds of CPU time this process used.
        server: seconds of CPU time the server's thread used, up to the last answer.
    """

    seconds: float = 0.0
    tokens: int = 0
    all: int = 0
    answers: int = 0
    wrong: list[str] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    block: list[float] = field(default_factory=list)
    processor: float = 0.0
    server: float = 0.0


Ask = Callable[[int, Job], AsyncIterator[tuple[list[int], str]]]
"""(connection, job) -> the answer's pieces: token ids, text."""


async def drive(ask: Ask, jobs: Sequence[Job], connections: int, seconds: float, first: int = 0) -> Figures:
    """Keep `connections` requests in flight for `seconds`; then wait for those that run.

    Args:
        ask: sends one.
        jobs: taken in turn, again and again.
        connections: requests in flight.
        seconds: after which no request is sent and no token counted any more.
        first: the first job.
    """
    figures, order = Figures(), itertools.count(first)
    used, started = time.process_time(), time.perf_counter()
    end = started + seconds

    async def connection(number: int) -> None:
        while time.perf_counter() < end:
            job = jobs[next(order) % len(jobs)]
            tokens, text = list[int](), ""
            last = sent = time.perf_counter()
            try:
                async for ids, piece in ask(number, job):
                    now = time.perf_counter()
                    (figures.block if tokens else figures.first).append(now - last)
                    last = now
                    figures.all += len(ids)
                    figures.tokens += len(ids) if now < end else 0
                    tokens += ids
                    text += piece
            except Exception as error:
                figures.wrong.append(f"seed {job.seed}: {type(error).__name__}: {error}")
                if time.perf_counter() - sent < 0.1:
                    await asyncio.sleep(0.1)  # refused at once: do not flood
                continue
            if (tokens, text) == (job.token_ids, job.text):
                figures.answers += 1
            else:
                figures.wrong.append(f"seed {job.seed}: got {tokens}, not {job.token_ids}")

    tasks = [asyncio.create_task(connection(number)) for number in range(connections)]
    await asyncio.sleep(end - time.perf_counter())
    figures.seconds, figures.processor = time.perf_counter() - started, time.process_time() - used
    await asyncio.gather(*tasks)
    return figures


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


class HttpClient:
    """Streams completions over connections that stay open."""

    def __init__(self, host: str, port: int, model: str) -> None:
        self._host, self._port, self._model = host, port, model
        self._open: dict[int, tuple[asyncio.StreamReader, asyncio.StreamWriter]] = {}

    async def ask(self, connection: int, job: Job) -> AsyncIterator[tuple[list[int], str]]:
        """See `Ask`."""
        if connection not in self._open:
            self._open[connection] = await asyncio.open_connection(self._host, self._port, limit=2**22)
        reader, writer = self._open[connection]
        asked = {"model": self._model, "prompt": job.prompt, "seed": job.seed, "stream": True, "return_token_ids": True}
        body = json.dumps(asked | job.params).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        complete = False
        try:
            status = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n", 1)[0].split()[1]
            if status != b"200":
                raise ConnectionError(f"HTTP status {status.decode()}")
            text = _Chunks()
            while not text.complete:
                for event in text.feed(await reader.read(2**16)):
                    if event == b"data: [DONE]":
                        complete = True
                    else:
                        choice = json.loads(event[6:])["choices"][0]
                        yield choice["token_ids"], choice["text"]
        finally:
            if not complete:
                self._open.pop(connection)[1].close()
        if not complete:
            raise ConnectionError("the stream ended early")

    def close(self) -> None:
        """Close all connections."""
        for _, writer in self._open.values():
            writer.close()
        self._open.clear()


def main() -> None:
    """Entry point of the client's process."""
    settings = json.loads(sys.stdin.readline())
    jobs = [Job(**job) for job in settings.pop("jobs")]

    async def one(slice: dict[str, Any]) -> Figures:
        client = HttpClient(**settings)
        try:
            return await drive(client.ask, jobs, **slice)
        finally:
            client.close()

    for line in sys.stdin:
        print(json.dumps(asdict(asyncio.run(one(json.loads(line))))), flush=True)


if __name__ == "__main__":
    main()
