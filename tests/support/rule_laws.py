"""What each rule keeps and emits, written from its paper: every outcome for a draft."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.support.law import (
    Distribution,
    Draft,
    Outcome,
    Path,
    Request,
    Tokens,
    best,
    log,
    paths_of,
    residual,
)

ROOT = Path((), 0.0)


def token_wise(request: Request, draft: Draft) -> Iterator[Outcome]:
    """arXiv 2211.17192, algorithm 1: kept with probability min(1, p / q), else one of the residual."""
    yield from _one_by_one(request, best(draft), 1.0)


def ensemble(request: Request, draft: Draft) -> Iterator[Outcome]:
    """arXiv 2604.07622: against w p + (1 - w) q. Greedily: as long as a token is one of the mixture's likeliest."""
    chain, w = best(draft), request.params.threshold
    if request.params.temperature > 0:
        yield from _one_by_one(request, chain, w)
        return
    for at, token in enumerate(chain):
        p, q = request.p(chain[:at]), request.q(chain[:at])
        mixed = {one: w * p.get(one, 0.0) + (1 - w) * q.get(one, 0.0) for one in {**p, **q}}
        if mixed[token] < max(mixed.values()):
            yield 1.0, chain[:at], p
            return
    yield 1.0, chain, request.p(chain)


def _one_by_one(request: Request, chain: Tokens, w: float) -> Iterator[Outcome]:
    left = 1.0
    for at, token in enumerate(chain):
        p, q = request.p(chain[:at]), request.q(chain[:at])
        passes = min(1.0, (w * p.get(token, 0.0) + (1 - w) * q[token]) / q[token])
        yield left * (1 - passes), chain[:at], residual(p, q)
        left *= passes
    yield left, chain, request.p(chain)


def block(request: Request, draft: Draft) -> Iterator[Outcome]:
    """arXiv 2403.10444, algorithm 2: the longest prefix that passes, each on its own."""
    chain = best(draft)
    w = 1.0
    found: list[Outcome] = [(1.0, (), residual(request.p(()), request.q(()) if chain else {}))]
    for at, token in enumerate(chain, 1):
        p, q = request.p(chain[: at - 1]), request.q(chain[: at - 1])
        w, passes, bonus = min(w * p.get(token, 0.0) / q[token], 1.0), 0.0, request.p(chain[:at])
        if at == len(chain):
            passes = w
        else:
            behind = request.q(chain[:at])
            s = sum(max(w * value - behind.get(one, 0.0), 0.0) for one, value in bonus.items())
            passes, bonus = s / (s + 1 - w) if s > 1e-12 else 0.0, residual(bonus, behind, w)
        found = [(chance * (1 - passes), path, after) for chance, path, after in found]
        found.append((passes, chain[:at], bonus))
    yield from found


def moved(request: Request, path: Tokens) -> Distribution:
    """p~: p moved towards q, by at most a share of `divergence`, onto plausible tokens of which q has more."""
    p, q = request.p(path), request.q(path)
    most = max(p.values())
    least = request.params.plausible * most
    gains = {one: q[one] - value for one, value in p.items() if value >= least and q.get(one, 0.0) > value}
    losses = {one: value - q.get(one, 0.0) for one, value in p.items() if value > q.get(one, 0.0)}
    far = min(request.params.divergence * (1 - most), sum(gains.values()))
    shares = {one: far * value / sum(gains.values()) for one, value in gains.items()}
    shares |= {one: -far * value / sum(losses.values()) for one, value in losses.items()}
    return {one: value + shares.get(one, 0.0) for one, value in p.items()}


def budget_of(request: Request, draft: Draft) -> Request:
    """The request whose target is p~ wherever something was drafted, and p elsewhere."""
    above = {path.tokens[:-1] for level in draft for path in level}
    return replace(request, p=lambda path: moved(request, path) if path in above else request.p(path))


def budget(request: Request, draft: Draft) -> Iterator[Outcome]:
    """Block verification against p~."""
    yield from block(budget_of(request, draft), draft)


def budget_tree(request: Request, draft: Draft) -> Iterator[Outcome]:
    """Traversal verification against p~."""
    yield from traversal(budget_of(request, draft), draft)


def children(draft: Draft, at: Path) -> list[Path]:
    """The children of a node of a branching draft, in the order in which they were drawn."""
    return [path for path in itertools.chain(*draft[: len(at.tokens) + 1]) if path.parent == at.node]


