"""Stages that compare: texts with graphs and without, logits of the smaller types, the attention kernels."""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec

import torch
from torch import Tensor

from engines.base import Step, mask_length
from engines.graphs.capture import waits_are_errors
from mtad.methods import METHODS as ALL
from mtad.params import DecodingParams
from runtime.scheduler.request import Result
from scripts.gpu.models import demo_model, demo_tokenizer, engine_of, open_llm, pair_of
from scripts.gpu.report import Found, Skip
from scripts.gpu.setup import Setup

PROMPTS = (
    "SELECT name FROM singer WHERE age > 20",
    "def largest(values):\n    ",
    "How many singers are older than twenty?",
    "import os\nimport sys\n\n",
    "-- the oldest singer\nSELECT",
    "class Stack:\n    def push(self, value):\n",
    "for index in range(10):\n",
)
BOUNDS = {torch.float16: 0.02, torch.bfloat16: 0.15}
"""Largest difference of a logit that passes, in standard deviations of the logits."""
METHODS = tuple(name for name, method in ALL.items() if method.captured)
BASE = DecodingParams(speculation="fixed", ignore_eos=True, accept_threshold=0.3)


def agreement(dtype: str, setup: Setup, found: Found) -> None:
    """Texts of the demo pair: with CUDA graphs and without, alone and in mixed batches of odd sizes.

    Without graphs, blocks run by the functions of the host, which draw the same numbers but round otherwise: of all
    texts one may differ on a GPU. Then adaptive drafts, whose greedy texts are those of `sample`; graphs captured in
    advance, which have to serve every block; and whether a prompt makes the host wait.
    """
    few, texts = setup.sizes.few, 1 if setup.sizes.few else 3
    exact = dtype == "float32"
    engines = [
        engine_of(demo_model(role, setup.device, getattr(torch, dtype)), len(PROMPTS) + 1, 256)
        for role in ("target", "auxiliary")
    ]
    pair = pair_of(engines, demo_tokenizer())
    on, off = open_llm(pair, graphs=True), open_llm(pair, graphs=False)
    tokens = setup.sizes.tokens // 2
    lengths = [tokens + number % (3 if few else len(METHODS)) for number in range(len(METHODS))]
    asked = [
        replace(BASE, method=method, accept_threshold=None, max_tokens=length)
        for method, length in zip(METHODS, lengths, strict=True)
    ]
    cases = [(params.method, [replace(params, seed=row) for row in range(texts)]) for params in asked]
    for size in (5,) if few else (1, 3, 5, 7):
        params = [replace(asked[(size * row) % len(asked)], seed=100 + row) for row in range(size)]
        cases.append((f"mixed, {size} rows", params))
    for name, params in cases:
        prompts = PROMPTS[: len(params)]
        ours, theirs = (llm.generate(prompts, params) for llm in (on, off))
        different = [_differ(a, b) for a, b in zip(ours, theirs, strict=True)]
        found.check(
            f"graphs on = off: {name}", sum(at is not None for at in different), int(setup.on_gpu), "texts differ"
        )
        if any(at is not None for at in different):
            found.note(**{f"first different token, {name}": different})
        alone = [on.generate(prompt, p)[0] for prompt, p in zip(prompts, params, strict=True)]
        apart = sum(_differ(a, b) is not None for a, b in zip(alone, ours, strict=True))
        found.check(f"alone = batched: {name}", apart, 0 if exact and not setup.on_gpu else math.inf, "texts differ")
    greedy = replace(BASE, method="sample", temperature=0.0, max_tokens=tokens)
    adaptive = replace(greedy, method="speculative", speculation="adaptive")
    ours, theirs = (on.generate(PROMPTS[:3], own) for own in (adaptive, greedy))
    apart = sum(_differ(a, b) is not None for a, b in zip(ours, theirs, strict=True))
    found.check("adaptive = sample, greedy", apart, 0 if exact else math.inf, "texts differ")
    assert on.blocks is not None
    found.note(recorded=on.blocks.recorded, unrecorded=dict(on.blocks.unrecorded))
    if setup.on_gpu:
        found.check("blocks that could not be captured", sum(on.blocks.unrecorded.values()), 0, "blocks")
    some = asked[1:3] if few else asked[:4]
    prepared = open_llm(pair, graphs=True, record=some)
    assert prepared.blocks is not None
    before = prepared.blocks.recorded
    for own in some:
        prepared.generate(PROMPTS, own)
    found.check("recorded in advance, and then again", prepared.blocks.recorded - before, 0, "graphs")
    if setup.on_gpu:
        try:
            with waits_are_errors():
                prepared.loop.caches.target.prefill(0, [1, 2, 3], 0)
            waits = 0
        except RuntimeError as error:
            waits = 1
            found.note(wait=str(error)[:200])
        found.check("prompts make the host wait", waits, 0, "waits")


