"""What a slice of load comes to: a closed loop of requests, each answer checked. The standard library alone."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
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

    def count(self, job: Job, sent: float, end: float, pieces: Iterator[tuple[float, list[int], str]]) -> None:
        """One request.

        Args:
            job: what was asked.
            sent: when.
            end: of the slice.
            pieces: of the answer: when each came, its tokens, its text; raises what went wrong.
        """
        tokens, text, last = list[int](), "", sent
        try:
            for when, ids, piece in pieces:
                (self.block if tokens else self.first).append(when - last)
                last = when
                self.all += len(ids)
                self.tokens += len(ids) if when < end else 0
                tokens += ids
                text += piece
        except Exception as error:
            self.wrong.append(f"seed {job.seed}: {type(error).__name__}: {error}")
            return
        if (tokens, text) == (job.token_ids, job.text):
            self.answers += 1
        else:
            self.wrong.append(f"seed {job.seed}: got {tokens}, not {job.token_ids}")


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
    asked: list[tuple[Job, float, list[tuple[float, list[int], str]], Exception | None]] = []
    used, started = time.process_time(), time.perf_counter()
    end = started + seconds

    async def connection(number: int) -> None:
        while time.perf_counter() < end:
            job, pieces, problem = jobs[next(order) % len(jobs)], list[tuple[float, list[int], str]](), None
            sent = time.perf_counter()
            try:
                async for ids, text in ask(number, job):
                    pieces.append((time.perf_counter(), ids, text))
            except Exception as error:
                problem = error
                if time.perf_counter() - sent < 0.1:
                    await asyncio.sleep(0.1)  # refused at once: do not flood
            asked.append((job, sent, pieces, problem))

    tasks = [asyncio.create_task(connection(number)) for number in range(connections)]
    await asyncio.sleep(end - time.perf_counter())
    figures.seconds, figures.processor = time.perf_counter() - started, time.process_time() - used
    await asyncio.gather(*tasks)
    for job, sent, pieces, problem in asked:
        figures.count(job, sent, end, _until(pieces, problem))
    return figures


def _until(pieces: Sequence[Any], problem: Exception | None) -> Iterator[Any]:
    yield from pieces
    if problem is not None:
        raise problem
