"""A slow, obvious float64 account of one block, written from arXiv 2407.09722, and mock models to run it on.

The account is plain Python over token tuples and dictionaries and uses nothing of the code under test. Mock models are
functions of the tokens so far. Every comparison whose outcome rounding could turn is reported to `Ties`. The last
section runs the library itself on the same mock models, batched, the way the decoding loop does.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import mtad.accept
from mtad.accept import Accepted
from mtad.distribution import Candidates
from mtad.distribution import draw as draw_tokens
from mtad.distribution import process as process_rows
from mtad.draft import assemble, expand, root, stack
from mtad.live import Live, replay
from mtad.noise import Noise, draw_noise
from mtad.params import METHODS, DecodingParams
from mtad.rows import Rows, Shape, block_shape, places, stack_rows
from mtad.tree import TokenTree, keep_best

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
    """Temperature, then top-k, then top-p; most likely token first."""
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


# The library on the same mock models.


@dataclass(frozen=True)
class Case:
    """One row of a block; `key` is its (seed, block index)."""

    pair: Pair
    params: DecodingParams
    context: Tokens
    key: tuple[int, int]
    beams: tuple[tuple[Tokens, float], ...] = ()

    @property
    def drafter(self) -> Model:
        """The model that drafts."""
        return self.pair.target if self.params.method in ("mtjd", "beam") else self.pair.auxiliary

    def settings(self, eos: Collection[int]) -> Settings:
        """The case in the reference's terms; temperature 0 is top-k 1 without loss, else temperature 1."""
        p = self.params
        greedy = p.temperature == 0 and p.method in ("sample", "speculative", "block", "specinfer")
        return Settings(
            method=p.method,
            draft_len=min(p.draft_len, len(p.branching)) if p.method == "specinfer" else p.draft_len,
            beam_width=p.beam_width,
            branching=p.branching,
            replacement=p.replacement,
            threshold=p.threshold,
            confidence=p.confidence,
            temperature=p.temperature or 1.0,
            top_k=1 if greedy else p.top_k,
            top_p=p.top_p,
            eos=() if p.ignore_eos else eos,
        )


class Run(NamedTuple):
    """What the library made of a batch of cases; `draft`, `tree` and `paths` are empty where no row drafts."""

    rows: Rows
    shape: Shape
    noise: Noise
    draft: TokenTree | None
    tree: TokenTree | None
    paths: list[list[Tokens]]
    accepted: Accepted
    bonus: Tensor

    def emitted(self, row: int) -> Tokens:
        """The row's tokens, the bonus last."""
        return tuple(self.accepted.tokens[row, : int(self.accepted.length[row]) + 1].tolist())

    def randomness(self, row: int) -> Randomness:
        """The row's noise."""
        gumbel = np.array([level[row].numpy() for level in self.noise.gumbel])
        levels = self.shape.draft_len + self.shape.live if self.shape.children or self.shape.live else 0
        nodes = self.noise.nodes[row].numpy().reshape(levels, -1 if levels else 0)
        return Randomness(gumbel, self.noise.accept[row].numpy(), float(self.noise.bonus[row]), nodes)


def paths_below(above: list[list[Tokens]], parents: Tensor, tokens: Tensor, drafted: Tensor) -> list[list[Tokens]]:
    """Tokens from the root to each slot of a level; slots that draft nothing have their parent's."""
    table = zip(above, parents.tolist(), tokens.tolist(), drafted.tolist(), strict=True)
    return [
        [row[parent] + ((token,) if new else ()) for parent, token, new in zip(*level, strict=True)]
        for row, *level in table
    ]


def logits_after(models: Sequence[Model], cases: Sequence[Case], paths: list[list[Tokens]]) -> Tensor:
    """Logits [R, S, V] after each path."""
    table = zip(models, cases, paths, strict=True)
    return torch.from_numpy(np.array([[model(case.context + path) for path in row] for model, case, row in table]))


