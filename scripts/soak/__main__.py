"""Thousands of mixed requests through `AsyncLLM`: is anything lost, wrong, slow to leave, or left behind?

    python -m scripts.soak                   2,400 requests, 16 rows, a few minutes
    python -m scripts.soak --requests 300    a short form

Clients keep the engine busy in a closed loop; there are more of them than rows and places to wait together, so requests
queue by priority and some are turned away and come again. Each request has its own method, draft, sampling, length,
stop strings, choices and prompt (a single token up to several hundred; many start alike), all made from one seed. A
fifth is cancelled, after some time, after some pieces, or by leaving the loop over its pieces. What must hold:

* every choice of every request ends exactly once, nothing fails, and the engine's own totals agree;
* a sample of those not cancelled has the tokens and the text they get alone, in another `LLM` without kept prompts,
  where the engines promise that (`--provider cpu`);
* memory is flat: a line through resident memory after the first quarter does not rise by more than `--leak-limit` a
  1,000 requests, and one through the interpreter's allocated blocks not by more than `BLOCKS`; a slope within two
  standard errors of 0 is none. The harness keeps nothing of a request but its sample's tokens, as arrays: in lists,
  each token is a block. Each reading is taken after the C library has been asked for what it holds free
  (`malloc_trim`), so that it is of memory in use: how much free memory glibc keeps goes up and down by some 20 MiB.
  The readings before that are reported as well;
* the engine's bookkeeping is consistent at the end (`check_integrity`).

Writes soak.json and soak.png; the last line is one JSON object, the exit code 1 if anything of it fails. Linux only:
resident memory is read from /proc.
"""

from __future__ import annotations

import asyncio
import gc
import json
import math
import random
import sys
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from engines.quiet import quiet_transformers
from mtad.errors import InvalidInput
from runtime.async_llm import AsyncLLM
from runtime.commands.entry import Parser, add_placement, command, placed_config
from runtime.llm import LLM
from runtime.scheduler.scheduler import QueueFull
from scripts.demo import dataset
from scripts.machine import machine
from scripts.paths import RESULTS, ROOT
from scripts.soak.figures import Seen, percentiles, plot, resident, trend, trim
from scripts.soak.jobs import Job, make_job

WAIT = 300.0
"""Seconds after which a request that has not ended counts as lost."""
CLIENTS_EXTRA, WAITING = 8, 6
"""Clients beyond the rows, and places in the queue: fewer, so that some are turned away."""
BLOCKS = 20000.0
"""Allocated blocks of the interpreter that 1,000 requests may leave behind; a running one has some hundred."""


async def client(engine: AsyncLLM, number: int, job: Job, seen: Seen, keep: bool) -> None:
    """Submit one job, again if it is turned away, and watch it to its end."""
    started = time.perf_counter()
    while True:
        try:
            stream = await engine.submit(job.prompt, job.params, job.priority)
            break
        except QueueFull as full:
            seen.turned_away += 1
            await asyncio.sleep(min(full.retry_after, 1.0))
    timer = asyncio.get_running_loop().call_later(job.after, stream.cancel) if job.cancel == "seconds" else None
    tokens: list[list[int]] = [[] for _ in range(job.params.n)]
    texts, ended = [""] * job.params.n, [False] * job.params.n
    first, pieces, at_first = 0.0, 0, 0
    if job.cancel == "pieces" and job.after == 0:
        stream.cancel()
    async for piece in stream:
        pieces += 1
        if ended[piece.index]:
            seen.problems.append(f"request {number}: a piece after the end of choice {piece.index}")
        tokens[piece.index] += piece.token_ids
        texts[piece.index] += piece.text
        if not first and piece.token_ids:
            first, at_first = time.perf_counter() - started, sum(map(len, tokens))
        if piece.finish_reason:
            ended[piece.index] = True
            seen.ends[piece.finish_reason] += 1
        elif job.cancel == "leave" and pieces > job.after:
            seen.ends["left"] += 1
            break
        if job.cancel == "pieces" and pieces == job.after:
            stream.cancel()
    else:
        if not all(ended):
            seen.problems.append(f"request {number}: its pieces ended, choices did not: {ended}")
    if timer:
        timer.cancel()
    if job.cancel:
        return
    whole, count = time.perf_counter() - started, sum(map(len, tokens))
    for index, own in enumerate(tokens):
        if not 1 <= len(own) <= job.params.max_tokens:
            seen.problems.append(f"request {number}: {len(own)} tokens in choice {index}")
    seen.firsts.append(first)
    seen.wholes.append(whole)
    seen.paces.append((whole - first) / (count - at_first) if count > at_first else math.nan)
    if keep:
        seen.kept[number] = [(array("q", own), text) for own, text in zip(tokens, texts, strict=True)]


