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
from scripts.gpu.baselines import made_pair
from scripts.gpu.correct import PROMPTS
from scripts.gpu.models import NODES, demo_model, demo_tokenizer, engine_of, open_llm, pair_of, word_tokenizer
from scripts.gpu.report import Found, Skip
from scripts.gpu.setup import METHODS, Setup

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
    """Windows of seconds in which a method decodes the prompts over and over, methods in turn, each reported at once.

    Prompts are in the time and in the energy; the idle machine's power, taken before, is not taken off.
    """
    if not setup.meter.available:
        found.note(energy=setup.meter.name)
        if setup.on_gpu:
            raise Skip(f"no meter: {setup.meter.name}")
    sizes = setup.sizes
    params = {
        method: DecodingParams(speculation="fixed", method=method, ignore_eos=True, max_tokens=sizes.tokens, seed=3)
        for method in METHODS
    }
    llm = open_llm(pair, graphs=True, record=list(params.values()))
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
    windows: dict[str, list[dict[str, float]]] = {method: [] for method in METHODS}
    for turn, method in itertools.product(range(WINDOWS), METHODS):
        window = _window(llm, prompts, replace(params[method], seed=100 + turn), setup)
        windows[method].append(window)
        found.row(method=method, window=turn, **window)
        middle = {
            name: {figure: statistics.median(one[figure] for one in own) for figure in own[0]}
            for name, own in windows.items()
            if own
        }
        found.note(medians=middle)


def _window(llm: LLM, prompts: list[list[int]], params: DecodingParams, setup: Setup) -> dict[str, float]:
    """Tokens per second and per target pass; with a meter, joules per token and watts."""
    tokens, efficiencies = 0, []
    setup.timer.wait()
    setup.meter.begin()
    begun = time.perf_counter()
    while not tokens or time.perf_counter() - begun < setup.sizes.seconds:
        results = llm.generate(prompts, params)
        tokens += sum(len(result.token_ids) for result in results)
        efficiencies += [result.statistics.block_efficiency for result in results]
    setup.timer.wait()
    seconds, joules = time.perf_counter() - begun, setup.meter.end()
    figures = {"tokens_s": tokens / seconds, "block_efficiency": statistics.mean(efficiencies)}
    return figures if joules is None else {**figures, "joules_token": joules / tokens, "watts": joules / seconds}
