"""The control streams, whose texts are known, and what the server holds meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtad.methods import METHODS
from scripts.clients.served import MODEL, Server
from scripts.soak.wire import replicas, told

if TYPE_CHECKING:
    from openai import AsyncOpenAI

STREAMS, LOST = 8, 120.0
"""Control streams at once, fewer than the server has rows; seconds after which one that has not ended is lost."""
ENDS = ("right", "wrong", "lost", "broken off", "turned away")
"""The text that it gets alone; another; an error or no end; told that its replica died; told that the queue is full."""

Job = tuple[dict[str, Any], str]
"""A request's fields beside the model, and the text that it gets alone."""


@dataclass
class Seen:
    """How control streams ended, what was wrong or lost, and times between two events: (when it ended, how long)."""

    ended: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    gaps: list[tuple[float, float]] = field(default_factory=list)


async def known_texts(client: AsyncOpenAI, count: int) -> list[Job]:
    """So many requests, of all methods in turn, and the text of each from an idle server, one after the other."""
    from scripts.demo import dataset

    jobs = []
    for seed, example in enumerate(dataset.load("test", "sql")[:count]):
        fields = {"method": list(METHODS)[seed % len(METHODS)], "draft_len": 1 + seed % 3}
        fields |= {"seed": seed, "temperature": (0.0, 0.7, 1.0)[seed % 3], "max_tokens": 48, "ignore_eos": True}
        alone = await client.completions.create(model=MODEL, prompt=example.prompt[:100], extra_body=fields)
        jobs.append(({"prompt": example.prompt[:100], **fields}, alone.choices[0].text))
    return jobs


async def crowd(client: AsyncOpenAI, jobs: Sequence[Job], ended: Callable[[], bool]) -> Seen:
    """Keep control streams going until it has ended."""
    from openai import APIError, RateLimitError

    seen = Seen()

    async def ask(fields: dict[str, Any], known: str) -> None:
        text, last, problem = "", 0.0, ""
        try:
            async with asyncio.timeout(LOST):
                stream = await client.completions.create(model=MODEL, prompt="", stream=True, extra_body=fields)
                async for chunk in stream:
                    now = time.monotonic()
                    if last:
                        seen.gaps.append((now, now - last))
                    last, text = now, text + chunk.choices[0].text
            how = "right" if text == known else "wrong"
        except RateLimitError:
            how = "turned away"
            await asyncio.sleep(0.5)
        except Exception as error:
            told = isinstance(error, APIError) and error.code == "replica_died"
            how, problem = "broken off" if told and known.startswith(text) else "lost", f"{error!r:.300}"
        seen.ended[how] += 1
        if how in ("wrong", "lost"):
            seen.problems.append(f"{how}: {problem} {text[:60]!r} instead of {known[:60]!r}")

    async def control(number: int) -> None:
        while not ended():
            await ask(*jobs[number % len(jobs)])
            number += STREAMS

    await asyncio.gather(*(control(number) for number in range(STREAMS)))
    return seen


def reading(server: Server) -> tuple[float, int]:
    """Resident memory of the server and its replicas, MiB, and how many files they have open."""
    memory = files = 0
    for pid in (server.pid, *replicas(server)):
        with contextlib.suppress(OSError):  # a replica may just have been killed
            memory += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            files += len(os.listdir(f"/proc/{pid}/fd"))
    return memory / 2**20, files


def left_over(server: Server) -> list[str]:
    """The lines of the metrics that say that something runs, waits or holds a row of the cache."""
    gauges = ("mtad_requests_running", "mtad_queue_length")
    return [
        line for line in told(server, "/metrics").splitlines() if line.startswith(gauges) and not line.endswith(" 0.0")
    ]