async def soak(
    llm: LLM, prompts: Sequence[Sequence[int]], count: int, seed: int, sample: int = 100, samples: int = 200
) -> tuple[Seen, dict[str, Any]]:
    """Run `count` jobs; what was seen, and the engine's totals.

    Args:
        llm: idle, for this call alone; its queue should hold fewer than `CLIENTS_EXTRA` requests.
        prompts: material, token ids.
        count: requests.
        seed: of the jobs.
        sample: requests whose tokens are kept.
        samples: readings of resident memory.
    """
    seen, numbers, every = Seen(), iter(range(count)), max(1, count // samples)
    scheduler = llm.loop.scheduler
    room = scheduler.room_for_tokens
    keep = set(random.Random(seed).sample(range(count), min(count, 2 * sample)))  # cancelled and adaptive ones drop out
    gc.collect()
    gc.freeze()  # what is there already is not looked through at each reading
    with tqdm(total=count, desc="soak", unit="request", file=sys.stderr) as bar:

        async def work(engine: AsyncLLM) -> None:
            for number in numbers:
                job = make_job(number, seed, prompts, room)
                try:
                    async with asyncio.timeout(WAIT):
                        kept = number in keep and not job.params.adaptive and len(seen.kept) < sample
                        await client(engine, number, job, seen, kept)
                except TimeoutError:
                    seen.problems.append(f"request {number}: lost, not ended after {WAIT:.0f} s")
                except Exception as error:
                    seen.problems.append(f"request {number}: {type(error).__name__}: {error}")
                bar.update()
                if bar.n % every == 0:
                    gc.collect()
                    seen.untrimmed.append((int(bar.n), resident() / 2**20))
                    trim()
                    seen.memory.append((int(bar.n), resident() / 2**20, sys.getallocatedblocks()))

        async with AsyncLLM(llm) as engine:
            await asyncio.gather(*(work(engine) for _ in range(scheduler.rows + CLIENTS_EXTRA)))
    gc.unfreeze()
    try:
        engine.check_integrity()
    except AssertionError as error:
        seen.problems.append(f"the engine's bookkeeping: {error}")
    return seen, engine.statistics()


def check_ends(seen: Seen, totals: dict[str, Any], jobs: Sequence[Job]) -> None:
    """Every choice ended once, by the clients' count and by the engine's; adds to `seen.problems`."""
    choices, ended = sum(job.params.n for job in jobs), dict(totals["requests"])
    if seen.ends.total() != choices:
        seen.problems.append(f"the clients saw {seen.ends.total()} choices end, of {choices}")
    if sum(ended.values()) != choices or ended["error"]:
        seen.problems.append(f"the engine ended {ended}, of {choices} choices")
    for reason in ("stop", "length"):
        if not seen.ends[reason] <= ended[reason] <= seen.ends[reason] + seen.ends["left"]:
            seen.problems.append(f"{reason}: the clients saw {seen.ends[reason]}, the engine {ended[reason]}")
    if not all(job.cancel for job in jobs) and not len(seen.wholes):
        seen.problems.append("no request was seen to its end")


def compare(llm: LLM, jobs: Sequence[Job], seen: Seen) -> int:
    """Run the sample again, each request alone; adds to `seen.problems`, returns how many were compared."""
    for number, kept in tqdm(sorted(seen.kept.items()), desc="alone", unit="request", file=sys.stderr):
        results = llm.generate(jobs[number].prompt, jobs[number].params)
        alone = [(array("q", result.token_ids), result.text) for result in results]
        if alone != kept:
            seen.problems.append(f"request {number} ({jobs[number].params.method}): other tokens or text than alone")
    return len(seen.kept)


@command
def main() -> None:
    parser = Parser(prog="scripts.soak", description="Thousands of mixed requests through AsyncLLM.")
    parser.add_argument(
        "--pair", type=Path, default=ROOT / "build" / "demo-pair", help="pair folder (default %(default)s)"
    )
    parser.add_argument("--requests", type=int, default=2400, help="(default %(default)s)")
    parser.add_argument("--rows", type=int, default=16, help="requests decoded at once (default %(default)s)")
    parser.add_argument("--sample", type=int, default=100, help="requests run again alone (default %(default)s)")
    parser.add_argument("--leak-limit", type=float, default=5.0, help="MiB per 1,000 requests (default %(default)s)")
    parser.add_argument("--memory", help="a limit, see RuntimeConfig")
    add_placement(parser)
    parser.add_argument("--seed", type=int, default=0, help="of the requests (default %(default)s)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write to")
    options = parser.parse_args()
    for name, least in (("requests", 40), ("rows", 1), ("sample", 1)):
        if getattr(options, name) < least:
            raise InvalidInput(name, getattr(options, name), f"give at least {least}")
    torch.set_num_threads(1)
    quiet_transformers()
    report: dict[str, Any] = {"command": "python -m scripts.soak " + " ".join(sys.argv[1:]), "machine": machine()}
    size = placed_config(options, rows=options.rows, memory=options.memory, max_waiting=WAITING)
    llm = LLM(options.pair, size)
    prompts = [list(llm.pair.tokenizer(e.prompt).input_ids) for k in ("sql", "code") for e in dataset.load("test", k)]
    started = time.perf_counter()
    seen, totals = asyncio.run(soak(llm, prompts, options.requests, options.seed, options.sample))
    seconds = time.perf_counter() - started
    scheduler = llm.loop.scheduler
    room = scheduler.room_for_tokens
    jobs = [make_job(number, options.seed, prompts, room) for number in range(options.requests)]
    check_ends(seen, totals, jobs)
    compared = 0
    if llm.pair.target.reproducible and llm.pair.auxiliary.reproducible:
        compared = compare(LLM(options.pair, placed_config(options, rows=1, prefix_tokens=0)), jobs, seen)
    slope, error = trend([(at, mib) for at, mib, _ in seen.memory])
    untrimmed, untrimmed_error = trend(seen.untrimmed)
    blocks, blocks_error = trend([(at, count) for at, _, count in seen.memory])
    for grown, its_error, limit, what in (
        (slope, error, options.leak_limit, "MiB"),
        (blocks, blocks_error, BLOCKS, "allocated blocks"),
    ):
        if not (grown <= limit or grown <= 2 * its_error):
            seen.problems.append(f"memory grows by {grown:.2f} +- {its_error:.2f} {what} per 1,000 requests")
    report |= {
        "requests": options.requests,
        "rows": options.rows,
        "runs_on": llm.pair.runs_on,
        "preemptions": totals["preemptions"],
        "clients": options.rows + CLIENTS_EXTRA,
        "seconds": seconds,
        "tokens_per_second": totals["tokens"] / seconds,
        "ended": dict(seen.ends),
        "turned_away": seen.turned_away,
        "compared_alone": compared,
        "memory_mib": {
            "first": seen.memory[0][1],
            "last": seen.memory[-1][1],
            "highest": max(mib for _, mib, _ in seen.memory),
            "slope_per_1000_requests": slope,
            "slope_error": error,
            "untrimmed_last": seen.untrimmed[-1][1],
            "untrimmed_slope_per_1000_requests": untrimmed,
            "untrimmed_slope_error": untrimmed_error,
            "blocks_per_1000_requests": blocks,
            "blocks_error": blocks_error,
        },
        "first_piece_ms": percentiles(seen.firsts),
        "per_token_ms": percentiles(seen.paces),
        "end_to_end_ms": percentiles(seen.wholes),
        "problems": seen.problems,
        "passed": not seen.problems,
    }
    options.results.mkdir(parents=True, exist_ok=True)
    (options.results / "soak.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    plot(seen, slope, error, options.results / "soak.png")
    print(f"{options.requests} requests in {seconds:.0f} s: {dict(seen.ends)}, {seen.turned_away} times turned away")
    print(f"{compared} compared with the same request alone; memory {slope:+.2f} +- {error:.2f} MiB per 1,000 requests")
    for name in ("first_piece_ms", "per_token_ms", "end_to_end_ms"):
        print(f"{name}: " + ", ".join(f"{p} {value:.1f}" for p, value in report[name].items()))
    for problem in seen.problems[:20]:
        print(f"PROBLEM: {problem}")
    print("passed" if report["passed"] else f"FAILED: {len(seen.problems)} problems")
    print(json.dumps(report))
    sys.exit(0 if report["passed"] else 1)


if __name__ == "__main__":
    main()
