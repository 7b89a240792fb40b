"""A busy server among strangers who attack it: do other clients notice?

    python -m scripts.soak.strangers                                 seven minutes
    python -m scripts.soak.strangers --seconds 30 --warm-up 30       a short form

So many connections send requests in a closed loop, more than there are rows and places to wait, so that some are turned
away and come again. Some of their clients leave in the middle, some read slowly, some do not stream. Beside them,
strangers send one after another all of `scripts.soak.attacks` and of `scripts.soak.http_attacks`, connections that say
nothing, and requests that they do not read. What must hold:

* every request ends, with the text that it gets alone: none is lost, none is mixed up;
* no attack is answered with 500, and the process lives on, with its bookkeeping in order;
* health is answered within `--health` milliseconds, and no stream that has begun waits longer than `--gap` for a token;
* memory is flat: of a line through the server's resident memory, the upper end of what 95 % of such lines rise by is
  below `--leak-limit` per 1,000 requests that were answered, those turned away and the attacks included; the report
  also has it per 1,000 requests that were taken. The line begins after `--warm-up` seconds and a quarter of the rest.
  Compiled grammars are kept up to a limit of their own (`runtime.constraints.grammar.KEPT_BYTES`), which a run does not
  reach. Before each reading the server therefore forgets them; the report has how much that was.

All of the clients have a process of their own, `scripts.soak.crowd`, on the same cores. Prints what each attack was
answered, which goals were met and, as its last line, one JSON object. Writes strangers.json and strangers.png; the exit
code is 1 if a goal was missed.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from engines.quiet import quiet_transformers
from mtad.params import DecodingParams
from runtime import LLM, AsyncLLM, RuntimeConfig
from runtime.commands.entry import Parser, command
from runtime.server.app import create_app
from runtime.server.options import ServerOptions
from runtime.server.uvicorn_server import DrainingServer, configure, freeze
from scripts.demo import dataset
from scripts.machine import machine
from scripts.paths import RESULTS, ROOT
from scripts.soak.figures import finish, resident, trend, trim

MODEL, TOKENS, PROMPTS, ROWS, WAITING = "m", 48, 64, 16, 32
READING = 5.0
"""Seconds between two readings of memory."""

Memory = list[tuple[int, float]]
"""(requests taken that have ended, resident MiB)."""


def run(llm: LLM, settings: dict[str, Any], warm_up: float) -> tuple[dict[str, Any], Memory, list[float]]:
    """Serve until the crowd has gone.

    Returns:
        what it noticed; the server's memory after so many seconds, without kept grammars; what those took, in MiB.
    """
    engine, options = AsyncLLM(llm), ServerOptions(MODEL)
    config = configure(create_app(engine, options), access_log=False, log_level="error")
    server = DrainingServer(config, engine, drain_seconds=30)
    serving = threading.Thread(target=_serve, args=(config, server))
    serving.start()
    while not (server.started and engine.ready):
        time.sleep(0.05)
    port, memory, grammars = server.servers[0].sockets[0].getsockname()[1], Memory(), list[float]()
    crowd = subprocess.Popen(
        [sys.executable, "-m", "scripts.soak.crowd"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    answer = list[str]()
    talking = threading.Thread(
        target=lambda: answer.append(crowd.communicate(json.dumps(settings | {"port": port}))[0])
    )
    talking.start()
    talking.join(warm_up)
    while talking.is_alive():
        talking.join(READING)
        trim()
        whole = resident()
        llm.forget_grammars()
        trim()
        memory.append((sum(engine.statistics()["requests"].values()), resident() / 2**20))
        grammars.append((whole - resident()) / 2**20)
    server.loop.call_soon_threadsafe(server.drain)
    serving.join()
    engine.check_integrity()
    return json.loads(answer[0]), memory, grammars


def _serve(config: Any, server: DrainingServer) -> None:
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(server.serve())


def summarise(seen: dict[str, Any], memory: Memory, options: Any) -> dict[str, Any]:
    """The report; `goals` says which were met, and `failed` names the others."""
    slope, error = trend(memory)
    errors = [name for name, answers in seen["answers"].items() if any(int(status) >= 500 for status in answers)]
    report: dict[str, Any] = {
        "ended": seen["ended"],
        "lost": len(seen["lost"]),
        "wrong": len(seen["wrong"]),
        "examples": [*seen["lost"][:3], *seen["wrong"][:3]],
        "attacks": (attacks := sum(sum(answers.values()) for answers in seen["answers"].values())),
        "attacks_answered_500": errors,
        "health_ms": quantiles(seen["health"]),
        "first_token_ms": quantiles(seen["firsts"]),
        "gap_ms": quantiles(seen["gaps"]),
        "memory_mib": {"first": memory[0][1], "last": memory[-1][1], "readings": memory},
    }
    share = memory[-1][0] / max(1, sum(seen["ended"].values()) + attacks)  # of the requests answered that were taken
    bound = (slope + 1.96 * error) * share
    report["memory_mib"] |= {"slope_per_1000_answered": slope * share, "upper_95": bound}
    report["memory_mib"] |= {"slope_per_1000_taken": slope, "upper_95_per_1000_taken": slope + 1.96 * error}
    held = {
        "lost": not seen["lost"],
        "wrong": not seen["wrong"],
        "attacks": not errors,
        "health": report["health_ms"]["worst"] <= options.health,
        "gap": report["gap_ms"]["worst"] <= options.gap,
        "memory": bound < options.leak_limit,  # not so where there are too few readings to tell
    }
    return report | {"goals": held, "failed": [name for name, holds in held.items() if not holds]}


def quantiles(seconds: list[float]) -> dict[str, float]:
    """p50, p99, p99.9 and the worst, in milliseconds."""
    names = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999, "worst": 1.0}
    return {name: round(1e3 * float(np.quantile(seconds, at)), 1) for name, at in names.items()}


def plot(gaps: list[float], memory: Memory, options: Any) -> None:
    """Resident memory over requests, and how many gaps were longer than so many milliseconds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    left.plot(*zip(*memory, strict=True))
    left.set(xlabel="requests taken that have ended", ylabel="resident memory, MiB", ylim=(0, None))
    right.plot(1e3 * np.sort(gaps)[::-1], np.arange(1, len(gaps) + 1))
    right.axvline(options.gap, color="0.6", linestyle="--")
    right.set(xlabel="gap in a stream, ms", ylabel="gaps at least as long", yscale="log")
    for axis in (left, right):
        axis.grid(alpha=0.3)
    figure.tight_layout()
    options.results.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.results / "strangers.png", dpi=130)


