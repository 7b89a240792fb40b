"""How attacks are sent, byte by byte, and what the server tells of itself."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import tempfile
import time
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from scripts.clients.served import MODEL, Server

Send = Callable[[Server, int], Awaitable[int]]
"""Sends an attack over one connection, which has a number of its own; gives the answer's status, 0 if there is none."""

STRANGER = "127.0.0.2"
"""Where strangers come from: an address of their own, on this machine."""
PATIENCE = 90.0
"""Seconds after which no answer is waited for."""
RECOVERY = 180.0
"""Seconds that a server may take until its replicas are as they were."""
FULL, FEW = 4 * 2**20 - 1024, 200_000
"""Bytes of a body that a server takes, nearly; of one with as many values as it reads."""


def post(body: str, path: str = "/v1/completions") -> bytes:
    """A request whose connection is closed after the answer."""
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\nconnection: close\r\n"
    return f"{head}content-length: {len(body.encode())}\r\n\r\n{body}".encode()


async def connect(server: Server) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A stranger's connection."""
    return await asyncio.open_connection("127.0.0.1", urlsplit(server.url).port, limit=2**12, local_addr=(STRANGER, 0))


def raw(data: Callable[[int], bytes]) -> Send:
    """Send the bytes for a connection's number, and read until the server closes the connection."""

    async def send(server: Server, number: int) -> int:
        answer = b""
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(PATIENCE):
                reader, writer = await connect(server)
                with contextlib.closing(writer):
                    reading = asyncio.create_task(reader.read())
                    with contextlib.suppress(OSError):
                        writer.write(data(number))
                        await writer.drain()
                    answer = await reading
        return int(answer[9:12]) if answer[9:12].isdigit() else 0

    return send


def fields(path: str = "/v1/completions", **values: Any) -> Callable[[int], bytes]:
    """A request of these fields; one that is a function is what it gives for the connection's number."""

    def data(number: int) -> bytes:
        own = {name: value(number) if callable(value) else value for name, value in values.items()}
        return post(json.dumps({"model": MODEL, **({} if "messages" in own else {"prompt": "S"}), **own}), path)

    return data


def filled(body: str, item: str, size: int = FULL, between: str = ",") -> Send:
    """Send a body in which `...` is replaced by as many items as `size` bytes hold; `#` in one becomes its number."""
    path = "/v1/chat/completions" if '"messages"' in body else "/v1/completions"

    def data(_: int) -> bytes:
        count = size // (len(item + between) + 6 * item.count("#"))
        items = [item] * count if "#" not in item else [item.replace("#", str(at)) for at in range(count)]
        return post(f'{{"model": "{MODEL}", {body}}}'.replace("...", between.join(items)), path)

    return raw(data)