def run_block(cases: Sequence[Case], vocab: int, eos: Sequence[int] = ()) -> Run:
    """One block of a batch of requests."""
    params = [case.params for case in cases]
    shape = block_shape(params, vocab)
    rows = stack_rows(params, shape, vocab, eos)
    noise = draw_noise(params, [case.key for case in cases], shape, vocab)
    live = Live.of([list(case.beams) for case in cases], shape.draft_len, shape.width) if shape.live else None
    start: list[list[Tokens]] = [[()] for _ in cases]
    draft = tree = q = None
    above: list[Candidates] = []
    paths: list[list[Tokens]] = [[] for _ in cases]
    if shape.draft_len:
        level, levels, first, beams = root(rows, shape), [], [], start
        for depth in range(1, shape.draft_len + 1):
            logits = logits_after([case.drafter for case in cases], cases, beams)
            candidates = process_rows(logits, rows)
            place = places(rows, shape)[depth - 1]
            before, level = level, expand(level, candidates, noise.gumbel[depth - 1], rows, place, shape.children > 0)
            level = replay(level, before, live, depth, place, rows) if live else level
            above.append(candidates)
            beams = paths_below(beams, level.parents, level.tokens, level.drafted)
            levels.append(level)
            first.append(Candidates(candidates.ids[:, 0], candidates.log_prob[:, 0]))
        q = Candidates(torch.stack([c.ids for c in first], 1), torch.stack([c.log_prob for c in first], 1))
        draft = tree = assemble(stack(levels))
        if shape.selects:
            tree, _ = keep_best(draft, rows)
        for row, known in enumerate(paths):
            nodes = zip(tree.parents[row].tolist(), tree.tokens[row].tolist(), tree.drafted[row].tolist(), strict=True)
            for parent, token, new in nodes:
                known.append((known[parent] if parent >= 0 else ()) + ((token,) if new else ()))
    visited = [start[row] + paths[row] for row in range(len(cases))]
    logits = logits_after([case.pair.target for case in cases], cases, visited)
    with patch.object(mtad.accept, "draw", wraps=draw_tokens) as drawn:
        accepted = mtad.accept.accept(tree, logits, logits, q, noise, rows, shape.rules, tuple(above), live)
    ids, weights, _ = drawn.call_args.args
    bonus = torch.zeros(len(cases), vocab).scatter_add_(1, ids, weights / weights.sum(-1, keepdim=True))
    return Run(rows, shape, noise, draft, tree, paths, accepted, bonus)


def generate(
    pair: Pair, params: Sequence[DecodingParams], vocab: int, length: int, eos: Sequence[int] = ()
) -> list[Tokens]:
    """The first `length` tokens of one request per entry of `params`, block by block; seeds are the indices."""
    texts: list[Tokens] = [() for _ in params]
    beams: dict[int, tuple[tuple[Tokens, float], ...]] = {}
    for index in itertools.count():
        waiting = [row for row, text in enumerate(texts) if len(text) < length and not set(text[-1:]) & set(eos)]
        if not waiting:
            break
        cases = [Case(pair, params[row], texts[row], (row, index), beams.get(row, ())) for row in waiting]
        run = run_block(cases, vocab, eos)
        kept = run.accepted.live.beams() if run.accepted.live else [[]] * len(waiting)
        for at, row in enumerate(waiting):
            texts[row] += run.emitted(at)
            beams[row] = tuple(kept[at])
    return [text[:length] for text in texts]


def random_cases(seed: int, count: int, vocab: int) -> list[Case]:
    """Requests that differ in everything; every third batch has the paper's methods alone."""
    generator = np.random.default_rng(seed)
    methods = ["sample", "speculative", "mtad", "mmtad"] if seed % 3 == 0 else [*METHODS, "mtad", "mmtad"]

    def pick(*values: float) -> float:
        return float(generator.choice(values))

    cases = []
    for index in range(count):
        params = DecodingParams(
            method=str(generator.choice(methods)),
            draft_len=int(generator.integers(1, 6)),
            beam_width=int(generator.integers(1, 6)) if seed % 2 else int(generator.integers(1, 10)),
            branching=[(4, 2, 2), (1, 3), (2, 2, 1, 2), (5,)][int(generator.integers(4))],
            replacement=bool(generator.integers(2)),
            accept_threshold=pick(0, 0.1, 0.5, 1, 3, 1e3) if index % 3 else pick(0, 0.1, 0.3, 0.5),
            draft_confidence=pick(0, 0, 0.02, 0.2, 0.5),
            temperature=pick(0, 0.5, 1, 1, 2),
            top_k=int(pick(0, 1, 2, 3, 10)),
            top_p=pick(1, 1, 0.9, 0.6, 0.2),
            ignore_eos=bool(generator.integers(2)),
        )
        equal = 0.1 if params.accept_threshold == 1 else 0.0  # a ratio of 1 against a threshold of 1 is a tie
        pair = mock_pair(seed * count + index, vocab, peak=pick(0.5, 2, 5), noise=pick(equal, 0.3, 1))
        context = tuple(generator.integers(vocab, size=3).tolist())
        cases.append(Case(pair, params, context, (seed * count + index, int(generator.integers(5)))))
    return cases


def every_case(batches: int, rows: int) -> Iterator[tuple[list[Case], int, tuple[int, ...]]]:
    """Mixed batches with their vocabulary and end-of-sequence tokens."""
    for seed in range(batches):
        vocab = 5 + seed % 8
        yield random_cases(seed, rows, vocab), vocab, [(), (0,), (1, 3)][seed % 3]


@cache
def mixed_runs() -> list[tuple[list[Case], int, tuple[int, ...], Run]]:
    """The library's blocks of 4,000 requests, drawn once for all tests."""
    return [(cases, vocab, eos, run_block(cases, vocab, eos)) for cases, vocab, eos in every_case(batches=80, rows=50)]
