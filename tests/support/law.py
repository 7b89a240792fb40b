"""What methods are defined with, in float64 and plain loops: requests, drafts, filters.

Nothing here or in `tests.support.rule_laws` calls a filter, a draw or a rule of `mtad`. A distribution is a dictionary
of the tokens that are possible, and a path the tokens behind a request's text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mtad.params import DecodingParams

Tokens = tuple[int, ...]
Distribution = dict[int, float]
Outcome = tuple[float, Tokens, Distribution]
"""Of a rule: its probability, the path that is kept, and the distribution of the bonus token."""


class Path(NamedTuple):
    """A drafted path, the draft's joint log-likelihood of it, its node, and the node that it continues."""

    tokens: Tokens
    log_q: float
    node: int = -1
    parent: int = -1


Draft = list[list[Path]]
"""The paths of each level in order; a text that has ended is carried down, shorter than the others."""


@dataclass(frozen=True)
class Request:
    """Both models' filtered distributions behind every path, the parameters, and the tokens that end a text."""

    p: Callable[[Tokens], Distribution]
    q: Callable[[Tokens], Distribution]
    params: DecodingParams
    eos: Collection[int] = ()

    def log_p(self, path: Tokens) -> float:
        """Joint log-likelihood of a path under the target; -inf where a token of it is impossible."""
        return self._joint(self.p, path)

    def log_q(self, path: Tokens) -> float:
        return self._joint(self.q, path)

    def _joint(self, law: Callable[[Tokens], Distribution], path: Tokens) -> float:
        """Logarithms added one by one, as rules do: since Python 3.12 `sum` rounds less, so ties would be none."""
        total = 0.0
        for at, token in enumerate(path):
            total += log(law(path[:at]).get(token, 0.0))
        return total

    def ends(self, path: Tokens) -> bool:
        """Whether the text is complete behind a path."""
        return bool(path) and path[-1] in self.eos and not self.params.ignore_eos

    def texts(self, start: Tokens, length: int, first: Distribution | None = None) -> Iterator[tuple[float, Tokens]]:
        """The target's continuations of a text up to a length; the first token is of `first`, where it is given."""
        if len(start) >= length or self.ends(start):
            yield 1.0, start
            return
        for token, value in (self.p(start) if first is None else first).items():
            for rest, text in self.texts((*start, token), length):
                yield value * rest, text


def log(value: float) -> float:
    """The logarithm; -inf of 0."""
    return math.log(value) if value > 0 else -math.inf


def filtered(
    logits: npt.NDArray[np.float32], params: DecodingParams
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Ids in order, and float64 log-probabilities: temperature, then top-k, then top-p, then min-p, by sorting.

    Top-p keeps the fewest of the tokens that top-k left which have `top_p` of their mass; min-p is relative to the
    likeliest token. At temperature 0, lossless methods keep the likeliest token, and others count as at temperature 1.
    """
    greedy = params.temperature == 0 and params.spec.exact
    scaled = (logits.astype(np.float64) - float(logits.max())) / (params.temperature or 1.0)
    order = np.argsort(-logits, kind="stable")[: 1 if greedy else params.top_k or None]
    weights = np.exp(scaled[order])
    if params.top_p < 1:
        sums = np.cumsum(weights)
        weights[1 + int((sums[:-1] < params.top_p * sums[-1]).sum()) :] = 0
    weights[weights < params.min_p] = 0
    ids = np.sort(order[weights > 0])
    return ids, scaled[ids] - math.log(weights.sum())


def first_of(p: Distribution) -> int:
    """The likeliest token, of equal ones the smallest."""
    return min(p, key=lambda token: (-p[token], token))


def residual(p: Distribution, q: Distribution, weight: float = 1.0) -> Distribution:
    """max(weight p - q, 0), normalised; p where nothing is left, for a rejection then has probability 0."""
    left = {token: max(weight * value - q.get(token, 0.0), 0.0) for token, value in p.items()}
    total = sum(left.values())
    return {token: value / total for token, value in left.items()} if total > 0 else p


def best(draft: Draft) -> Tokens:
    """The likeliest path of the last level that has new ones, of equal ones the first; ended texts compete there."""
    levels = [level for depth, level in enumerate(draft, 1) if any(len(path.tokens) == depth for path in level)]
    return max(levels[-1], key=lambda path: path.log_q).tokens if levels else ()


def paths_of(draft: Draft) -> list[Tokens]:
    """All drafted paths, each once where it is new, level by level."""
    return [path.tokens for depth, level in enumerate(draft, 1) for path in level if len(path.tokens) == depth]
