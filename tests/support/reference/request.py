"""What a block is made of: two models, a request's parameters, and the numbers it draws with."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from mtad.params import DecodingParams
from tests.support.reference.compare import exceeds

Tokens = tuple[int, ...]
Model = Callable[[Tokens], NDArray[np.float32]]
Distribution = dict[int, float]
K = TypeVar("K")
Floats = NDArray[np.float32]


class Random(NamedTuple):
    """The numbers that a block consumes; all 0 at temperature 0.

    Attributes:
        uniform: by level, for a chain's token.
        gumbel: by level, slot of the beam, and rank among its candidates, for beams and branches.
        accept: by level, against which a chain's rule accepts. The first one draws the path of `joint_sample`.
        nodes: by level and slot, against which the rules of branches and of live beams accept.
        bonus: for the bonus token.
    """

    uniform: Floats
    gumbel: Floats
    accept: Floats
    nodes: Floats
    bonus: float


@dataclass(frozen=True)
class Request:
    """What a block starts from: two models, the tokens so far, the parameters, and the tokens that end a text."""

    target: Model
    auxiliary: Model
    context: Tokens
    params: DecodingParams
    eos: Collection[int] = ()

    def p(self, path: Tokens = ()) -> Distribution:
        """The target's filtered distribution behind a path."""
        return process(self.target(self.context + path), self.params)

    def q(self, path: Tokens = ()) -> Distribution:
        """That of the model that drafts."""
        drafter = self.target if self.params.spec.drafter == "target" else self.auxiliary
        return process(drafter(self.context + path), self.params)

    def log_p(self, path: Tokens) -> float:
        """Joint log-likelihood of a path under the target; -inf where the filter forbids a token of it."""
        return sum(log(self.p(path[:at]).get(token, 0.0)) for at, token in enumerate(path))

    def log_q(self, path: Tokens) -> float:
        """That under the model that drafts."""
        return sum(log(self.q(path[:at]).get(token, 0.0)) for at, token in enumerate(path))

    def ends(self, path: Tokens) -> bool:
        """Whether the text is complete behind a path."""
        return bool(path) and path[-1] in self.eos and not self.params.ignore_eos


def log(value: float) -> float:
    """The logarithm; -inf of 0."""
    return math.log(value) if value > 0 else -math.inf


def normalised(weights: dict[K, float]) -> dict[K, float]:
    """Weights of sum 1; {} where all are 0."""
    total = sum(weights.values())
    return {key: weight / total for key, weight in weights.items()} if total else {}


def residual(p: dict[K, float], q: dict[K, float], scale: float = 1.0) -> dict[K, float]:
    """max(scale p - q, 0)."""
    return {key: max(scale * value - q.get(key, 0.0), 0.0) for key, value in p.items()}


def rest_of(p: dict[K, float], q: dict[K, float]) -> dict[K, float]:
    """The residual, normalised; p itself where nothing is left, for a rejection then has probability 0."""
    left = residual(p, q)
    return normalised(left) if exceeds(sum(left.values()), 0.0) else p


def process(logits: Floats, params: DecodingParams) -> Distribution:
    """Temperature, then top-k, then top-p, which keeps the token that reaches it, then min-p.

    At temperature 0, lossless methods keep the most likely token, and the others the distribution of temperature 1.
    """
    greedy = params.temperature == 0 and params.spec.lossless
    order = np.argsort(-logits, kind="stable").tolist()[: 1 if greedy else params.top_k or len(logits)]
    top = float(logits[order[0]])
    weights = {token: math.exp((float(logits[token]) - top) / (params.temperature or 1.0)) for token in order}
    total, kept, mass = sum(weights.values()), Distribution(), 0.0
    for token, weight in weights.items():
        if kept and params.top_p < 1 and not exceeds(params.top_p, mass / total):
            break
        if params.min_p and exceeds(params.min_p, weight):  # the most likely token's is 1
            break
        kept[token] = weight
        mass += weight
    return normalised(kept)


def draw(distribution: dict[K, float], uniform: float) -> K:
    """Inversion of the cumulative distribution, most likely token first."""
    mass, drawn = 0.0, next(iter(distribution))
    for key, probability in distribution.items():
        if probability > 0:
            drawn = key
            mass += probability
            if exceeds(mass, uniform):
                break
    return drawn
