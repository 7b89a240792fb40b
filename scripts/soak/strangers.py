"""Every attack against a server that streams to 16 clients: does any of them notice?

    python -m scripts.soak.strangers                 two minutes
    python -m scripts.soak.strangers --seconds 20    a short form

Streams run in a closed loop beside strangers who send, one after another, all of `scripts.soak.attacks` and of
`scripts.soak.http_attacks`, connections that say nothing, and clients that do not read. What must hold:

* every stream ends with the text that its request gets alone;
* no attack is answered with 500, and the process lives on;
* health is answered within `--health` milliseconds, and no stream that has begun waits longer than `--gap` for
  a token.

Prints what each attack was answered and, as its last line, one JSON object; the exit code is 1 if anything failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from engines.pytorch.hook import quiet_transformers
from mtad.params import DecodingParams
from runtime import LLM, AsyncLLM, RuntimeConfig
from runtime.commands.entry import Parser, command
from runtime.server.app import create_app
from runtime.server.options import ServerOptions
from runtime.server.uvicorn_server import DrainingServer, configure, freeze
from scripts.demo import dataset
from scripts.paths import ROOT
from scripts.soak.attacks import attacks
from scripts.soak.http_attacks import bodies, heads

MODEL = "m"
STREAMS = 16
TOKENS = 48


@dataclass
class Noticed:
    """What clients noticed.

    Attributes:
        health: seconds of each answer about health.
        firsts: seconds from each request to its first token, waiting for a row included.
        gaps: seconds between two arrivals of a stream.
        answers: of each attack, by status; 0 is none.
        wrong: streams that did not end as their request does alone.
        attacking: the attack that is under way.
        slowest: the slowest answer about health, and the longest gap, while each attack was under way, in seconds.
    """

    health: list[float] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    answers: dict[str, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))
    wrong: list[str] = field(default_factory=list)
    attacking: str = ""
    slowest: dict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))

    def note(self, what: str, seconds: float) -> None:
        """An answer about health, or a gap."""
        key = what, self.attacking
        self.slowest[key] = max(self.slowest[key], seconds)


def post(body: bytes, path: str = "/v1/completions") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\nconnection: close\r\n"
    return head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body


async def exchange(port: int, data: bytes, seconds: float = 60.0) -> bytes:
    """Send something and read until the server closes the connection."""
    answer = b""
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(seconds):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            with contextlib.closing(writer):
                reading = asyncio.create_task(reader.read())
                with contextlib.suppress(OSError):
                    writer.write(data)
                    await writer.drain()
                answer = await reading
    return answer


async def stream(port: int, body: dict[str, Any], expected: str, seen: Noticed) -> None:
    """One streamed request; its text must be the expected one."""
    text, last = "", time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with contextlib.closing(writer):
        writer.write(post(json.dumps({"model": MODEL, "stream": True, **body}).encode()))
        async for line in reader:
            if line.startswith(b"data: {"):
                now = time.perf_counter()
                (seen.gaps if text else seen.firsts).append(now - last)
                if text:
                    seen.note("gap", now - last)
                last, event = now, json.loads(line[6:])
                text += "".join(choice["text"] for choice in event.get("choices", ()))
    if text != expected:
        seen.wrong.append(f"{text[:60]!r} instead of {expected[:60]!r}")


async def healthy(port: int, seen: Noticed) -> None:
    """Ask for health, all the time, over one connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with contextlib.closing(writer):
        while True:
            began = time.perf_counter()
            writer.write(b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
            assert b" 200 " in await reader.readuntil(b"}"), "not healthy"
            taken = time.perf_counter() - began
            seen.health.append(taken)
            seen.note("health", taken)
            await asyncio.sleep(0.005)


async def deaf(port: int) -> None:
    """Ask for much and read nothing."""
    _, writer = await asyncio.open_connection("127.0.0.1", port, limit=2)
    body = {"model": MODEL, "prompt": ["S"] * 8, "max_tokens": 32, "logprobs": 20, "stream": True, "method": "sample"}
    with contextlib.closing(writer):
        writer.write(post(json.dumps(body).encode()))
        await asyncio.sleep(1)


async def silent(port: int) -> None:
    """Open connections and say nothing, or half a head."""
    writers = [(await asyncio.open_connection("127.0.0.1", port))[1] for _ in range(400)]
    for writer in writers[::2]:
        writer.write(b"POST /v1/completions HT")
    await asyncio.sleep(1)
    for writer in writers:
        writer.close()


async def attack(port: int, seen: Noticed, ended: Callable[[], bool]) -> None:
    """All attacks, one after another, again and again."""
    named = {name: json.dumps({"model": MODEL, "prompt": "S", **body}).encode() for name, body in attacks().items()}
    sent = {name: post(body) for name, body in named.items()}
    for name, body in bodies().items():
        sent[name] = post(body, "/v1/chat/completions" if b'"messages"' in body[:60] else "/v1/completions")
    sent |= {name: b"".join(parts) for name, parts in heads(1_000_000).items()}
    while not ended():
        for name, data in sent.items():
            seen.attacking = name
            answer = await exchange(port, data)
            seen.answers[name][int(answer[9:12]) if answer[9:12].isdigit() else 0] += 1
        for who in (deaf, silent):
            seen.attacking = who.__name__
            await who(port)
            seen.answers[who.__name__][0] += 1
        seen.attacking = ""


async def run(llm: LLM, jobs: list[tuple[dict[str, Any], str]], seconds: float) -> Noticed:
    """Serve, stream and attack for so long."""
    seen, engine, options = Noticed(), AsyncLLM(llm), ServerOptions(MODEL, send_seconds=5, max_connections=200)
    config = configure(create_app(engine, options), options, access_log=False, log_level="error")
    server = DrainingServer(config, engine, drain_seconds=30)
    serving = asyncio.create_task(asyncio.to_thread(_serve, config, server))
    while not (server.started and engine.ready):
        await asyncio.sleep(0.05)
    port, began = server.servers[0].sockets[0].getsockname()[1], time.perf_counter()

    def ended() -> bool:
        return time.perf_counter() - began > seconds

    async def client(number: int) -> None:
        while not ended():
            await stream(port, *jobs[number % len(jobs)], seen)
            number += STREAMS

    watching = asyncio.create_task(healthy(port, seen))
    async with asyncio.TaskGroup() as group:
        for number in range(STREAMS):
            group.create_task(client(number))
        group.create_task(attack(port, seen, ended))
    watching.cancel()
    assert server._loop is not None
    server._loop.call_soon_threadsafe(server.drain)
    await serving
    engine.check_integrity()
    return seen


def _serve(config: Any, server: DrainingServer) -> None:
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(server.serve())


@command
def main() -> None:
    """Entry point."""
    parser = Parser(prog="scripts.soak.strangers", description="Every attack against a server that streams.")
    parser.add_argument("--pair", type=Path, default=ROOT / "build" / "demo-pair", help="(default %(default)s)")
    parser.add_argument("--seconds", type=float, default=120, help="(default %(default)s)")
    parser.add_argument("--health", type=float, default=100, help="milliseconds (default %(default)s)")
    parser.add_argument("--gap", type=float, default=250, help="milliseconds (default %(default)s)")
    options = parser.parse_args()
    quiet_transformers()
    llm = LLM(options.pair, RuntimeConfig(rows=STREAMS + 8))
    prompts = [example.prompt for example in dataset.load("test", "sql")][: 2 * STREAMS]
    params = {"max_tokens": TOKENS, "ignore_eos": True, "seed": 3, "speculation": "fixed"}
    alone = llm.generate(prompts, DecodingParams.from_dict(dict(params), llm.pair.defaults))
    jobs = [({"prompt": prompt, **params}, result.text) for prompt, result in zip(prompts, alone, strict=True)]
    freeze()
    seen = asyncio.run(run(llm, jobs, options.seconds))
    for name, answers in seen.answers.items():
        health, gap = (1e3 * seen.slowest[what, name] for what in ("health", "gap"))
        print(f"{name:45} {dict(answers)}  at worst: health {health:.0f} ms, gap {gap:.0f} ms")
    errors = [name for name, answers in seen.answers.items() if any(status >= 500 for status in answers)]
    report = {
        "seconds": options.seconds,
        "streamed": len(seen.gaps),
        "health_ms": dict(zip(("p50", "p99", "worst"), _milliseconds(seen.health), strict=True)),
        "first_token_ms": dict(zip(("p50", "p99", "worst"), _milliseconds(seen.firsts), strict=True)),
        "gap_ms": dict(zip(("p50", "p99", "worst"), _milliseconds(seen.gaps), strict=True)),
        "wrong": seen.wrong[:5],
        "errors": errors,
    }
    slow = report["health_ms"]["worst"] > options.health or report["gap_ms"]["worst"] > options.gap  # type: ignore[index]
    print(json.dumps(report))
    sys.exit(1 if seen.wrong or errors or slow else 0)


def _milliseconds(seconds: list[float]) -> list[float]:
    return [round(1e3 * float(np.quantile(seconds, quantile)), 1) for quantile in (0.5, 0.99, 1.0)]


if __name__ == "__main__":
    main()
