"""Stages that read the GPU's energy counter."""

from __future__ import annotations

import itertools
import statistics
import time
from dataclasses import replace

import torch

from mtad.params import DecodingParams
from runtime import LLM
from runtime.pair import Pair
from scripts.gpu.correct import PROMPTS
from scripts.gpu.models import NODES, demo_model, demo_tokenizer, engine_of, open_llm, pair_of, word_tokenizer
from scripts.gpu.report import Found, Skip
from scripts.gpu.setup import Setup
from scripts.gpu.speed import METHODS, made_pair

WINDOWS = 3
"""Of each method, interleaved."""


def demo(setup: Setup, found: Found) -> None:
    """Joules a token of the trained demo pair, so small that a GPU is mostly idle."""
    rows = len(PROMPTS) + 1
    engines = [engine_of(demo_model(role, setup.device, setup.dtype), rows, 512) for role in ("target", "auxiliary")]
    tokenizer = demo_tokenizer()
    prompts = [list(tokenizer(text).input_ids) for text in PROMPTS[: 2 if setup.sizes.few else None]]
    measure(pair_of(engines, tokenizer), prompts, setup, found)


def made(name: str, setup: Setup, found: Found) -> None:
    """Joules a token of a made pair (`models.MadePair`): random weights, drafts accepted at about 0.7."""
    pair, sizes = made_pair(name, setup, found), setup.sizes
    rows, vocabulary = min(8, max(sizes.rows)), pair.target.config.vocab_size
    engines = [engine_of(model, rows, sizes.prompt + sizes.tokens + NODES) for model in (pair.target, pair.auxiliary)]
    draw = torch.Generator().manual_seed(13)
    prompts = torch.randint(vocabulary, (rows, sizes.prompt), generator=draw).tolist()
    measure(pair_of(engines, word_tokenizer(vocabulary)), prompts, setup, found)


def measure(pair: Pair, prompts: list[list[int]], setup: Setup, found: Found) -> None:
    """Windows of seconds in which a method decodes the prompts over and over, methods in turn.

    Prompts are in the time and in the energy; the idle machine's power, taken before, is not taken off.
    """
    if not setup.meter.available:
        found.note(energy=setup.meter.name)
        if setup.on_gpu:
            raise Skip(f"no meter: {setup.meter.name}")
    llm = open_llm(pair, graphs=True)
    sizes = setup.sizes
    params = {
        method: DecodingParams(speculation="fixed", method=method, ignore_eos=True, max_tokens=sizes.tokens, seed=3)
        for method in METHODS
    }
    for given in params.values():
        llm.generate(prompts, given)
    setup.timer.wait()
    setup.meter.begin()
    time.sleep(min(2.0, sizes.seconds))
    idle = setup.meter.end()
    found.note(
        meter=setup.meter.name,
        idle_watts=None if idle is None else idle / min(2.0, sizes.seconds),
        requests=len(prompts),
        tokens_each=sizes.tokens,
    )
    windows: dict[str, list[tuple[float, float, float | None, float]]] = {method: [] for method in METHODS}
    for turn, method in itertools.product(range(WINDOWS), METHODS):
        windows[method].append(_window(llm, prompts, replace(params[method], seed=100 + turn), setup))
    for method, taken in windows.items():
        speeds = [tokens / seconds for tokens, seconds, *_ in taken]
        joules = [energy / tokens for tokens, _, energy, _ in taken if energy is not None]
        watts = [energy / seconds for _, seconds, energy, _ in taken if energy is not None]
        found.row(
            method=method,
            tokens_s=statistics.median(speeds),
            tokens_s_spread=f"{min(speeds):.4g} .. {max(speeds):.4g}",
            joules_token=statistics.median(joules) if joules else "none",
            joules_spread=f"{min(joules):.4g} .. {max(joules):.4g}" if joules else "",
            watts=statistics.median(watts) if watts else "none",
            block_efficiency=statistics.median(efficiency for *_, efficiency in taken),
        )


def _window(
    llm: LLM, prompts: list[list[int]], params: DecodingParams, setup: Setup
) -> tuple[float, float, float | None, float]:
    """Tokens, seconds, joules (None without a meter), tokens a target pass."""
    tokens, efficiencies = 0, []
    setup.timer.wait()
    setup.meter.begin()
    begun = time.perf_counter()
    while not tokens or time.perf_counter() - begun < setup.sizes.seconds:
        results = llm.generate(prompts, params)
        tokens += sum(len(result.token_ids) for result in results)
        efficiencies += [result.statistics.block_efficiency for result in results]
    setup.timer.wait()
    seconds = time.perf_counter() - begun
    return float(tokens), seconds, setup.meter.end(), statistics.mean(efficiencies)
