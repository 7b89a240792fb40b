"""How fast: tokens per second and joules by method and load, and where a block's time goes."""

from __future__ import annotations

import statistics
import time
from collections import Counter, defaultdict
from dataclasses import replace
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from tqdm import tqdm

from mtad import LLM
from mtad.params import DecodingParams
from runtime.pair import Pair
from scripts.energy import EnergyMeter
from scripts.gpu.models import SHAPES, open_llm, random_pair, small_auxiliary
from scripts.gpu.run import Run, Skip

METHODS, DRAFT = ("sample", "block", "mtad"), 4
SECONDS = 60
"""After so many, two rounds are enough."""
PROMPT = [*range(1, 128)]
"""Tokens of a request behind its first, which is its own, so that nothing is shared."""


def speed(run: Run) -> None:
    """Tokens per second, prompts included, and joules per token, of the largest pair that fits.

    Rounds go through all systems in turn; ratios to `sample` of the same load are paired by round. With one request,
    blocks run by the host as well, to see what capturing them gains.
    """
    loads, tokens, rounds = ((1, 2), 5, 2) if run.quick else ((1, 4, 16), 64, 4)
    pair = open_pair(run, max(loads), tokens)
    base = DecodingParams(draft_len=DRAFT, ignore_eos=True, max_tokens=tokens)
    params = {name: replace(base, method=name) for name in METHODS}
    captured, host = (open_llm(pair, captured=kind) for kind in (True, False))
    systems: list[tuple[int, str, LLM]] = [(load, name, captured) for load in loads for name in METHODS]
    systems += [(loads[0], f"{name}, by the host", host) for name in METHODS]
    meter, found = EnergyMeter(), defaultdict[tuple[int, str], list[tuple[float, float, float | None]]](list)
    end = time.monotonic() + SECONDS
    for turn in range(rounds + 1):
        if turn > 2 and time.monotonic() > end:
            break
        for load, name, llm in tqdm(systems, f"round {turn}", mininterval=0, leave=False):
            asked = replace(params[name.split(",")[0]], seed=turn)
            meter.begin()
            began = time.perf_counter()
            results = llm.generate([[row, *PROMPT] for row in range(load)], asked)
            seconds, joules = time.perf_counter() - began, meter.end()
            made = sum(len(result.token_ids) for result in results)
            if turn:  # the first round captures and warms up
                efficiency = statistics.mean(result.statistics.block_efficiency for result in results)
                found[load, name].append((made / seconds, efficiency, None if joules is None else joules / made))
    for (load, name), measured in found.items():
        rates, efficiencies, joules_each = zip(*measured, strict=True)
        ratios = [rate / other[0] for rate, other in zip(rates, found[load, "sample"], strict=True)]
        run.row(
            requests=load,
            method=name,
            tokens_per_second=statistics.median(rates),
            times_sample=f"{statistics.mean(ratios):.2f} ± {statistics.stdev(ratios) / len(ratios) ** 0.5:.2f}",
            tokens_per_pass=statistics.mean(efficiencies),
            joules_per_token="no meter" if None in joules_each else statistics.mean(joules_each),
        )


def open_pair(run: Run, rows: int, tokens: int) -> Pair:
    """The largest pair of random weights that fits the GPU's free memory; the smallest on a CPU."""
    free = torch.cuda.mem_get_info(run.device)[0] / 1e9 if run.on_gpu and not run.quick else 0.0
    name = next(name for name, (gigabytes, _) in SHAPES.items() if gigabytes <= free)
    run.findings.send(("facts", {"pair": f"{name}, random weights"}))
    return random_pair(name, run.device, rows, 128 + tokens + 64)


def read_by(engine: Any) -> int:
    """Bytes of weights that a step reads."""
    model = engine.model.model
    embeddings, head = (part.weight for part in (model.get_input_embeddings(), model.get_output_embeddings()))
    return sum(int(p.nbytes) for p in model.parameters()) - (0 if head is embeddings else int(embeddings.nbytes))


