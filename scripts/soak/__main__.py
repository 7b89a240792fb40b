"""A server under attack: do its other clients notice?

    python -m scripts.soak                   six minutes; --minutes 10 attacks for longer
    python -m scripts.soak --replicas 2      the same behind a gateway, where replicas are killed as well
    python -m scripts.soak --proxy           the same behind the reverse proxy of docs/deployment.md
    python -m scripts.soak --quick           half a minute, which is too short for most attacks

Control streams of all methods, whose texts are known, keep the server busy: at first alone, then beside a stranger who
makes one attack of `scripts/soak/attacks.py` after another. It fails (exit code 1) if

* a control stream ends with another text than it gets alone, or not at all; one whose replica was killed may break off;
* an attack is answered otherwise than its line of the table says, or in more than a minute was not made;
* the longest gap in a control stream, or the longest answer to a question for health, is more than `GAP` seconds longer
  beside attacks than alone;
* memory grows by more than `GROWTH` MiB per minute of attacks, and by more than twice the error of that;
* in the end something still runs or waits, or more than `FILES` more files per process are open than before attacks.

Clients and server share the cores, of which strangers take what is left. Linux only.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mtad.methods import METHODS
from runtime.commands.entry import Parser, command
from scripts.clients.served import Server, served
from scripts.paths import RESULTS, ROOT
from scripts.results import Rows, save, table
from scripts.soak.attacks import ATTACKS, MIXTURE, REFUSALS, Made, strangers
from scripts.soak.controls import ENDS, Seen, crowd, known_texts, left_over, reading
from scripts.soak.proxy import proxied
from scripts.soak.wire import MARK, Watch, replicas

GAP, GROWTH, FILES = 0.25, 2.0, 8
SERVER = (
    *("--provider", "cpu", "--threads", "1", "--rows", "16", "--max-waiting", "32"),
    *("--body-seconds", "3", "--request-seconds", "60"),
)


async def soak(server: Server, requests: int, quiet: float, attacked: float) -> dict[str, Any]:
    """Keep a server busy with so many requests for so many seconds alone and beside attacks; what was seen."""
    from openai import AsyncOpenAI
    from tqdm import tqdm

    readings: dict[str, list[tuple[float, float, int]]] = {"alone": [], "beside attacks": []}
    names = [one.name for one in ATTACKS if replicas(server) or not one.on_replicas]
    client = AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    jobs, began = await known_texts(client, requests), time.monotonic()

    async def watch(phase: str, seconds: float) -> None:
        for _ in tqdm(range(round(seconds)), desc=phase, unit="s"):
            readings[phase].append((time.monotonic() - began, *await asyncio.to_thread(reading, server)))
            await asyncio.sleep(1)

    health = {name: Watch() for name in readings}

    async def busy(phase: str, ended: Callable[[], bool]) -> Seen:
        found, _ = await asyncio.gather(crowd(client, jobs, ended), health[phase].ask(server, ended))
        return found

    waiting = asyncio.create_task(watch("alone", quiet))
    seen = {"alone": await busy("alone", waiting.done)}
    files = [reading(server)[1]]
    waiting = asyncio.create_task(watch("beside attacks", attacked))
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        attacking = asyncio.wrap_future(pool.submit(strangers, server, names, attacked))
        seen["beside attacks"] = await busy("beside attacks", attacking.done)
        made = await attacking
    await waiting
    end = time.monotonic() + 15
    most = files[0] + FILES * (1 + len(replicas(server)))
    while (left_over(server) or reading(server)[1] > most) and time.monotonic() < end:
        await asyncio.sleep(0.1)
    attacks = {}
    for name, answers in {**{one.name: one.answers for one in ATTACKS if one.name in names}, MIXTURE: REFUSALS}.items():
        mine = [one for one in made if one[0] == name]

        def longest(waits: list[tuple[float, float]], mine: list[Made] = mine) -> float:
            return max((s for at, s in waits if any(start < at < end + s for _, start, end, _ in mine)), default=0.0)

        waited = {"gap": longest(seen["beside attacks"].gaps), "health": longest(health["beside attacks"].seconds)}
        given = Counter(str(status) for *_, statuses in mine for status in statuses)
        attacks[name] = {"given": given, "allowed": answers, **waited}
    return {
        "streams": {
            name: {
                "ended": one.ended,
                "problems": one.problems,
                "gap": max((gap for _, gap in one.gaps), default=0.0),
                "health": max((seconds for _, seconds in health[name].seconds), default=0.0),
            }
            for name, one in seen.items()
        },
        "attacks": attacks,
        "replicas": len(replicas(server)),
        "readings": readings,
        "growth": growth(readings["beside attacks"]),
        "files": [*files, reading(server)[1]],
        "left_over": left_over(server),
    }


def growth(readings: Sequence[tuple[float, float, int]]) -> tuple[float, float]:
    """What memory grows by after the first quarter, MiB per minute, and the standard error of that.

    It is the slope of a line through the means of 8 stretches, because neighbouring readings are alike.
    """
    from scipy.stats import linregress

    stretches = np.array_split(np.array(readings)[len(readings) // 4 :, :2], 8)
    line = linregress(*np.array([stretch.mean(axis=0) for stretch in stretches if len(stretch)]).T)
    return 60 * float(line.slope), 60 * float(line.stderr)


def problems(figures: dict[str, Any]) -> list[str]:
    """What does not hold, one line each."""
    streams, (before, after), (slope, error) = figures["streams"], figures["files"], figures["growth"]
    found = [problem for seen in streams.values() for problem in seen["problems"]]
    long = len(figures["readings"]["beside attacks"]) > 60  # a short one makes few, and shows memory's start only
    for name, attack in figures["attacks"].items():
        if others := sorted(set(map(int, attack["given"])) - set(attack["allowed"])):
            found.append(f"{name}: answered with {others}, not with {attack['allowed']}")
        if long and not attack["given"]:
            found.append(f"{name}: not made; give more minutes")
    for name, words in (("gap", "a control stream"), ("health", "a question for health")):
        longer = streams["beside attacks"][name] - streams["alone"][name]
        if longer > GAP:
            found.append(f"beside attacks {words} waited {longer:.2f} s longer than alone")
    if long and slope > max(GROWTH, 2 * error):
        found.append(f"memory grows by {slope:.1f} ± {error:.1f} MiB per minute")
    if after > before + FILES * (1 + figures["replicas"]):
        found.append(f"{after} files are open afterwards, {before} before")
    return found + [f"left over: {line}" for line in figures["left_over"]]


def tables(figures: dict[str, Any]) -> dict[str, Rows]:
    """What is shown: the streams and the server, and what each attack was answered."""
    streams, memory = figures["streams"].values(), figures["readings"].values()
    rows = [
        ["", *figures["streams"]],
        *([f"control streams {how}", *(f"{one['ended'].get(how, 0):,}" for one in streams)] for how in ENDS),
        ["longest gap in a control stream, ms", *(f"{1000 * one['gap']:.0f}" for one in streams)],
        ["longest answer to a question for health, ms", *(f"{1000 * one['health']:.0f}" for one in streams)],
        ["open files afterwards", *map(str, figures["files"])],
        ["resident memory, most, MiB", *(f"{max(mib for _, mib, _ in one):.0f}" for one in memory)],
        ["growth of memory, MiB per minute", "", "{:.1f} ± {:.1f}".format(*figures["growth"])],
    ]
    attacks = [["attack", "answers", "longest gap in a control stream meanwhile, ms", "longest answer of health, ms"]]
    for name, one in figures["attacks"].items():
        answers = ", ".join(f"{count} x {status}" for status, count in one["given"].items()).replace(" x 0", " x none")
        attacks.append([name, answers or "not made", f"{1000 * one['gap']:.0f}", f"{1000 * one['health']:.0f}"])
    return {"soak": rows, "attacks": attacks}


@command
def main() -> None:
    parser = Parser(prog="scripts.soak", description="A server under attack: do its other clients notice?")
    parser.add_argument("--pair", type=Path, default=ROOT / "build" / "demo-pair", help="(default %(default)s)")
    parser.add_argument("--replicas", type=int, choices=(1, 2, 4), default=1, help="engines (default %(default)s)")
    parser.add_argument("--proxy", action="store_true", help="before it the reverse proxy of docs/deployment.md")
    parser.add_argument("--minutes", type=float, default=5, help="of attacks (default %(default)g)")
    parser.add_argument("--quick", action="store_true", help="6 seconds of attacks, into build/results")
    parser.add_argument("--results", type=Path, help="folder to write to (default docs/results)")
    options = parser.parse_args()
    attacks = 60 * options.minutes
    quiet, attacked, count = (2, 6, len(METHODS)) if options.quick else (60, attacks, 4 * len(METHODS))
    folder = options.results or (ROOT / "build" / "results" if options.quick else RESULTS)
    path = folder / f"soak{'-replicas' * (options.replicas > 1)}{'-proxy' * options.proxy}.json"
    started = (
        ("--replicas", str(options.replicas), "--replica-cpus", "0.1", "--stall-seconds", "10")
        if options.replicas > 1
        else ()
    )
    os.environ |= {MARK: str(os.getpid()), **({"FORWARDED_ALLOW_IPS": "127.0.0.1"} if options.proxy else {})}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        pair = folder / "pair"
        pair.symlink_to(options.pair.resolve())  # an attack leads it elsewhere
        server = stack.enter_context(served(pair, *SERVER, *started))
        if options.proxy:
            port = stack.enter_context(proxied(int(server.url.rpartition(":")[2]), folder))
            server = replace(server, url=f"http://127.0.0.1:{port}")
        figures = asyncio.run(soak(server, count, quiet, attacked))
    save(path, "scripts.soak.__main__", figures)
    print(*(table(rows) for rows in tables(figures).values()), sep="\n\n")
    print(*(problems(figures) or ["All of it holds."]), sep="\n")
    sys.exit(bool(problems(figures)))


if __name__ == "__main__":
    main()