def endless(begin: str, part: str) -> Send:
    """Send what begins a head or a trailer, and a million bytes of what goes on."""
    return raw(lambda _: (begin + part * (1_000_000 // len(part)) + "\r\n\r\n").encode())


def in_chunks(body: str) -> Send:
    """Send a body whose chunks have a byte each."""
    head = "POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\nconnection: close\r\n"
    chunks = "".join(f"1\r\n{byte}\r\n" for byte in body)
    return raw(lambda _: f"{head}transfer-encoding: chunked\r\n\r\n{chunks}0\r\n\r\n".encode())


def get(path: str, times: int = 1, headers: str = "") -> Send:
    """Ask so many times without waiting for an answer; the connection is closed after the last."""
    asked = f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\n{headers}"
    return raw(lambda _: (f"{asked}\r\n" * (times - 1) + f"{asked}connection: close\r\n\r\n").encode("latin-1"))


def partly(data: Callable[[int], bytes], events: int, pause: float) -> Send:
    """Send the bytes for a connection's number, read so many events, each after a pause, and leave after one more."""

    async def send(server: Server, number: int) -> int:
        reader, writer = await connect(server)
        with contextlib.closing(writer):
            writer.write(data(number))
            status = int((await reader.readuntil(b"\r\n"))[9:12]) if events else 0
            for _ in range(events if status == 200 else 0):
                await asyncio.sleep(pause)
                await reader.readuntil(b"data: ")
            await asyncio.sleep(pause)
        return status

    return send


def told(server: Server, path: str) -> str:
    """What a server tells of itself, at `/metrics` or `/health`."""
    with urllib.request.urlopen(f"{server.url}{path}", timeout=PATIENCE) as answer:
        return str(answer.read().decode())


def replicas(server: Server) -> dict[int, float]:
    """The replicas' process ids, and how many requests each runs; nothing where the server itself has the engine."""
    text = told(server, "/metrics")
    running = dict(re.findall(r'^mtad_requests_running\{replica="(\w+)"\} (\S+)$', text, re.M))
    known = [dict(re.findall(r'(\w+)="([^"]*)"', one)) for one in re.findall(r"^mtad_replica\{(.*)\} 1", text, re.M)]
    return {int(one["pid"]): float(running.get(one["replica"], 0)) for one in known}


class Watch:
    """How long a question for health takes, all the time: (when it was answered, seconds)."""

    def __init__(self) -> None:
        self.seconds: list[tuple[float, float]] = []

    async def ask(self, server: Server, ended: Callable[[], bool]) -> None:
        """Ask over one connection until it has ended."""
        reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(server.url).port)
        with contextlib.closing(writer):
            while not ended():
                began = time.monotonic()
                writer.write(b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
                await reader.readuntil(b"}")
                now = time.monotonic()
                self.seconds.append((now, now - began))
                await asyncio.sleep(0.05)


MARK = "MTAD_SOAK"
"""Environment variable by which the processes of one soak's Ray know each other; its value is the soak's process."""


async def until(came: Callable[[], bool]) -> int:
    """Wait until something has come, which counts as the answer 200; what is asked may not answer meanwhile.

    Raises:
        TimeoutError: it does not come.
    """
    async with asyncio.timeout(RECOVERY):
        while True:
            with contextlib.suppress(OSError):
                if await asyncio.to_thread(came):
                    return 200
            await asyncio.sleep(0.5)


def boards() -> set[int]:
    """The processes where this soak's replicas report their figures."""
    mark, found = f"{MARK}={os.environ[MARK]}\0".encode(), set[int]()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            named = (folder / "cmdline").read_bytes().startswith(b"ray::Board")
            if named and mark in (folder / "environ").read_bytes():
                found.add(int(folder.name))
    return found


async def kill_board(server: Server, _: int) -> int:
    """Kill the process where replicas report their figures, and wait until all report to another."""
    before, killed = len(replicas(server)), boards()
    if not killed:
        raise ProcessLookupError("no board runs")
    for pid in killed:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return await until(lambda: bool(boards() - killed) and len(replicas(server)) >= before)


def strike(sign: signal.Signals) -> Send:
    """Send a signal to the replica that runs most requests, and wait until there is another in its place."""

    async def send(server: Server, _: int) -> int:
        before = replicas(server)
        struck = max(before, key=before.__getitem__)
        os.kill(struck, sign)
        return await until(lambda: struck not in (now := replicas(server)) and len(now) >= len(before))

    return send


async def damage(server: Server, _: int) -> int:
    """Ask for the replicas of a damaged folder, wait until it is refused, and ask for those of the old one again.

    It ends when no replica of before is left: all have been replaced.
    """
    pair, before = Path(server.pair), set(replicas(server))
    whole, link = pair.readlink(), pair.with_name("link")

    def refused() -> bool:
        return "update_refused" in told(server, "/health")

    def lead(folder: Path) -> None:
        link.symlink_to(folder)
        link.replace(pair)
        os.kill(server.pid, signal.SIGHUP)

    with tempfile.TemporaryDirectory() as empty:
        lead(Path(empty))
        try:
            await until(refused)
        finally:
            lead(whole)
        return await until(lambda: not refused() and bool(now := set(replicas(server))) and not now & before)