def left_of(q: Distribution, token: int) -> Distribution:
    """What a child leaves of q, the others' shares: it was drawn without replacement."""
    rest = {one: value for one, value in q.items() if one != token}
    return {one: value / sum(rest.values()) for one, value in rest.items()}


def traversal(request: Request, draft: Draft) -> Iterator[Outcome]:
    """arXiv 2505.12398: leaves before their parents, siblings in the order they were drawn.

    A node below one of weight w has the weight min(w p / q, 1), and is kept with that probability if nothing below it
    is. Where it is not, its parent's p becomes max(w p - q, 0), and its weight s / (s + 1 - w), s the sum of that.
    """

    def below(at: Path, weight: float) -> Iterator[tuple[float, Tokens | None, Distribution]]:
        left, p, q = 1.0, request.p(at.tokens), request.q(at.tokens)
        for child in children(draft, at):
            token, nothing = child.tokens[-1], 0.0
            for chance, kept, bonus in below(child, min(weight * p.get(token, 0.0) / q[token], 1.0)):
                if kept is None:
                    nothing += chance
                else:
                    yield left * chance, kept, bonus
            left *= nothing
            mass = sum(max(weight * value - q.get(one, 0.0), 0.0) for one, value in p.items())
            p, q = residual(p, q, weight), left_of(q, token)
            weight = 1.0 if not at.tokens else mass / (mass + 1 - weight) if mass > 1e-12 else 0.0
        yield left * weight, at.tokens, p
        yield left * (1 - weight), None, p

    for chance, kept, bonus in below(ROOT, 1.0):
        if kept is not None:
            yield chance, kept, bonus


def passing(request: Request, draft: Draft) -> list[Tokens]:
    """arXiv 2407.09722: of the paths with p(path) / q(as many tokens of the best path) > tau, the deepest."""
    bound, tau = best(draft), log(request.params.threshold)
    paths = [path for path in paths_of(draft) if request.params.spec.tree or path == bound[: len(path)]]
    p = {path: request.log_p(path) for path in paths}
    return deepest(
        request, [one for one in paths if p[one] > -math.inf and p[one] - request.log_q(bound[: len(one)]) > tau]
    )


def deepest(request: Request, paths: list[Tokens]) -> list[Tokens]:
    """The paths of greatest length, and the texts that have ended before: those count at every depth below."""
    length = max(map(len, paths), default=0)
    return [path for path in paths if len(path) == length or request.ends(path)]


def likeliest(request: Request, paths: list[Tokens]) -> Iterator[Outcome]:
    """The path that the target likes most, of equal ones the first; none of none."""
    path = max(paths, key=request.log_p, default=())
    yield 1.0, path, request.p(path)


def joint(request: Request, draft: Draft) -> Iterator[Outcome]:
    """MTAD, of the best path, and MMTAD, of them all: of the deepest that pass, the one that the target likes most."""
    yield from likeliest(request, passing(request, draft))


def joint_sample(request: Request, draft: Draft) -> Iterator[Outcome]:
    """Of these, one drawn from the target's joint distribution restricted to them."""
    paths = passing(request, draft)
    if request.params.temperature == 0 or not paths:
        yield from likeliest(request, paths)
        return
    mass = sum(math.exp(request.log_p(path)) for path in paths)
    for path in paths:
        yield math.exp(request.log_p(path)) / mass, path, request.p(path)


def prefix(
    request: Request, chain: Tokens, passes: Callable[[Distribution, Distribution, int], bool]
) -> Iterator[Outcome]:
    """The chain's tokens before the first that does not pass, which is given p, q and the token."""
    at = 0
    while at < len(chain) and passes(request.p(chain[:at]), request.q(chain[:at]), chain[at]):
        at += 1
    yield 1.0, chain[:at], request.p(chain[:at])


def relaxed(request: Request, draft: Draft) -> Iterator[Outcome]:
    """Tokens among the target's `relaxed_topk` likeliest, of equal ones the smallest, by at most the threshold."""

    def passes(p: Distribution, q: Distribution, token: int) -> bool:
        first = sorted(p, key=lambda one: (-p[one], one))[: request.params.relaxed_topk]
        return token in first and p[first[0]] - p[token] <= request.params.threshold

    yield from prefix(request, best(draft), passes)
