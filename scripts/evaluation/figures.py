"""Figures of each setting with their errors, alone and paired with another setting's.

Every figure is g(sum of N / sum of D) over answers, so one error serves all: the delete-one jackknife over groups of
prompts (a single prompt, unless several are decoded at once), all seeds of a prompt together. For a mean that is the
usual standard error over prompts; for ratios of sums (tokens/s, block efficiency) it is what the usual formula is not.
Comparisons leave the same prompt out on both sides: they are paired. `seed_error` is the standard error over seeds with
the prompts as they are: how far the figure moves when only the draws change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from runtime.tuning.measure import distinct, jackknife
from scripts.evaluation.decoders import Answer
from scripts.evaluation.humaneval import pass_at_k

Floats = npt.NDArray[np.float64]
Part = tuple[float, float] | None
"""N and D of one answer; None where it has no such figure."""

REFERENCES = ("sample", "speculative")
"""Settings the others are compared with, as far as they take part."""

REPEATED_SPAN = 16
"""Tokens; a text in which a span this long comes again counts as repeating itself."""


@dataclass(frozen=True)
class Scored:
    """An answer, and whether it is right; None where nothing is right or wrong."""

    answer: Answer
    right: bool | None


@dataclass(frozen=True)
class Figure:
    """One figure.

    Attributes:
        part: N and D of an answer.
        against: how two settings are compared.
        exponential: whether exp is taken of N / D.
    """

    part: Callable[[Scored], Part]
    against: Literal["ratio", "difference"]
    exponential: bool = False


def longest_repeat(tokens: Sequence[int]) -> int:
    """Tokens of the longest span that is in the text twice, perhaps overlapping; 0 if no token comes again."""
    low, high = 0, max(len(tokens) - 1, 0)
    while low < high:  # a repeated span's own spans are repeated too, so lengths can be halved
        middle = (low + high + 1) // 2
        spans = {tuple(tokens[at : at + middle]) for at in range(len(tokens) - middle + 1)}
        low, high = (middle, high) if len(spans) < len(tokens) - middle + 1 else (low, middle - 1)
    return low


def _distinct(n: int) -> Callable[[Scored], Part]:
    def part(one: Scored) -> Part:
        value = distinct(one.answer.tokens, n)
        return None if value is None else (value, 1.0)

    return part


FIGURES: dict[str, Figure] = {
    "accuracy": Figure(lambda s: None if s.right is None else (float(s.right), 1.0), "difference"),
    "perplexity": Figure(lambda s: (s.answer.nll, 1.0), "ratio", exponential=True),
    "tokens_per_second": Figure(lambda s: (s.answer.timed_tokens, s.answer.seconds), "ratio"),
    "block_efficiency": Figure(lambda s: (len(s.answer.tokens), s.answer.passes), "ratio"),
    "acceptance_rate": Figure(
        lambda s: None if s.answer.drafted is None else (float(s.answer.accepted or 0), s.answer.drafted), "difference"
    ),
    "tokens": Figure(lambda s: (len(s.answer.tokens), 1.0), "difference"),
    "target_passes": Figure(lambda s: (s.answer.passes, 1.0), "ratio"),
    "distinct_1": Figure(_distinct(1), "difference"),
    "distinct_2": Figure(_distinct(2), "difference"),
    "distinct_3": Figure(_distinct(3), "difference"),
    "distinct_4": Figure(_distinct(4), "difference"),
    "longest_repeat": Figure(lambda s: (longest_repeat(s.answer.tokens), 1.0), "difference"),
    "repeated_share": Figure(lambda s: (float(longest_repeat(s.answer.tokens) >= REPEATED_SPAN), 1.0), "difference"),
    "joules_per_token": Figure(
        lambda s: None if s.answer.joules is None else (s.answer.joules, len(s.answer.tokens)), "ratio"
    ),
}


@dataclass(frozen=True)
class Sums:
    """N and D by group of prompts and seed, [groups, seeds]."""

    top: Floats
    bottom: Floats
    exponential: bool

    def value(self) -> float:
        """Over everything."""
        return float(self._of(self.top.sum(), self.bottom.sum()))

    def left_out(self) -> Floats:
        """Without each group, [groups]."""
        top, bottom = self.top.sum(1), self.bottom.sum(1)
        found: Floats = self._of(top.sum() - top, bottom.sum() - bottom)
        return found

    def seed_error(self) -> float | None:
        """Standard error over seeds; None where there is one only."""
        bottom = self.bottom.sum(0)
        if len(bottom) < 2 or not bottom.all():
            return None
        values = self._of(self.top.sum(0), bottom)
        return _finite(values.std(ddof=1) / math.sqrt(len(values)))

    def _of(self, top: Any, bottom: Any) -> Any:
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.divide(top, bottom)
        return np.exp(ratio) if self.exponential else ratio


def summarise(answers: Mapping[str, Sequence[Scored]], group: int = 1, ks: Sequence[int] = ()) -> dict[str, Any]:
    """Figures of every setting.

    Args:
        answers: by label.
        group: prompts decoded at once: consecutive ones make one unit of the errors.
        ks: of pass@k; those above the number of seeds are left out.

    Returns:
        by label and figure: `value`, `error`, `seed_error` (or None) and `vs`, by reference: `ratio` or `difference`
        and `error`. Figures a setting does not have are None.
    """
    tables = {label: sums(scored, group, ks) for label, scored in answers.items()}
    rows: dict[str, Any] = {}
    for label, table in tables.items():
        row = rows[label] = {}
        for name, own in table.items():
            if own is None:
                row[name] = None
                continue
            row[name] = {
                "value": _finite(own.value()),
                "error": _finite(jackknife(own.left_out())),
                "seed_error": own.seed_error(),
            }
            row[name]["vs"] = {
                base: _compare(own, theirs, _against(name))
                for base in REFERENCES
                if base in tables and base != label and (theirs := tables[base].get(name)) is not None
            }
    return rows


def _against(name: str) -> str:
    return FIGURES[name].against if name in FIGURES else "difference"


def _compare(own: Sums, theirs: Sums, against: str) -> dict[str, float | None]:
    def joined(a: Any, b: Any) -> Any:
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.divide(a, b) if against == "ratio" else np.subtract(a, b)

    value = _finite(float(joined(own.value(), theirs.value())))
    return {against: value, "error": _finite(jackknife(joined(own.left_out(), theirs.left_out())))}


def sums(scored: Sequence[Scored], group: int, ks: Sequence[int] = ()) -> dict[str, Sums | None]:
    """Sums of every figure; None for those that no answer has."""
    prompts, seeds = (1 + max(getattr(s.answer, name) for s in scored) for name in ("prompt", "seed"))
    groups = (prompts + group - 1) // group
    table: dict[str, Sums | None] = {}
    for name, figure in FIGURES.items():
        sums = Sums(np.zeros((groups, seeds)), np.zeros((groups, seeds)), figure.exponential)
        for one in scored:
            part = figure.part(one)
            if part is not None:
                at = one.answer.prompt // group, one.answer.seed
                sums.top[at] += part[0]
                sums.bottom[at] += part[1]
        table[name] = sums if sums.bottom.any() else None
    if table["accuracy"] is not None:
        table |= {f"pass@{k}": _pass_at(k, scored, group, groups) for k in ks}
    return table


def _pass_at(k: int, scored: Sequence[Scored], group: int, groups: int) -> Sums | None:
    tries: dict[int, list[bool]] = {}
    for one in scored:
        tries.setdefault(one.answer.prompt, []).append(bool(one.right))
    sums = Sums(np.zeros((groups, 1)), np.zeros((groups, 1)), exponential=False)
    for prompt, right in tries.items():
        if len(right) < k:
            return None
        sums.top[prompt // group, 0] += pass_at_k(len(right), sum(right), k)
        sums.bottom[prompt // group, 0] += 1
    return sums


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
