"""Run decoding methods side by side on the demo's examples, one request at a time, and sum up what came out.

Used by the quickstart's table and by `scripts.bench`. For each example all methods run one after another, in an order
that rotates from example to example, so that whatever else the machine does falls on all of them alike.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from runtime import LLM, DecodingParams, Result
from scripts.demo.dataset import Example
from scripts.demo.execute import matches

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Record:
    """One answer.

    Attributes:
        tokens: new tokens up to and including the end of the text.
        seconds: decoding time; the prompt's prefill, tokenising and scoring are not in it.
        passes: target passes.
        accepted, drafted: drafted tokens kept, and draft_len x blocks.
        nll: mean negative log-likelihood of the tokens under the target, temperature 1, unfiltered; nats a token.
        correct: whether the SQL gives the gold rows; None for open-ended text.
    """

    tokens: int
    seconds: float
    passes: int
    accepted: int
    drafted: int
    nll: float
    correct: bool | None


def answer(llm: LLM, prompt: str, params: DecodingParams) -> tuple[Result, float]:
    """Decode one prompt alone; the result and its decoding seconds."""
    request = llm.add(prompt, params)
    started = time.perf_counter()
    while request.finish_reason is None:
        llm.step()
    seconds = time.perf_counter() - started - request.statistics.prefill_seconds
    return llm.result(request), seconds


def run(
    llm: LLM, examples: Sequence[Example], methods: Mapping[str, DecodingParams], seed: int = 0, label: str = ""
) -> dict[str, list[Record]]:
    """Records of each method, one per example, in the examples' order.

    Args:
        llm: an idle pair.
        examples: of any kind.
        methods: what to compare; the names are the caller's.
        seed: request seeds are seed + the example's number, the same for all methods.
        label: shown at the progress bar.
    """
    records: dict[str, list[Record]] = {name: [] for name in methods}
    names = list(methods)
    for _ in range(2):  # warm-up
        for params in methods.values():
            answer(llm, examples[0].prompt, replace(params, seed=seed, max_tokens=16))
    for number, example in enumerate(tqdm(examples, desc=label, unit="prompt", file=sys.stderr)):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            result, seconds = answer(llm, example.prompt, replace(methods[name], seed=seed + number))
            statistics = result.statistics
            records[name].append(
                Record(
                    tokens=len(result.token_ids),
                    seconds=seconds,
                    passes=statistics.target_passes,
                    accepted=statistics.accepted,
                    drafted=statistics.drafted,
                    nll=-float(np.mean(result.logprobs)),
                    correct=matches(example, result.text) if example.kind == "sql" else None,
                )
            )
    return records


def summarise(records: Mapping[str, Sequence[Record]]) -> dict[str, dict[str, float | None]]:
    """Figures of each method, with standard errors over prompts.

    `perplexity` is exp of the mean over texts of their mean nll. Ratios against `sample` (perplexity) and `speculative`
    (tokens/s) are paired over prompts; their standard errors are a jackknife's.
    """
    columns = {name: _columns(rows) for name, rows in records.items()}
    rows: dict[str, dict[str, float | None]] = {}
    for name, c in columns.items():
        correct = [r.correct for r in records[name] if r.correct is not None]
        accuracy = float(np.mean(correct)) if correct else None
        speed, speed_error = _ratio(c["tokens"], c["seconds"])
        efficiency, efficiency_error = _ratio(c["tokens"], c["passes"])
        row: dict[str, float | None] = {
            "prompts": float(len(c["tokens"])),
            "tokens_per_second": speed,
            "tokens_per_second_error": speed_error,
            "block_efficiency": efficiency,
            "block_efficiency_error": efficiency_error,
            "acceptance_rate": float(c["accepted"].sum() / c["drafted"].sum()) if c["drafted"].any() else None,
            "perplexity": math.exp(c["nll"].mean()),
            "perplexity_error": math.exp(c["nll"].mean()) * _error(c["nll"]),
            "accuracy": accuracy,
            "accuracy_error": _error(np.array(correct, dtype=np.float64)) if correct else None,
            "tokens": float(c["tokens"].mean()),
        }
        if "sample" in columns:
            difference = c["nll"] - columns["sample"]["nll"]
            row["perplexity_vs_sample"] = math.exp(difference.mean())
            row["perplexity_vs_sample_error"] = math.exp(difference.mean()) * _error(difference)
        if "speculative" in columns:
            row["speed_vs_speculative"], row["speed_vs_speculative_error"] = _speed_ratio(c, columns["speculative"])
        rows[name] = row
    return rows


def table(rows: Mapping[str, Mapping[str, float | None]]) -> str:
    """The summary as text, one line a method; `+-` is one standard error."""

    def cell(row: Mapping[str, float | None], key: str, form: str, scale: float = 1.0) -> str:
        value, error = row.get(key), row.get(f"{key}_error")
        if value is None:
            return "-"
        return f"{value * scale:{form}}" + (f" +-{error * scale:{form}}" if error is not None else "")

    heads = ["method", "tokens/s", "vs speculative", "block efficiency", "perplexity", "vs sample", "accuracy %"]
    lines = [heads]
    lines += [
        [
            name,
            cell(row, "tokens_per_second", ".0f"),
            cell(row, "speed_vs_speculative", ".2f"),
            cell(row, "block_efficiency", ".2f"),
            cell(row, "perplexity", ".2f"),
            cell(row, "perplexity_vs_sample", ".2f"),
            cell(row, "accuracy", ".1f", 100),
        ]
        for name, row in rows.items()
    ]
    widths = [max(len(line[i]) for line in lines) for i in range(len(heads))]
    return "\n".join("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) for line in lines)


def _columns(records: Sequence[Record]) -> dict[str, Floats]:
    names = ("tokens", "seconds", "passes", "accepted", "drafted", "nll")
    return {name: np.array([getattr(record, name) for record in records], dtype=np.float64) for name in names}


def _error(values: Floats) -> float:
    """Standard error of a mean."""
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else float("nan")


def _ratio(above: Floats, below: Floats) -> tuple[float, float]:
    """sum(above) / sum(below) and its jackknife standard error."""
    left_out = (above.sum() - above) / (below.sum() - below) if len(above) > 1 else np.full(1, np.nan)
    return float(above.sum() / below.sum()), _jackknife(left_out)


def _speed_ratio(ours: Mapping[str, Floats], theirs: Mapping[str, Floats]) -> tuple[float, float]:
    a, b = ours, theirs
    value = (a["tokens"].sum() / a["seconds"].sum()) / (b["tokens"].sum() / b["seconds"].sum())
    if len(a["tokens"]) < 2:
        return float(value), float("nan")
    mine = (a["tokens"].sum() - a["tokens"]) / (a["seconds"].sum() - a["seconds"])
    other = (b["tokens"].sum() - b["tokens"]) / (b["seconds"].sum() - b["seconds"])
    return float(value), _jackknife(mine / other)


def _jackknife(left_out: Floats) -> float:
    n = len(left_out)
    return float(math.sqrt((n - 1) / n * ((left_out - left_out.mean()) ** 2).sum()))
