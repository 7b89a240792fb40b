"""What OpenVINO's precisions cost: tokens per pass of each method, and the target's perplexity, against float32."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from engines import Engine, Placement, open_engine
from engines.openvino.graph import computes_bfloat16
from mtad.errors import Failed
from mtad.params import DecodingParams
from runtime import LLM, RuntimeConfig
from runtime.pair import Pair, open_pair
from runtime.tuning.measure import jackknife
from scripts.bench.methods import KINDS, methods
from scripts.demo import dataset
from scripts.evaluation import report
from scripts.evaluation.decoders import Ours
from scripts.evaluation.figures import Scored, Sums, sums
from scripts.evaluation.measure import measure
from scripts.evaluation.prompts import Demo

METHODS = ("speculative", "mtad")


@dataclass(frozen=True)
class Variant:
    """Precisions of both engines.

    Attributes:
        target, auxiliary: compute, KV cache and weights of each.
    """

    target: tuple[str, str, str] = ("float32", "float32", "float32")
    auxiliary: tuple[str, str, str] = ("float32", "float32", "float32")


BFLOAT16 = ("bfloat16", "bfloat16", "float32")
VARIANTS = {
    "float32": Variant(),
    **{
        f"{role} {name}": Variant(**{role: precision})
        for role in ("target", "auxiliary")
        for name, precision in {
            "bfloat16": BFLOAT16,
            "bfloat16, cache u8": ("bfloat16", "u8", "float32"),
            "bfloat16, weights int8": ("bfloat16", "bfloat16", "int8"),
            "bfloat16, weights int4": ("bfloat16", "bfloat16", "int4"),
        }.items()
    },
}
"""Both engines in float32, and one of the two in something else."""


def run(folders: Mapping[str, Path], threads: int, counts: Mapping[str, int]) -> dict[str, Any]:
    """Decode with each variant whose weights there are, print a table for each kind of text, and return the figures.

    Args:
        folders: pair folders by the precision of their weights, `float32` among them.
        threads: of the engines.
        counts: prompts, by kind.
    """
    if not computes_bfloat16():
        raise Failed("this CPU has no instructions for bfloat16, which is compared with float32")
    pair = open_pair(folders["float32"], RuntimeConfig(threads=threads, provider="cpu"))
    engines: dict[tuple[str, tuple[str, str, str]], Engine] = {}

    def engine(role: str, precision: tuple[str, str, str]) -> Engine:
        compute, kv_cache, weights = precision
        place = Placement("cpu", threads, True, "openvino", None, compute, kv_cache)
        if (role, precision) not in engines:
            engines[role, precision] = open_engine(folders[weights] / role, place)
        return engines[role, precision]

    known = {name: v for name, v in VARIANTS.items() if {v.target[2], v.auxiliary[2]} <= folders.keys()}
    pairs = {
        name: replace(pair, target=engine("target", v.target), auxiliary=engine("auxiliary", v.auxiliary))
        for name, v in known.items()
    }
    found: dict[str, Any] = {}
    for kind, count in counts.items():
        rows = _block_efficiency(pairs, kind, count)
        perplexities = _perplexity({n: one for n, one in pairs.items() if not n.startswith("auxiliary")}, kind, count)
        for name, row in rows.items():
            row["perplexity"] = perplexities.get(name)
        found[kind] = rows
        lines = [["precision", *(f"tokens per pass, {m}" for m in METHODS), *(f"tokens/s, {m}" for m in METHODS)]]
        lines[0].append("perplexity of the target")
        for name, row in rows.items():
            lines.append([name, *(_shown(figure) for figure in row.values())])
        print(f"\n{KINDS[kind]}, {count} prompts; float32, and ratios to it:\n\n{report.markdown(lines)}", flush=True)
    return found


def _block_efficiency(pairs: Mapping[str, Pair], kind: str, count: int) -> dict[str, Any]:
    """Tokens per pass and per second of each variant and method; all but the first as ratios to it."""
    prompts = [list(next(iter(pairs.values())).tokenizer(p.text).input_ids) for p in Demo(kind, "test", count).prompts]
    chosen = {name: replace(params, speculation="fixed") for name, params in methods(kind).items() if name in METHODS}
    config = RuntimeConfig(prefix_tokens=0)
    llms = {name: LLM(pair, config) for name, pair in pairs.items()}
    decoders = [Ours(f"{name}/{m}", llm, params) for name, llm in llms.items() for m, params in chosen.items()]
    tables = {
        label: sums([Scored(one, None) for one in answers], 1)
        for label, answers in measure(prompts, decoders, [0], label=kind).items()
    }
    rows: dict[str, Any] = {name: {} for name in pairs}
    for figure in ("block_efficiency", "tokens_per_second"):
        for method in METHODS:
            own = {name: tables[f"{name}/{method}"][figure] for name in pairs}
            for name, one in own.items():
                rows[name][f"{figure} {method}"] = _against(one, own["float32"])
    return rows


def _against(own: Sums | None, base: Sums | None) -> dict[str, float]:
    assert own is not None
    assert base is not None
    if own is base:
        return {"value": own.value(), "error": jackknife(own.left_out())}
    return {"ratio": own.value() / base.value(), "error": jackknife(own.left_out() / base.left_out())}


def _perplexity(pairs: Mapping[str, Pair], kind: str, count: int) -> dict[str, Any]:
    """Perplexity of each target on the held-out answers, their prompts given; all but the first as ratios to it."""
    params, examples = DecodingParams(max_tokens=0, prompt_logprobs=0), dataset.load("test", kind)[:count]
    left: dict[str, np.ndarray] = {}
    for name, pair in pairs.items():
        llm, parts = LLM(pair, RuntimeConfig(prefix_tokens=0)), []
        starts = [len(pair.tokenizer(example.prompt).input_ids) for example in examples]
        texts = [list(pair.tokenizer(example.prompt + example.answer).input_ids) for example in examples]
        for start, result in zip(starts, llm.generate(texts, params), strict=True):
            own = [-score.logprob for score in result.prompt_logprobs[start - 1 :]]
            parts.append((sum(own), len(own)))
        sums = np.array(parts)
        left[name] = np.array([np.exp(np.divide(*(sums.sum(0) - part))) for part in [np.zeros(2), *sums]])
    base = left["float32"]
    return {
        name: {"value": own[0], "error": jackknife(own[1:])}
        if own is base
        else {"ratio": own[0] / base[0], "error": jackknife(own[1:] / base[1:])}
        for name, own in left.items()
    }


def _shown(figure: Mapping[str, float] | None) -> str:
    if figure is None:
        return ""
    value = figure.get("value", figure.get("ratio", math.nan))
    return f"{value:.3f} ± {figure['error']:.3f}" if value < 100 else f"{value:.0f} ± {figure['error']:.0f}"