def copied(run: Run) -> float:
    """Bytes per second that a copy on the device reads and writes together."""
    source = torch.zeros(2**30 if run.on_gpu else 2**20, dtype=torch.float16, device=run.device)
    aim, seconds = torch.empty_like(source), list[float]()
    for _ in range(5):
        began = time.perf_counter()
        aim.copy_(source)
        float(aim[0])  # waits
        seconds.append(time.perf_counter() - began)
    return 2 * source.nbytes / min(seconds)


def profile(run: Run) -> None:
    """What the device does in one captured block of one request; on a CPU, torch's operators.

    By method, and once with an auxiliary of the shape of Llama-3.2-1B, whose drafts are hardly accepted. On a GPU a
    block is one launch of a graph and one wait. `block_ms` is the median of 14 blocks that nothing profiles; of five
    that are profiled, the one of middle length is told. The floor is what reading the weights takes.
    """
    pair, bandwidth = open_pair(run, 1, 256), copied(run)
    run.findings.send(("facts", {"gigabytes per second of a copy": bandwidth / 1e9}))
    small = replace(pair, auxiliary=small_auxiliary(pair, 448)) if run.on_gpu else pair
    systems = [(name, name, pair) for name in METHODS] + [("mtad, small auxiliary", "mtad", small)] * run.on_gpu
    for label, method, one in systems:
        read = read_by(one.target) + DRAFT * read_by(one.auxiliary) * (method != "sample")
        profile_block(run, label, method, one, read / bandwidth)


def profile_block(run: Run, label: str, method: str, pair: Pair, floor: float) -> None:
    """Report one block's row, and its largest kernels."""
    kinds = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * run.on_gpu
    llm = open_llm(pair, captured=True)
    params = DecodingParams(method=method, draft_len=DRAFT, ignore_eos=True, max_tokens=256, seed=1)
    request = llm.add([0, *PROMPT], params)
    seconds = list[float]()
    for _ in range(20):  # the first ones store the prompt, capture, and warm up
        began = time.perf_counter()
        llm.step()
        seconds.append(time.perf_counter() - began)
    wanted, profiled = DeviceType.CUDA if run.on_gpu else DeviceType.CPU, list[tuple[float, list[Any], list[Any]]]()
    for _ in range(1 if run.quick else 5):
        with torch.profiler.profile(activities=kinds) as taken:
            llm.step()
        events: list[Any] = list(taken.events() or ())
        kernels = [one for one in events if one.device_type == wanted and not one.cpu_children]
        if not kernels:
            raise Skip("the profiler sees no kernels here")
        # a copy of the input may be done long before the host has launched the graph
        inside = [one.time_range for one in kernels if not one.name.startswith("Memcpy")]
        profiled.append((max(one.end for one in inside) - min(one.start for one in inside), kernels, events))
    llm.cancel(request)
    span, kernels, events = sorted(profiled, key=lambda one: one[0])[len(profiled) // 2]
    times, launched = Counter[str](), Counter[str](one.name[:80] for one in kernels)
    for one in kernels:
        times[one.name[:80]] += one.time_range.elapsed_us()
    names = Counter(one.name for one in events if one.device_type == DeviceType.CPU)
    waits = names["cudaStreamSynchronize"] + names["cudaEventSynchronize"]
    run.row(
        method=label,
        block_ms=1e3 * statistics.median(seconds[6:]),
        kernels=len(kernels),
        kernels_ms=times.total() / 1e3,
        gaps_ms=(span - times.total()) / 1e3,
        floor_ms=1e3 * floor,
        times_floor=1e-6 * span / floor,
        graphs=names["cudaGraphLaunch"],
        other_launches=sum(count for name, count in names.items() if "LaunchKernel" in name),
        waits=waits,
    )
    if run.on_gpu:
        run.compare(f"{label}: blocks that are no graph", abs(names["cudaGraphLaunch"] - 1), 0, "launches")
        run.compare(f"{label}: waits", waits, 1, "waits")
    largest = {name: [spent, launched[name]] for name, spent in times.most_common(24)}
    run.findings.send(("facts", {f"microseconds and launches of {label}": largest}))
