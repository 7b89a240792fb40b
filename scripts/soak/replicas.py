"""Replicas killed under load: is anything lost but streams that the killed one had begun, and are those told so?

    python -m scripts.soak.replicas                                     3 kills under 32 connections
    python -m scripts.soak.replicas --kills 1 --connections 8           a short form

Clients keep connections busy in a closed loop; every other request is streamed. Again and again, when all replicas are
ready, the one with more requests is killed (SIGKILL). What must hold:

* every request that is not streamed, and every stream that had not begun, gets the text that it gets alone;
* a stream that had begun gets that text as well, or its beginning and then an error, `replica_died`;
* no more streams break off than had begun when the replica was killed.

Writes replicas.json; the exit code is 1 if anything of it fails.
"""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from engines.quiet import quiet_transformers
from mtad.errors import InvalidInput
from mtad.params import DecodingParams
from runtime import LLM, RuntimeConfig
from runtime.commands.entry import Parser, command
from scripts.clients.served import MODEL, served
from scripts.demo import dataset
from scripts.machine import machine
from scripts.paths import RESULTS, ROOT
from scripts.soak.figures import finish

PATIENCE = 300.0
"""Seconds after which what should have happened is taken to never happen."""
REPLICAS, TOKENS, PROMPTS = 2, 96, 48


@dataclass
class Seen:
    """What clients saw.

    Attributes:
        ended: requests by how they ended: `right`, `broken` (told so), `turned away` (and sent again).
        problems: what went against the rules, one line each.
        begun: streams that have begun and not ended.
    """

    ended: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    begun: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


def ask(url: str, body: dict[str, Any], expected: str, seen: Seen) -> None:
    """One request; notes how it ended."""
    address = urlsplit(url)
    connection = HTTPConnection(address.hostname or "", address.port, timeout=PATIENCE)
    text, begun, how = "", False, "it ended early"
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        if response.status == 429:
            response.read()
            seen.ended["turned away"] += 1
            time.sleep(0.3)
            return
        if response.status != 200:
            how = f"status {response.status}: {response.read().decode()[:200]}"
        elif not body["stream"]:
            text, how = json.loads(response.read())["choices"][0]["text"], "right"
        else:
            for line in response:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        how = "broken" if event["error"]["code"] == "replica_died" and begun else str(event)
                        break
                    if not begun:
                        with seen.lock:
                            begun, seen.begun = True, seen.begun + 1
                    text += event["choices"][0]["text"]
                elif line.startswith(b"data: [DONE]"):
                    how = "right"
    except (OSError, ValueError) as error:
        how = f"{type(error).__name__}: {error}"
    finally:
        connection.close()
    with seen.lock:
        seen.begun -= begun
        if how == "right" and text != expected:
            how = f"{text[:60]!r} instead of {expected[:60]!r}"
        if how == "broken" and not expected.startswith(text):
            how = f"broken off after another text, {text[:60]!r}"
        if how in ("right", "broken"):
            seen.ended[how] += 1
        else:
            seen.problems.append(how)


def fetch(url: str) -> str:
    try:
        with urllib.request.urlopen(url, timeout=PATIENCE) as answer:
            return str(answer.read().decode())
    except OSError:
        return "{}"


def kill(url: str, seen: Seen) -> dict[str, Any]:
    """Wait until all replicas are ready, and kill the one with more requests; what was under way."""
    end = time.monotonic() + PATIENCE
    while json.loads(fetch(f"{url}/health")).get("replicas") != REPLICAS:
        assert time.monotonic() < end, "the replicas are not ready"
        time.sleep(0.5)
    time.sleep(5)  # of full load
    text = fetch(f"{url}/metrics")
    found = [dict(re.findall(r'(\w+)="([^"]*)"', one)) for one in re.findall(r"^mtad_replica\{(.*)\} 1", text, re.M)]
    running = dict(re.findall(r'^mtad_requests_running\{replica="(\w+)"\} (\S+)$', text, re.M))
    victim = max(found, key=lambda one: float(running.get(one["replica"], 0)))
    with seen.lock:
        begun, broken = seen.begun, seen.ended["broken"]
        os.kill(int(victim["pid"]), signal.SIGKILL)
    return {"begun": begun, "broken_before": broken, "running_there": float(running.get(victim["replica"], 0))}


def run(url: str, jobs: list[tuple[dict[str, Any], str]], connections: int, kills: int) -> tuple[Seen, list[Any]]:
    """Load, and kills under it."""
    seen, stop, kept = Seen(), threading.Event(), []

    def client(number: int) -> None:
        while not stop.is_set():
            body, expected = jobs[number % len(jobs)]
            ask(url, {**body, "stream": number // connections % 2 == 0}, expected, seen)
            number += connections

    with ThreadPoolExecutor(connections) as pool:
        clients = [pool.submit(client, number) for number in range(connections)]
        try:
            for _ in range(kills):
                one = kill(url, seen)
                time.sleep(10)
                one["broken"] = seen.ended["broken"] - one.pop("broken_before")
                if one["broken"] > one["begun"]:
                    seen.problems.append(f"more streams broke off than had begun: {one}")
                kept.append(one)
        finally:
            stop.set()
        for running in clients:
            running.result()
    return seen, kept


@command
def main() -> None:
    parser = Parser(prog="scripts.soak.replicas", description="Replicas killed under load.")
    parser.add_argument("--pair", type=Path, default=ROOT / "build" / "demo-pair", help="(default %(default)s)")
    parser.add_argument("--connections", type=int, default=32, help="(default %(default)s)")
    parser.add_argument("--kills", type=int, default=3, help="(default %(default)s)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write to")
    options = parser.parse_args()
    for name in ("connections", "kills"):
        if getattr(options, name) < 1:
            raise InvalidInput(name, getattr(options, name), "give at least 1")
    quiet_transformers()
    ran_on = machine()
    llm = LLM(options.pair, RuntimeConfig(threads=1, rows=16, provider="cpu"))
    prompts = [example.prompt for example in dataset.load("test", "sql")][:PROMPTS]
    params = {"max_tokens": TOKENS, "ignore_eos": True, "seed": 3, "speculation": "fixed"}
    alone = llm.generate(prompts, DecodingParams.from_dict(dict(params), llm.pair.defaults))
    jobs = [({"model": MODEL, "prompt": p, **params}, one.text) for p, one in zip(prompts, alone, strict=True)]
    sizes = ("--replicas", str(REPLICAS), "--replica-cpus", "0.1", "--threads", "1", "--provider", "cpu")
    with served(options.pair, *sizes) as url:
        seen, kills = run(url, jobs, options.connections, options.kills)
        retries = sum(map(float, re.findall(r"^mtad_gateway_retries_total (\S+)$", fetch(f"{url}/metrics"), re.M)))
    report = {
        "machine": ran_on,
        "replicas": REPLICAS,
        "connections": options.connections,
        "kills": kills,
        "retried": retries,
    }
    report |= {"ended": dict(seen.ended), "problems": seen.problems[:20], "passed": not seen.problems}
    finish("scripts.soak.replicas", "replicas.json", report, options.results)


if __name__ == "__main__":
    main()