@command
def main() -> None:
    parser = Parser(prog="scripts.soak.strangers", description="A busy server among strangers who attack it.")
    parser.add_argument("--pair", type=Path, default=ROOT / "build" / "demo-pair", help="(default %(default)s)")
    parser.add_argument("--connections", type=int, default=64, help="(default %(default)s)")
    parser.add_argument("--seconds", type=float, default=300, help="after the warm-up (default %(default)s)")
    parser.add_argument("--warm-up", type=float, default=120, help="seconds (default %(default)s)")
    parser.add_argument("--strangers", type=int, default=3, help="who attack at once (default %(default)s)")
    parser.add_argument("--health", type=float, default=100, help="milliseconds (default %(default)s)")
    parser.add_argument("--gap", type=float, default=250, help="milliseconds (default %(default)s)")
    parser.add_argument("--leak-limit", type=float, default=5, help="MiB per 1,000 requests (default %(default)s)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write to")
    options = parser.parse_args()
    quiet_transformers()
    report: dict[str, Any] = {"machine": machine()}
    llm = LLM(
        options.pair, RuntimeConfig(provider="cpu", rows=ROWS, max_waiting=min(WAITING, options.connections // 2))
    )
    prompts = [example.prompt for example in dataset.load("test", "sql")][:PROMPTS]
    params = {"max_tokens": TOKENS, "ignore_eos": True, "seed": 3, "speculation": "fixed"}
    alone = llm.generate(prompts, DecodingParams.from_dict(dict(params), llm.pair.defaults))
    jobs = [
        ({"model": MODEL, "prompt": prompt, **params}, result.text)
        for prompt, result in zip(prompts, alone, strict=True)
    ]
    freeze()
    load = {"connections": options.connections, "strangers": options.strangers}
    seen, memory, grammars = run(
        llm, load | {"jobs": jobs, "seconds": options.warm_up + options.seconds}, options.warm_up
    )
    report |= load | {"rows": ROWS, "seconds": options.seconds, "warm_up_seconds": options.warm_up}
    report |= summarise(seen, memory, options)
    report["memory_mib"]["kept_grammars"] = grammars
    for name, answers in seen["answers"].items():
        slowest = seen["slowest"].get(name, {})
        health, gap = (1e3 * slowest.get(what, 0) for what in ("health", "gap"))
        print(f"{name:45} {answers}  at worst: health {health:.0f} ms, gap {gap:.0f} ms")
    for name, met in report["goals"].items():
        print(f"{'met' if met else 'MISSED'}: {name}")
    plot(seen["gaps"], memory, options)
    report["passed"] = not report["failed"]
    finish("scripts.soak.strangers", "strangers.json", report, options.results)


if __name__ == "__main__":
    main()
