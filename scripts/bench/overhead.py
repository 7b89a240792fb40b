"""What of a block is spent outside the two engines' `step`: the rules, the loop, the output."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tqdm import tqdm

from engines import Engine
from mtad.params import DecodingParams
from runtime import LLM


def measure_overhead(
    llm: LLM, blocks: int, compared: Mapping[str, DecodingParams], text: Sequence[int], lengths: Sequence[int]
) -> dict[str, Any]:
    """Median milliseconds of a block, of its engine steps, and of what is neither, at 1 and 8 rows.

    Args:
        compared: what is measured, by name.
        text: tokens of the prompts.
        lengths: of the prompts.
    """
    clock = {"target": 0.0, "auxiliary": 0.0}

    def timed(name: str, engine: Engine) -> Callable[[], Any]:
        plain = engine.step

        def step(*args: Any) -> Any:
            started = time.perf_counter()
            logits = plain(*args)
            clock[name] += time.perf_counter() - started
            return logits

        vars(engine)["step"] = step
        return lambda: vars(engine).pop("step")

    restore = [timed("target", llm.pair.target), timed("auxiliary", llm.pair.auxiliary)]
    samples: dict[tuple[str, int, int], list[tuple[float, float, float]]] = {}
    rounds = 4
    cases = [(length, rows) for length in lengths for rows in (1, min(8, llm.pair.target.spec.rows))]
    for _ in tqdm(range(rounds), desc="overhead", unit="round", file=sys.stderr):
        for length, rows in cases:
            longest = min(400, llm.loop.scheduler.room_for_tokens - length)
            for name, params in compared.items():
                for row in range(rows):
                    prompt = list(text[row * 500 : row * 500 + length])
                    llm.add(prompt, replace(params, seed=row, ignore_eos=True, max_tokens=longest))
                while len(llm.loop.scheduler.running) < rows:  # turns that store prompts as well
                    llm.step()
                for block in range(4 + blocks // rounds):
                    clock.update(target=0.0, auxiliary=0.0)
                    started = time.perf_counter()
                    llm.step()
                    whole = time.perf_counter() - started
                    if block >= 4:  # the first ones warm up
                        times = whole, clock["target"], clock["auxiliary"]
                        samples.setdefault((name, length, rows), []).append(times)
                llm.cancel(*llm.loop.scheduler.running)
                llm.step()  # which returns them
    for undo in restore:
        undo()
    report: dict[str, Any] = {}
    columns = "block ms  target ms  auxiliary ms  outside ms    share"
    print(f"\n{'method':<34} prompt  rows  {columns}  (medians of {blocks} blocks)")
    for (name, length, rows), taken in samples.items():
        outside = [whole - target - auxiliary for whole, target, auxiliary in taken]
        share = statistics.median(rest / whole for rest, (whole, _, _) in zip(outside, taken, strict=True))
        whole, target, auxiliary = (statistics.median(column) * 1e3 for column in zip(*taken, strict=True))
        rest = statistics.median(outside) * 1e3
        figures = f"{whole:8.2f}  {target:9.2f}  {auxiliary:12.2f}  {rest:10.3f}  {share:6.1%}"
        print(f"{name:<34} {length:>6}  {rows:>4}  {figures}")
        report[f"{name}, prompt of {length}, {rows} rows"] = {
            "block_ms": whole,
            "target_ms": target,
            "auxiliary_ms": auxiliary,
            "outside_ms": rest,
            "outside_share": share,
        }
    return report
