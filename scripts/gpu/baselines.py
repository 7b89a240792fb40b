"""A pair whose drafts are accepted, and the same tokens by Hugging Face."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mtad.params import DecodingParams
from scripts.gpu.models import NODES, MadePair, bytes_read, engine_of, open_llm, pair_of, word_tokenizer
from scripts.gpu.report import Found
from scripts.gpu.setup import METHODS, Setup


def baselines(name: str, setup: Setup, found: Found) -> None:
    """Greedy tokens of one prompt by this package and by Hugging Face's `generate`, prompt included in the time.

    A made pair (`models.MadePair`), so that drafts are accepted. Hugging Face: its default cache; a static one, which
    it compiles on a GPU; drafting with `assistant_model`.
    """
    sizes = setup.sizes
    made = made_pair(name, setup, found)
    tokens, length = sizes.tokens, sizes.prompt
    prompt = torch.randint(made.target.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(9))
    models = map(copy.deepcopy, (made.target, made.auxiliary))  # an engine changes its model
    engines = [engine_of(model, 1, length + tokens + NODES) for model in models]
    llm = open_llm(pair_of(engines, word_tokenizer(made.target.config.vocab_size)), graphs=True)
    greedy = DecodingParams(speculation="fixed", temperature=0.0, ignore_eos=True, max_tokens=tokens, seed=1)
    ids = prompt[0].tolist()
    first = llm.generate([ids], replace(greedy, method="sample"))[0].token_ids

    def ours(method: str) -> list[int]:
        return list(llm.generate([ids], replace(greedy, method=method))[0].token_ids)

    runs: dict[str, Callable[[], list[int]]] = {f"mtad, {m}": partial(ours, m) for m in METHODS[:3]}
    _timed(runs, list(first), setup, found)
    for model in (made.target, made.auxiliary):
        model.set_attn_implementation("sdpa")
    given = prompt.to(setup.device)
    common = {"max_new_tokens": tokens, "do_sample": False, "attention_mask": torch.ones_like(given), "pad_token_id": 0}

    def theirs(**options: Any) -> list[int]:
        out: Tensor = made.target.generate(given, **common, **options)
        return list(out[0, length:].tolist())

    others = {"generate": {}, "generate, static, compiled": {"cache_implementation": "static"}}
    more: dict[str, Callable[[], list[int]]] = {label: partial(theirs, **options) for label, options in others.items()}
    more["generate, assistant_model"] = partial(theirs, assistant_model=made.auxiliary)
    _timed(more, list(first), setup, found)


def _timed(runs: dict[str, Callable[[], list[int]]], first: list[int], setup: Setup, found: Found) -> None:
    for label, run in runs.items():
        try:
            warm = setup.timer.whole(run)
            texts: list[list[int]] = []
            times = [setup.timer.whole(partial(_kept, run, texts)) for _ in range(3)]
        except Exception as error:  # one system that does not run leaves the others their times
            found.row(system=label, failed=f"{type(error).__name__}: {error}"[:200])
            continue
        same = next((at for at, (a, b) in enumerate(zip(texts[0], first, strict=False)) if a != b), len(first))
        found.row(
            system=label,
            tokens_s=len(texts[0]) / statistics.median(times),
            spread=f"{len(texts[0]) / max(times):.4g} .. {len(texts[0]) / min(times):.4g}",
            first_run_s=warm,
            same_tokens=f"{same} of {len(first)}",
        )


def _kept(run: Callable[[], list[int]], texts: list[list[int]]) -> None:
    texts.append(run())


def made_pair(name: str, setup: Setup, found: Found) -> MadePair:
    """A made pair whose drafts are accepted at about 0.7: `later` is halved until they are, ten times at most."""
    sizes = setup.sizes
    made = MadePair(name, sizes.kept, setup.device, setup.dtype)
    models = made.target, made.auxiliary
    engines = [engine_of(model, 4, sizes.prompt + 64 + NODES, fused=False) for model in models]
    llm = open_llm(pair_of(engines, word_tokenizer(made.target.config.vocab_size)), graphs=False)
    draw = torch.Generator().manual_seed(11)
    prompts = torch.randint(made.target.config.vocab_size, (4, sizes.prompt), generator=draw).tolist()
    params = DecodingParams(
        speculation="fixed", method="speculative", ignore_eos=True, max_tokens=min(32, 4 * sizes.tokens), seed=2
    )
    for _ in range(10):
        results = llm.generate(prompts, params)
        rate = statistics.mean(result.statistics.acceptance_rate for result in results)
        if rate >= 0.7:
            break
        made.scale(0.5)
    found.note(
        pair=f"{name} of random weights; auxiliary: its first {made.layers} layers, embeddings, norm and head",
        later_layers_scaled_by=made.later,
        acceptance_rate=rate,
        target_bytes_read=bytes_read(made.target),
        auxiliary_bytes_read=bytes_read(made.auxiliary),
    )
    return made
