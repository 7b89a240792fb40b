"""A slow, obvious float64 account of one block, written from arXiv 2407.09722, and mock models to run it on.

The account is plain Python over token tuples and dictionaries and uses nothing of the code under test. Mock models are
functions of the tokens so far. Every comparison whose outcome rounding could turn is reported to `Ties`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

BEAMS = ("mtad", "mmtad", "modal", "typical", "mtjd", "beam")
Tokens = tuple[int, ...]
Model = Callable[[Tokens], NDArray[np.float32]]
Distribution = dict[int, float]


class Pair(NamedTuple):
    """Two mock models of one vocabulary."""

    target: Model
    auxiliary: Model


def mock_pair(seed: int, vocab: int, peak: float, noise: float) -> Pair:
    """Random logits per prefix, `peak` their scale; the auxiliary's are the target's plus `noise` times as much."""

    @cache
    def logits(tokens: Tokens) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        generator = np.random.default_rng([seed, *tokens])
        target, other = generator.normal(scale=peak, size=(2, vocab))
        return target.astype(np.float32), (target + noise * other).astype(np.float32)

    return Pair(lambda tokens: logits(tokens)[0], lambda tokens: logits(tokens)[1])


class Ties:
    """The closest call among the comparisons seen; exact equality is not one, rounding does not make it."""

    def __init__(self) -> None:
        self.closest = math.inf

    def note(self, left: float, right: float) -> None:
        if left != right and math.isfinite(left) and math.isfinite(right):
            self.closest = min(self.closest, abs(left - right))


@dataclass(frozen=True)
class Settings:
    """What a request asks for; `temperature` > 0."""

    method: str
    draft_len: int
    beam_width: int
    branching: tuple[int, ...]
    replacement: bool
    threshold: float
    confidence: float
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    eos: Collection[int]


class Randomness(NamedTuple):
    """The numbers a block consumes: Gumbel [level, beam, rank among the beam's candidates], uniforms."""

    gumbel: NDArray[np.float32]
    accept: NDArray[np.float32]
    bonus: float
    nodes: NDArray[np.float32]


class Beam(NamedTuple):
    """A drafted path and its joint log-likelihood under the drafter; of a branching draft, its slot."""

    tokens: Tokens
    log_q: float
    slot: int = 0


class Outcome(NamedTuple):
    """One block: the tokens kept of the draft, what the next one is drawn from, and that token."""

    accepted: Tokens
    bonus: Distribution
    drawn: int
    levels: list[list[Beam]]


def process(logits: NDArray[np.float32], settings: Settings, ties: Ties) -> Distribution:
    """Temperature, then top-k, then top-p, then min-p; most likely token first."""
    order = sorted(range(len(logits)), key=lambda token: -float(logits[token]))
    order = order[: settings.top_k or len(order)]
    top = float(logits[order[0]])
    weights = {token: math.exp((float(logits[token]) - top) / settings.temperature) for token in order}
    total = sum(weights.values())
    kept: Distribution = {}
    mass = 0.0
    for token, weight in weights.items():
        if settings.top_p < 1:
            ties.note(mass / total, settings.top_p)
            if mass / total >= settings.top_p:
                break
        ties.note(weight, settings.min_p)
        if weight < settings.min_p:
            break
        kept[token] = weight
        mass += weight
    return {token: weight / mass for token, weight in kept.items()}


def log_likelihood(model: Model, context: Tokens, path: Tokens, settings: Settings, ties: Ties) -> float:
    """log p(path | context), every token under the processed distribution; -inf where a filter forbids one."""
    total = 0.0
    for at, token in enumerate(path):
        probability = process(model(context + path[:at]), settings, ties).get(token, 0.0)
        total += math.log(probability) if probability > 0 else -math.inf
    return total


def draft(
    drafter: Model, context: Tokens, settings: Settings, gumbel: NDArray[np.float32], ties: Ties
) -> list[list[Beam]]:
    """Beam sampling without replacement: the beams after each level. A beam that ended competes as itself.

    A branching draft draws each node's children from its own distribution instead; a node that has none is left out.
    """
    width = settings.beam_width if settings.method in BEAMS else 1
    beams, levels = [Beam((), 0.0)], []
    log_confidence = math.log(settings.confidence) if settings.confidence and settings.method != "bild" else -math.inf
    for level in range(settings.draft_len):
        pool: list[tuple[float, Beam]] = []
        branches: list[Beam] = []
        for slot, beam in enumerate(beams):
            if beam.tokens:
                ties.note(beam.log_q, log_confidence)
            if beam.tokens and (beam.tokens[-1] in settings.eos or beam.log_q < log_confidence):
                pool.append((beam.log_q + float(gumbel[level, slot, 0]), beam))
                continue
            q = process(drafter(context + beam.tokens), settings, ties)
            own = []
            for rank, (token, probability) in enumerate(q.items()):
                longer = Beam((*beam.tokens, token), beam.log_q + math.log(probability))
                own.append((longer.log_q + float(gumbel[level, beam.slot or slot, rank]), longer))
            pool += own
            if settings.method == "specinfer":
                children = settings.branching[level]
                slots = range(beam.slot * children, (beam.slot + 1) * children)
                if settings.replacement:  # each child has noise of its own
                    pools = [[(b.log_q + float(gumbel[level, s, k]), b) for k, (_, b) in enumerate(own)] for s in slots]
                    chosen = [drawn(pool, 1, ties)[0] for pool in pools]
                else:
                    chosen = drawn(own, children, ties)
                branches += [child._replace(slot=slot) for slot, child in zip(slots, chosen, strict=False)]
        beams = branches if settings.method == "specinfer" else drawn(pool, width, ties)
        levels.append(beams)
    return levels


def drawn(pool: list[tuple[float, Beam]], count: int, ties: Ties) -> list[Beam]:
    """The beams of largest score, in order."""
    pool = sorted(pool, key=lambda entry: -entry[0])
    for (above, _), (below, _) in itertools.pairwise(pool[: count + 1]):
        ties.note(above, below)
    return [beam for _, beam in pool[:count]]


def best_of(beams: Sequence[Beam], ties: Ties) -> Beam:
    """The beam of largest joint likelihood."""
    ranked = sorted(beams, key=lambda beam: -beam.log_q)
    if len(ranked) > 1:
        ties.note(ranked[0].log_q, ranked[1].log_q)
    return ranked[0]


def accept_jointly(
    pair: Pair, context: Tokens, settings: Settings, levels: list[list[Beam]], ties: Ties
) -> tuple[Tokens, Distribution]:
    """MTAD over the best beam, MMTAD over all of them: the deepest path whose joint ratio exceeds the threshold."""
    best = best_of(levels[-1], ties).tokens
    log_tau = math.log(settings.threshold) if settings.threshold > 0 else -math.inf
    accepted: Tokens = ()
    for depth in range(1, settings.draft_len + 1):
        if settings.method == "mtad":
            paths = [best[:depth]] if len(best) >= depth else []
        else:
            paths = [beam.tokens for beam in levels[depth - 1] if len(beam.tokens) == depth]
        bound = log_likelihood(pair.auxiliary, context, best[:depth], settings, ties)
        passing = []
        for path in paths:
            log_p = log_likelihood(pair.target, context, path, settings, ties)
            ties.note(log_p - bound, log_tau)
            if log_p - bound > log_tau:
                passing.append(Beam(path, log_p))
        if passing:
            accepted = best_of(passing, ties).tokens
    return accepted, process(pair.target(context + accepted), settings, ties)


def accept_token_wise(
    pair: Pair, context: Tokens, settings: Settings, chain: Tokens, uniform: NDArray[np.float32], ties: Ties
) -> tuple[Tokens, Distribution]:
    """Speculative sampling: accept with probability p / q, at the first rejection fall back to the residual."""
    for at, token in enumerate(chain):
        p = process(pair.target(context + chain[:at]), settings, ties)
        q = process(pair.auxiliary(context + chain[:at]), settings, ties)
        ratio = p.get(token, 0.0) / q[token]
        ties.note(float(uniform[at]), ratio)
        if uniform[at] >= ratio:
            residual = {t: max(weight - q.get(t, 0.0), 0.0) for t, weight in p.items()}
            total = sum(residual.values())
            return chain[:at], {t: weight / total for t, weight in residual.items()}
    return chain, process(pair.target(context + chain), settings, ties)


def accept_jointly_lossless(
    pair: Pair, context: Tokens, settings: Settings, chain: Tokens, uniform: NDArray[np.float32], ties: Ties
) -> tuple[Tokens, Distribution]:
    """Block verification, arXiv 2403.10444 algorithm 2, as it is written there."""
    weight, weights, residuals = 1.0, [1.0], []
    for at in range(len(chain) + 1):
        p = process(pair.target(context + chain[:at]), settings, ties)
        if at == len(chain):
            residuals.append(p)
            break
        q = process(pair.auxiliary(context + chain[:at]), settings, ties)
        residuals.append({t: max(weight * value - q.get(t, 0.0), 0.0) for t, value in p.items()})
        weight = min(weight * p.get(chain[at], 0.0) / q[chain[at]], 1.0)
        weights.append(weight)
    kept = 0
    for at in range(1, len(chain) + 1):
        total = sum(residuals[at].values())
        bound = weights[at] if at == len(chain) else total / (total + 1 - weights[at]) if total else 0.0
        ties.note(float(uniform[at - 1]), bound)
        if uniform[at - 1] < bound:
            kept = at
    total = sum(residuals[kept].values())
    ties.note(total, 0.0)
    return chain[:kept], {t: value / total for t, value in residuals[kept].items()} if total else {}


def accept_in_rounds(
    pair: Pair, context: Tokens, settings: Settings, levels: list[list[Beam]], random: Randomness, ties: Ties
) -> tuple[Tokens, Distribution]:
    """Multi-round speculative sampling of children drawn without replacement, one node after the other."""
    at = Beam((), 0.0)
    p = process(pair.target(context), settings, ties)
    for level, nodes in enumerate(levels):
        children = [node for node in nodes if node.tokens[:-1] == at.tokens]
        q = process(pair.auxiliary(context + at.tokens), settings, ties) if children else {}
        for child in children:
            token = child.tokens[-1]
            uniform = float(random.nodes[level, child.slot])
            ties.note(uniform, p.get(token, 0.0) / q[token])
            if uniform * q[token] < p.get(token, 0.0):
                at, p = child, process(pair.target(context + child.tokens), settings, ties)
                break
            p = {t: max(value - q.get(t, 0.0), 0.0) for t, value in p.items()}
            total = sum(p.values())
            ties.note(total, 0.0)
            p = {t: value / (total or 1.0) for t, value in p.items()}
            if not settings.replacement:
                q = {t: value / (1 - q[token]) for t, value in q.items() if t != token}
        else:
            break
    return at.tokens, p


def accept_prefix(
    pair: Pair, context: Tokens, settings: Settings, paths: list[Tokens], passes: Callable[[Tokens], bool], ties: Ties
) -> tuple[Tokens, Distribution]:
    """The deepest path of which every prefix passes, of several the one the target likes most."""
    good = [path for path in paths if path and all(passes(path[: at + 1]) for at in range(len(path)))]
    depth = max(map(len, good), default=0)
    ranked = [Beam(path, log_likelihood(pair.target, context, path, settings, ties)) for path in good]
    best = best_of([beam for beam in ranked if len(beam.tokens) == depth] or [Beam((), 0.0)], ties).tokens
    return best, process(pair.target(context + best), settings, ties)


def accept_by_threshold(
    pair: Pair, context: Tokens, settings: Settings, paths: list[Tokens], ties: Ties
) -> tuple[Tokens, Distribution]:
    """`modal`, `typical`, `threshold` and `bild`."""

    def noted(left: float, right: float) -> float:
        ties.note(left, right)
        return left - right

    def distance(path: Tokens) -> float:
        total = 0.0
        for at, token in enumerate(path):
            p = process(pair.target(context + path[:at]), settings, ties)
            total += math.log(max(p.values())) - (math.log(p[token]) if p.get(token) else -math.inf)
        return total

    def passes(path: Tokens) -> bool:
        p = process(pair.target(context + path[:-1]), settings, ties)
        q = process(pair.auxiliary(context + path[:-1]), settings, ties)
        value = p.get(path[-1], 0.0)
        if settings.method == "modal":
            return noted(distance(path), settings.threshold) <= 0
        if settings.method == "typical":
            entropy = -sum(x * math.log(x) for x in p.values() if x)
            return noted(value, min(settings.threshold, math.sqrt(settings.threshold) * math.exp(-entropy))) > 0
        if settings.method == "threshold":
            return noted(value / q[path[-1]], settings.threshold) > 0
        sure = noted(max(q.values()), settings.confidence) >= 0
        return sure and value > 0 and noted(-math.log(value), settings.threshold) <= 0

    accepted, bonus = accept_prefix(pair, context, settings, paths, passes, ties)
    if settings.method == "modal":
        top, left = max(bonus.values()), settings.threshold - distance(accepted)
        bonus = {t: v for t, v in bonus.items() if v and noted(math.log(top) - math.log(v), left) <= 0}
        total = sum(bonus.values())
        bonus = {t: v / total for t, v in bonus.items()}
    return accepted, bonus


def draw(distribution: Distribution, uniform: float, ties: Ties) -> int:
    """Inversion of the cumulative distribution, most likely token first."""
    mass = 0.0
    drawn = -1
    for token, probability in distribution.items():
        if probability > 0:
            drawn = token
            mass += probability
            ties.note(mass, uniform)
            if mass > uniform:
                break
    return drawn


def block(pair: Pair, context: Tokens, settings: Settings, random: Randomness, ties: Ties) -> Outcome:
    """Draft, accept, and draw the token the target adds."""
    levels: list[list[Beam]] = []
    accepted: Tokens = ()
    if settings.method == "sample":
        bonus = process(pair.target(context), settings, ties)
        return Outcome(accepted, bonus, draw(bonus, random.bonus, ties), levels)
    if settings.method in ("mtjd", "beam"):
        levels = draft(pair.target, context, settings, random.gumbel, ties)
        path = (
            levels[-1][0] if settings.method == "mtjd" and random.gumbel.any() else best_of(levels[-1], ties)
        ).tokens
        return Outcome(path[:-1], {path[-1]: 1.0}, path[-1], levels)
    levels = draft(pair.auxiliary, context, settings, random.gumbel, ties)
    chain = levels[-1][0].tokens if levels[-1] else ()
    if settings.method == "speculative":
        accepted, bonus = accept_token_wise(pair, context, settings, chain, random.accept, ties)
    elif settings.method == "block":
        accepted, bonus = accept_jointly_lossless(pair, context, settings, chain, random.accept, ties)
    elif settings.method == "specinfer":
        accepted, bonus = accept_in_rounds(pair, context, settings, levels, random, ties)
    elif settings.method in ("mtad", "mmtad"):
        accepted, bonus = accept_jointly(pair, context, settings, levels, ties)
    else:
        best = best_of(levels[-1], ties).tokens
        paths = [best[: at + 1] for at in range(len(best))]
        if settings.method == "typical":
            paths = [
                beam.tokens for level, beams in enumerate(levels) for beam in beams if len(beam.tokens) == level + 1
            ]
        accepted, bonus = accept_by_threshold(pair, context, settings, paths, ties)
    return Outcome(accepted, bonus, draw(bonus, random.bonus, ties), levels)
