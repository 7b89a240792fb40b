"""Stages that take blocks apart: how long their parts take, what they launch, what their graphs take."""

from __future__ import annotations

import itertools
import statistics
from dataclasses import replace
from functools import partial

import torch

from engines import Engine
from engines.pytorch.engine import TorchEngine
from mtad.params import DecodingParams
from runtime import LLM
from runtime.pair import Pair
from scripts.gpu.models import bytes_read, engine_of, open_llm, pair_of, random_model, shape, word_tokenizer
from scripts.gpu.report import Found
from scripts.gpu.setup import METHODS, Setup
from scripts.gpu.speed import bandwidth, launched

LARGEST = 30
"""Kernels of a block that are listed."""


def open_random(names: tuple[str, str], setup: Setup) -> Pair:
    """A pair of random weights, with columns for a prompt and some blocks."""
    models = [random_model(shape(name), setup.device, setup.dtype, seed) for seed, name in enumerate(names)]
    columns = setup.sizes.prompt + 64 * (8 if setup.on_gpu else 2)
    return pair_of(
        [engine_of(model, max(setup.sizes.rows), columns) for model in models],
        word_tokenizer(models[0].config.vocab_size),
    )


def weights_read(engine: Engine) -> int:
    """Bytes of weights that a step of a torch engine reads."""
    assert isinstance(engine, TorchEngine)
    return bytes_read(engine.model.model)


def start(llm: LLM, method: str, count: int, setup: Setup) -> None:
    """Have `count` requests of a method running, and none else."""
    llm.cancel(*llm.loop.scheduler.running)
    left = llm.loop.scheduler.room_for_tokens - setup.sizes.prompt
    params = DecodingParams(speculation="fixed", method=method, ignore_eos=True, max_tokens=left)
    draw = torch.Generator().manual_seed(5)
    for row in range(count):
        prompt = torch.randint(llm.pair.vocab_size, (setup.sizes.prompt,), generator=draw).tolist()
        llm.add(prompt, replace(params, seed=row))
    while len(llm.loop.scheduler.running) < count:
        llm.step()


def blocks(names: tuple[str, str], setup: Setup, found: Found) -> None:
    """A block of random weights, as a graph and by the functions of the host, on the host's clock.

    The floor is that of the weights alone, read once by the target and by every level of a draft.
    """
    sizes, pair, speed = setup.sizes, open_random(names, setup), bandwidth(setup)
    target, auxiliary = (weights_read(engine) / speed * 1e3 for engine in (pair.target, pair.auxiliary))
    for graphs in (True, False):
        llm = open_llm(pair, graphs)
        for method, count in itertools.product(METHODS, sizes.rows):
            start(llm, method, count, setup)
            taken: list[float] = []
            for block in range(8 if sizes.few else 14):
                whole = setup.timer.whole(llm.step)
                if block >= 4:  # the first ones record and warm up
                    taken.append(1e3 * whole)
            low, whole, high = statistics.quantiles(taken, n=4)
            floor = target + (method != "sample") * DecodingParams().draft_len * auxiliary
            found.row(
                method=method,
                rows=count,
                graph=graphs,
                floor_ms=floor,
                block_ms=whole,
                of_floor=whole / floor,
                quartiles_ms=f"{low:.3f} .. {high:.3f}",
            )


def profile(names: tuple[str, str], setup: Setup, found: Found) -> None:
    """One block of one row by method: what its graphs take of memory and time, its launches, its largest kernels.

    On a CPU, torch's operators stand for kernels.
    """
    llm = open_llm(open_random(names, setup), graphs=True)
    time_of = "self_device_time_total" if setup.on_gpu else "self_cpu_time_total"
    assert llm.blocks is not None
    for method in METHODS:
        before, recorded = memory_taken(setup), llm.blocks.recorded
        params = DecodingParams(speculation="fixed", method=method)
        seconds = setup.timer.whole(partial(llm.record, [params]))
        graphs = {"graphs": llm.blocks.recorded - recorded, "seconds": seconds}
        graphs["MiB"] = (memory_taken(setup) - before) / 2**20
        start(llm, method, 1, setup)
        for _ in range(3):
            llm.step()
        kernels = launched(llm.step, setup)
        kernels.sort(key=lambda event: -getattr(event, time_of))
        whole = sum(getattr(event, time_of) for event in kernels)
        launches = sum(event.count for event in kernels)
        found.note(**{method: {"recorded in advance": graphs, "launches": launches, "kernels_ms": whole / 1e3}})
        for event in kernels[:LARGEST]:
            taken_us = getattr(event, time_of)
            found.row(method=method, us=taken_us, share=taken_us / whole, calls=event.count, kernel=event.key[:90])
        llm.cancel(*llm.loop.scheduler.running)
    found.check("graphs of all methods", llm.blocks.recorded, 10, "graphs")


def memory_taken(setup: Setup) -> int:
    """Bytes of the device that are in use, by CUDA's own count; 0 on a CPU."""
    if not setup.on_gpu:
        return 0
    free, total = torch.cuda.mem_get_info(setup.device)
    return int(total - free)
