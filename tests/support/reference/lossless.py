"""Rules that keep the target's distribution: by chains, by several chains, and by trees."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from tests.support.reference.compare import exceeds, ranked
from tests.support.reference.draft import Draft, Path, best
from tests.support.reference.request import Distribution, Random, Request, Tokens, normalised, residual, rest_of


def accepts(request: Request, chain: Tokens, at: int, random: Random) -> bool:
    """Whether a token is accepted with probability p / q; at temperature 0, whether it is the target's most likely."""
    p, q = request.p(chain[:at]), request.q(chain[:at])
    if request.params.temperature == 0:
        return chain[at] == next(iter(p))
    return exceeds(p.get(chain[at], 0.0) / q[chain[at]], float(random.accept[at]))


def token_wise(request: Request, draft: Draft, random: Random) -> tuple[Tokens, Distribution]:
    """Accept with probability p / q; at the first rejection the bonus comes from max(p - q, 0). Lossless."""
    chain = best(draft)
    for at in range(len(chain)):
        if not accepts(request, chain, at, random):
            return chain[:at], rest_of(request.p(chain[:at]), request.q(chain[:at]))
    return chain, request.p(chain)


def block(request: Request, draft: Draft, random: Random) -> tuple[Tokens, Distribution]:
    """Block verification, arXiv 2403.10444 algorithm 2, as it is written there. Lossless."""
    chain = best(draft)
    return verify_block(request, chain, [request.q(chain[:at]) for at in range(len(chain))], random)


def verify_block(
    request: Request, chain: Tokens, proposals: Sequence[Distribution], random: Random
) -> tuple[Tokens, Distribution]:
    """Block verification of a path whose tokens were drawn from `proposals`, in order."""
    weight, kept, bonus = 1.0, chain[:0], request.p()
    for at in range(len(chain) + 1):
        p = request.p(chain[:at])
        left = residual(p, proposals[at], weight) if at < len(chain) else p
        mass = sum(left.values())
        some = exceeds(mass, 0.0)
        bound = weight if at == len(chain) else mass / (mass + (1 - weight)) if some else 0.0
        if at == 0 or exceeds(bound, float(random.accept[at - 1])):
            kept, bonus = chain[:at], normalised(left) if some else p
        if at < len(chain):
            weight = min(weight * p.get(chain[at], 0.0) / proposals[at][chain[at]], 1.0)
    return kept, bonus


def greedy_multi_path(request: Request, draft: Draft, random: Random) -> tuple[Tokens, Distribution]:
    """Block verification of the best of `beam_width` independent chains (arXiv 2602.16961). Lossless.

    Chains are compared token by token: at the first difference, the token of larger p / q wins, and of equal ones the
    auxiliary's more likely token. So chains are in a strict order that does not depend on what was drawn, and the
    best of K lies in a part of probability m above a part of probability a with probability (a + m)^K - a^K. The
    distribution of its next token follows, and block verification is lossless whatever a chain was drawn from.
    """
    count, chain, worse, mass = request.params.beam_width, Tokens(), 0.0, 1.0
    proposals: list[Distribution] = []
    for paths in draft:
        drawn = {path.tokens[-1] for path in paths if path.tokens[:-1] == chain}
        if not drawn:
            break
        p, q = request.p(chain), request.q(chain)
        order = ranked(((p.get(token, 0.0) / value, token) for token, value in q.items()), len(q))
        below = list(itertools.accumulate((mass * q[token] for token in reversed(order)), initial=worse))
        bounds = dict(zip(reversed(order), below, strict=False))
        whole = best_of(count, worse, mass)
        proposals.append({token: best_of(count, bounds[token], mass * q[token]) / whole for token in q})
        chosen = next(token for token in order if token in drawn)
        chain, worse, mass = (*chain, chosen), bounds[chosen], mass * q[chosen]
    return verify_block(request, chain, proposals, random)


def best_of(count: int, worse: float, mass: float) -> float:
    """(worse + mass)^count - worse^count, without taking a difference: both may be nearly equal."""
    return mass * sum((worse + mass) ** one * worse ** (count - 1 - one) for one in range(count))


def traversal(request: Request, draft: Draft, random: Random) -> tuple[Tokens, Distribution]:
    """Leaves before their parents, siblings in the order they were drawn (arXiv 2505.12398). Lossless.

    A node below one of weight w has the weight min(w p / q, 1), and is kept with that probability, if nothing below it
    is. Where it is not, its parent's p becomes max(w p - q, 0), its weight s / (s + 1 - w), s being the sum of that,
    and q loses the node. On a chain this is block verification.
    """

    def below(at: Path, weight: float) -> tuple[Tokens, Distribution] | None:
        depth, p, q = len(at.tokens), request.p(at.tokens), request.q(at.tokens)
        for child in children(request, draft, at):
            token = child.tokens[-1]
            if found := below(child, min(weight * p.get(token, 0.0) / q[token], 1.0)):
                return found
            left = residual(p, q, weight)
            mass = sum(left.values())
            some = exceeds(mass, 0.0)
            p, weight = (normalised(left), mass / (mass + max(1 - weight, 0.0))) if some else (p, float(depth == 0))
            if not request.params.replaces:
                q = normalised({other: value for other, value in q.items() if other != token})
        kept = depth == 0 or exceeds(weight, float(random.nodes[depth - 1, at.slot]))
        return (at.tokens, p) if kept else None

    found = below(Path((), 0.0), 1.0)
    assert found, "the root is always kept"
    return found


def children(request: Request, draft: Draft, at: Path) -> list[Path]:
    """The children of a node of a branching draft, in the order in which they were drawn."""
    depth = len(at.tokens)
    paths = draft[depth] if depth < len(draft) else []
    return [path for path in paths if path.slot // request.params.children[depth] == at.slot]


def recursive_rejection(request: Request, draft: Draft, random: Random) -> tuple[Tokens, Distribution]:
    """The accepted node's children, one after the other, each against what its rejected siblings left. Lossless."""
    at = Path((), 0.0)
    p = request.p()
    while drawn := children(request, draft, at):
        q = request.q(at.tokens)
        for child in drawn:
            token = child.tokens[-1]
            if exceeds(p.get(token, 0.0) / q[token], float(random.nodes[len(at.tokens), child.slot])):
                at, p = child, request.p(child.tokens)
                break
            p = rest_of(p, q)
            if not request.params.replaces:
                q = normalised({other: value for other, value in q.items() if other != token})
        else:
            break
    return at.tokens, p
