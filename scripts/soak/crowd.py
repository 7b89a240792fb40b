"""Everyone who talks to the server of `scripts.soak.strangers`, in a process of their own. The standard library alone.

`python -m scripts.soak.crowd` reads one line of settings from standard input, and in the end writes what its clients
noticed as a line of JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
import time
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from scripts.soak.attacks import attacks
from scripts.soak.http_attacks import bodies, heads

LOST = 120.0
"""Seconds after which a request that has not ended is lost."""
LEAVES, SLOW, WHOLE = 0.15, 0.1, 0.1
"""Shares of the requests whose client leaves in the middle, reads slowly, or does not stream."""
STRANGER = "127.0.0.2"
"""Where strangers come from: an address of their own, on this machine."""


@dataclass
class Noticed:
    """What clients noticed.

    Attributes:
        health: seconds of each answer about health.
        firsts: seconds from each request to its first token, waiting for a row included.
        gaps: seconds between two arrivals of a stream.
        ended: requests by how they ended: `right`, `left`, `turned away` (and sent again).
        lost: requests that did not end as they must: no end, or an error.
        wrong: requests that ended with another text than they get alone.
        answers: of each attack, by status; 0 is none.
        attacking: the attacks that are under way.
        slowest: the slowest answer about health, and the longest gap, while each attack was under way, in seconds.
    """

    health: array[float] = field(default_factory=lambda: array("d"))
    firsts: array[float] = field(default_factory=lambda: array("d"))
    gaps: array[float] = field(default_factory=lambda: array("d"))
    ended: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    answers: dict[str, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))
    attacking: set[str] = field(default_factory=set)
    slowest: dict[str, dict[str, float]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(float)))

    def note(self, what: str, seconds: float) -> None:
        """An answer about health, or a gap."""
        (self.health if what == "health" else self.gaps).append(seconds)
        for name in self.attacking:
            self.slowest[name][what] = max(self.slowest[name][what], seconds)


def post(body: bytes, path: str = "/v1/completions") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\nconnection: close\r\n"
    return head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body


async def connect(port: int, limit: int = 2**16, stranger: bool = True) -> Any:
    local = (STRANGER, 0) if stranger else None
    return await asyncio.open_connection("127.0.0.1", port, limit=limit, local_addr=local)


async def exchange(port: int, data: bytes, seconds: float = 60.0) -> bytes:
    """Send something and read until the server closes the connection."""
    answer = b""
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(seconds):
            reader, writer = await connect(port)
            with contextlib.closing(writer):
                reading = asyncio.create_task(reader.read())
                with contextlib.suppress(OSError):
                    writer.write(data)
                    await writer.drain()
                answer = await reading
    return answer


async def ask(port: int, body: dict[str, Any], expected: str, seen: Noticed, chance: random.Random) -> None:
    """One request, sent again while the queue is full; it must get the text that it gets alone."""
    kind, left = chance.random(), chance.randint(1, 6)
    leaves, slow, whole = kind < LEAVES, LEAVES <= kind < LEAVES + SLOW, kind > 1 - WHOLE
    try:
        async with asyncio.timeout(LOST):
            body, limit = {**body, "stream": not whole}, left if leaves else 0
            while isinstance(text := await answered(port, body, limit, slow, seen), float):
                seen.ended["turned away"] += 1
                await asyncio.sleep(text)
    except Exception as error:
        seen.lost.append(f"{type(error).__name__}: {error}")
        return
    if text == expected or (leaves and expected.startswith(text)):
        seen.ended["left" if leaves else "right"] += 1
    else:
        seen.wrong.append(f"{text[:60]!r} instead of {expected[:60]!r}")


async def answered(port: int, body: dict[str, Any], leave: int, slow: bool, seen: Noticed) -> str | float:
    """The text of one request, or seconds after which to come again. A client may leave after so many arrivals."""
    text, arrivals, last = "", 0, time.perf_counter()
    reader, writer = await connect(port, 2**12 if slow else 2**20, stranger=False)
    with contextlib.closing(writer):
        writer.write(post(json.dumps(body).encode()))
        head = await reader.readuntil(b"\r\n\r\n")
        if b" 429 " in head[:20]:
            told = float(head.lower().partition(b"\r\nretry-after-ms: ")[2].partition(b"\r")[0]) / 1000
            return min(max(told, 0.25), 2.0)
        if not body["stream"]:
            choice = json.loads(await reader.read())["choices"][0]
            return str(choice["text"])
        async for line in reader:
            if line.startswith(b"data: [DONE]"):
                return text
            if not line.startswith(b"data: "):
                continue
            now, event = time.perf_counter(), json.loads(line[6:])
            if not arrivals:
                seen.firsts.append(now - last)
            elif not slow:
                seen.note("gap", now - last)
            last, arrivals = now, arrivals + 1
            text += "".join(choice["text"] for choice in event["choices"])
            if arrivals == leave:
                return text
            if slow:
                await asyncio.sleep(0.2)
    raise ConnectionError(f"the stream ended early, after {text[:60]!r}")


async def healthy(port: int, seen: Noticed) -> None:
    """Ask for health, all the time, over one connection."""
    reader, writer = await connect(port, stranger=False)
    with contextlib.closing(writer):
        while True:
            began = time.perf_counter()
            writer.write(b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
            assert b" 200 " in await reader.readuntil(b"}"), "not healthy"
            seen.note("health", time.perf_counter() - began)
            await asyncio.sleep(0.01)


async def deaf(port: int, model: str) -> None:
    """Ask for much and read nothing."""
    _, writer = await connect(port, limit=2)
    body = {"model": model, "prompt": ["S"] * 8, "max_tokens": 32, "logprobs": 20, "stream": True, "method": "sample"}
    with contextlib.closing(writer):
        writer.write(post(json.dumps(body).encode()))
        await asyncio.sleep(1)


async def silent(port: int) -> None:
    """Open connections and say nothing, or half a head."""
    writers = [(await connect(port))[1] for _ in range(400)]
    for writer in writers[::2]:
        writer.write(b"POST /v1/completions HT")
    await asyncio.sleep(1)
    for writer in writers:
        writer.close()


async def attack(port: int, model: str, seen: Noticed, ended: Callable[[], bool], number: int) -> None:
    """A stranger who makes all attacks in some order, one after another, again and again."""
    named = {name: json.dumps({"model": model, "prompt": "S", **body}).encode() for name, body in attacks().items()}
    sent = {name: post(body) for name, body in named.items()}
    for name, body in bodies().items():
        sent[name] = post(body, "/v1/chat/completions" if b'"messages"' in body[:60] else "/v1/completions")
    sent |= {name: b"".join(parts) for name, parts in heads(1_000_000).items()}
    chance, others = (
        random.Random(number),
        {"never reads": lambda: deaf(port, model), "says nothing": lambda: silent(port)},
    )
    while not ended():
        for name in chance.sample([*sent, *others], len(sent) + len(others)):
            if ended():
                break
            seen.attacking.add(name)
            answer = b""
            if name in sent:
                answer = await exchange(port, sent[name])
            else:
                with contextlib.suppress(OSError):
                    await others[name]()
            seen.answers[name][int(answer[9:12]) if answer[9:12].isdigit() else 0] += 1
            seen.attacking.discard(name)


async def crowd(
    port: int, jobs: list[tuple[dict[str, Any], str]], connections: int, seconds: float, strangers: int
) -> Noticed:
    """Keep so many connections busy for so many seconds, beside strangers who attack; each job has its answer."""
    seen, began = Noticed(), time.perf_counter()

    def ended() -> bool:
        return time.perf_counter() - began > seconds

    async def client(number: int) -> None:
        chance = random.Random(number)
        while not ended():
            await ask(port, *chance.choice(jobs), seen, chance)

    watching = asyncio.create_task(healthy(port, seen))
    async with asyncio.TaskGroup() as group:
        for number in range(connections):
            group.create_task(client(number))
        for number in range(strangers):
            group.create_task(attack(port, jobs[0][0]["model"], seen, ended, number))
    watching.cancel()
    return seen


def main() -> None:
    """Entry point of the process."""
    seen = asyncio.run(crowd(**json.loads(sys.stdin.readline())))
    print(
        json.dumps(
            {name: list(value) if isinstance(value, (array, set)) else value for name, value in vars(seen).items()}
        )
    )


if __name__ == "__main__":
    main()
