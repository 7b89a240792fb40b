"""The HTTP server under load: what it costs over plain `AsyncLLM`, and whether every answer is the right one.

    python -m scripts.bench server                   a minute
    python -m scripts.bench server --duration 300    five minutes, as published

1 to 64 connections stream completions in a closed loop. The same requests go to the same engine twice, in slices that
alternate: over HTTP, from a client in a process of its own, and straight to `AsyncLLM` in the server's process. Every
answer's tokens and text are compared with those the request gets alone, so a lost, mixed-up or damaged answer shows.

* Throughput: tokens a second that reached the client, median, lowest and highest slice; the ratio HTTP / `AsyncLLM`,
  taken round by round, then its median.
* What HTTP costs, in microseconds of CPU time a token: the server's own thread (requests, chunks, sockets; the engine
  has another), and the client's process. **The ratio counts both**, for both run on the cores the engine's threads use,
  and stop them for as long; served over a network it would count the server's alone. The client therefore only sends
  requests and notes which bytes came when: it reads and compares them after the slice, as the baseline does.
* Latency at the client: to the first tokens (waiting for a row included) and between two arrivals, p50 and p99.

Prints a table and, as its last line, one JSON object; writes server.json and server.png.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
import uvicorn
from tqdm import tqdm

from engines.placement import cores
from mtad.errors import InvalidInput
from mtad.params import DecodingParams
from runtime import LLM, AsyncLLM
from runtime.commands.entry import placed_config
from runtime.server.app import create_app
from runtime.server.options import ServerOptions
from runtime.server.uvicorn_server import DrainingServer, configure
from scripts.bench.load_figures import Figures, Job, drive
from scripts.bench.methods import methods
from scripts.demo import dataset
from scripts.paths import RESULTS, ROOT

CONNECTIONS = (1, 2, 4, 8, 16, 32, 64)
MODEL = "demo"
SYSTEMS = ("HTTP", "AsyncLLM")
SHORTEST = 2.0
"""Seconds of a slice at least."""


def make_jobs(llm: LLM, method: str, count: int, max_tokens: int) -> list[Job]:
    """Requests with the answers they get alone."""
    examples = dataset.load("test", "sql")[:count]
    base = replace(methods("sql")[method], speculation="fixed", max_tokens=max_tokens)
    params = [replace(base, seed=seed) for seed in range(len(examples))]
    results = llm.generate([example.prompt for example in examples], params)
    asked = {
        name: getattr(base, name) for name in ("method", "accept_threshold", "speculation", "max_tokens", "draft_len")
    }
    return [
        Job(example.prompt, seed, asked, result.token_ids, result.text)
        for seed, (example, result) in enumerate(zip(examples, results, strict=True))
    ]


class Served:
    """An engine behind an HTTP server in a thread of its own, and a client's process that asks it."""

    def __init__(self, llm: LLM, jobs: Sequence[Job]) -> None:
        self.engine, self._jobs = AsyncLLM(llm), jobs
        options = ServerOptions(MODEL)
        config = configure(create_app(self.engine, options), access_log=False)
        self._server = DrainingServer(config, self.engine, drain_seconds=60)
        self._thread = threading.Thread(target=self._run, args=(config,))

    def _run(self, config: uvicorn.Config) -> None:
        with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
            self._loop = runner.get_loop()
            runner.run(self._server.serve())

    def __enter__(self) -> Self:
        self._thread.start()
        while not (self._server.started and self.engine.ready):
            if not self._thread.is_alive():
                raise RuntimeError("the server did not start")
            self._thread.join(0.01)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self._client = subprocess.Popen(
            [sys.executable, "-m", "scripts.bench.load_client"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._say({"host": "127.0.0.1", "port": port, "model": MODEL, "jobs": [asdict(job) for job in self._jobs]})
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._client.stdin
        self._client.stdin.close()
        self._client.wait(30)
        self._loop.call_soon_threadsafe(self._server.drain)
        self._thread.join()
        self.engine.check_integrity()

    def _say(self, value: dict[str, Any]) -> None:
        assert self._client.stdin
        print(json.dumps(value), file=self._client.stdin, flush=True)

    def slice(self, system: str, connections: int, seconds: float, first: int) -> Figures:
        """One slice of a system."""
        if system == "HTTP":
            assert self._client.stdout
            used = self._http_thread()
            self._say({"connections": connections, "seconds": seconds, "first": first})
            answer = self._client.stdout.readline()
            if not answer:
                raise RuntimeError("the client's process ended")
            figures = Figures(**json.loads(answer))
            figures.server = self._http_thread() - used
            return figures
        return asyncio.run(drive(self._ask, self._jobs, connections, seconds, first))

    def _http_thread(self) -> float:
        """CPU seconds of the server's own thread so far; the engine has another."""

        async def used() -> float:
            return time.thread_time()

        return asyncio.run_coroutine_threadsafe(used(), self._loop).result()

    async def _ask(self, connection: int, job: Job) -> AsyncIterator[tuple[list[int], str]]:
        params = DecodingParams.from_dict({**job.params, "seed": job.seed}, self.engine.llm.pair.defaults)
        async for delta in await self.engine.submit(job.prompt, params):
            yield delta.token_ids, delta.text


def summarise(slices: dict[str, list[Figures]]) -> dict[str, Any]:
    """Figures of both systems at one number of connections; the n-th slices of both are of one round."""
    row: dict[str, Any] = {}
    rates = {system: [one.tokens / one.seconds for one in taken] for system, taken in slices.items()}
    for system, taken in slices.items():
        first, block = ([value for one in taken for value in getattr(one, name)] for name in ("first", "block"))
        row[system] = {
            "tokens_per_second": statistics.median(rates[system]),
            "lowest": min(rates[system]),
            "highest": max(rates[system]),
            "answers": sum(one.answers for one in taken),
            "wrong": [words for one in taken for words in one.wrong],
            "first_token_ms": percentiles(first),
            "block_ms": percentiles(block),
            "server_microseconds_a_token": 1e6
            * sum(one.server for one in taken)
            / max(1, sum(one.all for one in taken)),
            "client_microseconds_a_token": 1e6
            * sum(one.processor for one in taken)
            / max(1, sum(one.tokens for one in taken)),
            "client_processor_share": sum(one.processor for one in taken) / sum(one.seconds for one in taken),
        }
    ratios = [ours / plain for ours, plain in zip(rates["HTTP"], rates["AsyncLLM"], strict=True)]
    row["ratio"] = {"median": statistics.median(ratios), "lowest": min(ratios), "highest": max(ratios)}
    return row


def percentiles(seconds: Sequence[float]) -> dict[str, float] | None:
    """p50 and p99 in milliseconds; None of nothing."""
    if not seconds:
        return None
    middle, high = np.percentile(np.array(seconds) * 1e3, [50, 99])
    return {"p50": float(middle), "p99": float(high)}


def table(rows: dict[int, dict[str, Any]]) -> str:
    lines = [
        "connections  HTTP tokens/s  AsyncLLM tokens/s  ratio  answers  wrong  server, client us/token"
        "  first p50/p99 ms  block p50/p99 ms"
    ]
    for connections, row in rows.items():
        ours, plain = row["HTTP"], row["AsyncLLM"]
        latency = [
            f"{ours[name]['p50']:.1f} / {ours[name]['p99']:.1f}" if ours[name] else "-"
            for name in ("first_token_ms", "block_ms")
        ]
        lines.append(
            f"{connections:>11}  {ours['tokens_per_second']:13.0f}  {plain['tokens_per_second']:17.0f}  "
            f"{row['ratio']['median']:5.2f}  {ours['answers']:7d}  {len(ours['wrong']):5d}  "
            f"{ours['server_microseconds_a_token']:14.1f}  {ours['client_microseconds_a_token']:6.1f}  "
            f"{latency[0]:>16}  {latency[1]:>16}"
        )
    return "\n".join(lines)


def plot(rows: dict[int, dict[str, Any]], path: Path) -> None:
    """Throughput of both and latency over HTTP, against connections."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2))
    loads = list(rows)
    for system, style in zip(SYSTEMS, ("o-", "s--"), strict=True):
        values, low, high = (
            [rows[load][system][name] for load in loads] for name in ("tokens_per_second", "lowest", "highest")
        )
        left.plot(loads, values, style, label=system)
        left.fill_between(loads, low, high, alpha=0.15)
    left.set(xlabel="connections", ylabel="tokens/s", title="throughput (band: lowest to highest slice)")
    for name, words in (("first_token_ms", "first token"), ("block_ms", "between blocks")):
        for quantile, style in (("p50", "o-"), ("p99", "^:")):
            values = [(rows[load]["HTTP"][name] or {}).get(quantile, float("nan")) for load in loads]
            right.plot(loads, values, style, label=f"{words}, {quantile}")
    right.set(xlabel="connections", ylabel="ms", title="latency over HTTP", yscale="log")
    for axis in (left, right):
        axis.set_xscale("log", base=2)
        axis.set_xticks(loads, [str(load) for load in loads])
        axis.grid(alpha=0.3)
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def measure(
    llm: LLM, jobs: Sequence[Job], loads: Sequence[int], rounds: int, seconds: float
) -> dict[int, dict[str, Any]]:
    """Both systems at each number of connections, in slices that alternate; which one is first alternates too."""
    slices: dict[int, dict[str, list[Figures]]] = {load: {system: [] for system in SYSTEMS} for load in loads}
    with (
        Served(llm, jobs) as served,
        tqdm(total=len(loads) * (2 * rounds + 1), desc="server", unit="slice", file=sys.stderr) as bar,
    ):
        for load in loads:
            served.slice("HTTP", load, min(seconds, 0.5), 0)  # the first of each load warms up
            bar.update()
            for number in range(rounds):
                for system in SYSTEMS if number % 2 else SYSTEMS[::-1]:
                    slices[load][system].append(served.slice(system, load, seconds, first=number * 7))
                    bar.update()
    return {load: summarise(taken) for load, taken in slices.items()}


def run(options: argparse.Namespace) -> None:
    """`python -m scripts.bench server`."""
    loads = options.connections or list(CONNECTIONS)
    duration, results = options.duration or 60.0, options.results or RESULTS
    if min(loads) < 1:
        raise InvalidInput("connections", loads, "give at least 1")
    shortest = 2 * len(loads) * SHORTEST
    if duration < shortest:
        raise InvalidInput(
            "duration", duration, f"give at least {shortest:g} s for {len(loads)} numbers of connections"
        )
    rounds = max(1, min(6, int(duration / shortest)))
    busy = os.getloadavg()[0]
    torch.set_num_threads(1)
    llm = LLM(options.pair, placed_config(options, rows=options.rows))
    jobs = make_jobs(llm, options.method, 96, 64)
    rows = measure(llm, jobs, loads, rounds, duration / (2 * len(loads) * rounds))
    wrong = [words for row in rows.values() for system in SYSTEMS for words in row[system]["wrong"]]
    report = {
        "command": "python -m scripts.bench " + " ".join(sys.argv[1:]),
        "machine": {
            "processor": platform.machine(),
            "cores": cores(),
            "load_average_before": busy,
        },
        "method": options.method,
        "rows": options.rows,
        "rounds": rounds,
        "seconds_a_slice": duration / (2 * len(loads) * rounds),
        "wrong_answers": len(wrong),
        "connections": rows,
    }
    print(table(rows))
    results.mkdir(parents=True, exist_ok=True)
    (results / "server.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    plot(rows, results / "server.png")
    print(json.dumps(report))
    if wrong:
        print(f"{len(wrong)} requests were not answered as they must be, for example {wrong[0]}", file=sys.stderr)
        sys.exit(1)