def _differ(ours: Result, theirs: Result) -> int | None:
    """Number of the first token that is another; None if all are the same."""
    pairs = zip(ours.token_ids, theirs.token_ids, strict=False)
    first = next((at for at, (a, b) in enumerate(pairs) if a != b), None)
    if first is None and len(ours.token_ids) != len(theirs.token_ids):
        return min(len(ours.token_ids), len(theirs.token_ids))
    return first


def precision(setup: Setup, found: Found) -> None:
    """Logits of the demo target: float16 and bfloat16 against float32 on the device; that against others.

    These are a CPU's, and those of the model's own layers, without the fused ones.
    """
    exact = _logits(setup.device, torch.float32)
    host = _logits("cpu", torch.float32)
    found.check("float32 against a CPU's", _difference(exact.cpu(), host), 1e-3, "standard deviations")
    own = _logits(setup.device, torch.float32, fused=False)
    found.check("fused layers against the model's own", _difference(exact, own), 1e-3, "standard deviations")
    for dtype, allowed in BOUNDS.items():
        name = str(dtype).removeprefix("torch.")
        difference = _difference(_logits(setup.device, dtype), exact)
        found.check(f"{name} against float32", difference, allowed, "standard deviations")


def _difference(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.double() - theirs.double()).abs().max() / theirs.double().std())


def _logits(device: str, dtype: torch.dtype, fused: bool = True) -> Tensor:
    """Logits float32 [R, S, V] of prompts of several lengths, and of a causal step behind them."""
    engine = engine_of(demo_model("target", device, dtype), 3, 128, fused=fused)
    made = torch.Generator().manual_seed(3)
    tokens = torch.randint(engine.spec.vocab_size, (3, 60), generator=made)
    for row, length in enumerate((50, 7, 33)):
        engine.step(causal(tokens[row : row + 1, :length], [0], device, first_row=row))
    return engine.step(causal(tokens[:, 55:], [50, 7, 33], device)).float()


def causal(tokens: Tensor, write_at: Sequence[int], device: str, first_row: int = 0) -> Step:
    """A step of rows [R, S] that continue what is in their first `write_at` columns."""
    steps = tokens.shape[1]
    start = torch.tensor(write_at)
    positions = start[:, None] + torch.arange(steps)
    length = mask_length(max(write_at) + steps, 1 << 20)
    mask = (torch.arange(length) <= positions[:, :, None])[:, None]
    return Step(
        tokens=tokens.to(device),
        positions=positions.to(device),
        write_at=start.to(device),
        mask=mask.to(device),
        keep=torch.arange(steps, device=device),
        first_row=first_row,
    )


def attention(setup: Setup, found: Found) -> None:
    """The Triton kernels against float64, and their times."""
    if not setup.on_gpu:
        raise Skip("the kernels run on a GPU; test_attention.py has them in Triton's interpreter")
    if find_spec("triton") is None:
        raise Skip("triton is not installed")
    if find_spec("scripts.gpu.attention_check") is None:
        raise Skip("there are no such kernels here")
    kernels = importlib.import_module("scripts.gpu.attention_check")

    found.check("attention kernels against float64", kernels.check_attention(setup.device), math.inf, "of 1 + size")
    for row in kernels.time_attention(setup.device):
        found.row(**row)
