"""Rules: from a request, its draft and the block's numbers to the accepted path and the bonus token's distribution."""

from __future__ import annotations

import math
from collections.abc import Callable

from mtad.params import Rule
from mtad.reference.compare import exceeds, ranked
from mtad.reference.draft import Draft, best, new_paths
from mtad.reference.request import Distribution, Random, Request, Tokens, draw, log, normalised, residual, rest_of


def token_wise(request: Request, draft: Draft, random: Random) -> tuple[Tokens, Distribution]:
    """Accept with probability p / q; at the first rejection the bonus comes from max(p - q, 0). Lossless."""
    chain = best(draft)
    for at, token in enumerate(chain):
        p, q = request.p(chain[:at]), request.q(chain[:at])
        if not exceeds(p.get(token, 0.0) / q[token], float(random.accept[at])):
            return chain[:at], rest_of(p, q)
    return chain, request.p(chain)


def block(request: Request, draft: Draft, random: Random) -> tuple[Tokens, Distribution]:
    """Block verification, arXiv 2403.10444 algorithm 2, as it is written there. Lossless."""
    chain = best(draft)
    weight, kept, bonus = 1.0, chain[:0], request.p()
    for at in range(len(chain) + 1):
        p = request.p(chain[:at])
        left = residual(p, request.q(chain[:at]), weight) if at < len(chain) else p
        mass = sum(left.values())
        some = exceeds(mass, 0.0)
        bound = weight if at == len(chain) else mass / (mass + 1 - weight) if some else 0.0
        if at == 0 or exceeds(bound, float(random.accept[at - 1])):
            kept, bonus = chain[:at], normalised(left) if some else p
        if at < len(chain):
            weight = min(weight * p.get(chain[at], 0.0) / request.q(chain[:at])[chain[at]], 1.0)
    return kept, bonus


def recursive_rejection(request: Request, draft: Draft, random: Random) -> tuple[Tokens, Distribution]:
    """The accepted node's children, one after the other, each against what its rejected siblings left. Lossless."""
    at, slot = Tokens(), 0
    p = request.p()
    for level, paths in enumerate(draft):
        q, children = request.q(at), request.params.branching[level]
        for child in (path for path in paths if path.slot // children == slot):
            token = child.tokens[-1]
            if exceeds(p.get(token, 0.0) / q[token], float(random.nodes[level, child.slot])):
                at, slot, p = child.tokens, child.slot, request.p(child.tokens)
                break
            p = rest_of(p, q)
            if not request.params.replacement:
                q = normalised({other: value for other, value in q.items() if other != token})
        else:
            break
    return at, p


def passing(request: Request, draft: Draft) -> list[Tokens]:
    """Of the paths with p(path) / q(as many tokens of the best path) > tau, the deepest.

    A text that has ended counts at every depth below its own.
    """
    bound = best(draft)
    paths = [path.tokens for paths in new_paths(draft) for path in paths]
    if not request.params.spec.tree:
        paths = [path for path in paths if path == bound[: len(path)]]
    tau = log(request.params.threshold)
    found = [path for path in paths if exceeds(request.log_p(path) - request.log_q(bound[: len(path)]), tau)]
    return deepest(request, found)


def deepest(request: Request, paths: list[Tokens]) -> list[Tokens]:
    """The paths of greatest length, and the texts that have ended before."""
    length = max(map(len, paths), default=0)
    return [path for path in paths if len(path) == length or request.ends(path)]


def joint(request: Request, draft: Draft, random: Random) -> tuple[Tokens, Distribution]:
    """MTAD, of the best path, and MMTAD, of them all: of the deepest that pass, the one that the target likes most."""
    return likeliest(request, passing(request, draft))


def likeliest(request: Request, paths: list[Tokens]) -> tuple[Tokens, Distribution]:
    """The path that the target likes most; none of none."""
    path = ranked((request.log_p(path), path) for path in paths)[0] if paths else ()
    return path, request.p(path)


def joint_sample(request: Request, draft: Draft, random: Random) -> tuple[Tokens, Distribution]:
    """Of the deepest paths that pass, one drawn from the target's joint distribution, restricted to these."""
    paths = passing(request, draft)
    if request.params.temperature == 0 or not paths:
        return likeliest(request, paths)
    weights = normalised({at: math.exp(request.log_p(path)) for at, path in enumerate(paths)})
    path = paths[draw(weights, float(random.accept[0]))]
    return path, request.p(path)


def modal(request: Request, draft: Draft, random: Random) -> tuple[Tokens, Distribution]:
    """The longest prefix of the best path within so many nats of the target's mode, the bonus token included."""
    path, nats = best(draft), request.params.threshold
    left = [nats]
    for at, token in enumerate(path):
        p = request.p(path[:at])
        left.append(left[-1] - log(max(p.values())) + log(p.get(token, 0.0)))
    accepted = path[: max(at for at, rest in enumerate(left) if at == 0 or not exceeds(0.0, rest))]
    p = request.p(accepted)
    lowest = log(max(p.values())) - left[len(accepted)]
    return accepted, normalised({token: value for token, value in p.items() if not exceeds(lowest, log(value))})


def typical(request: Request, draft: Draft, random: Random) -> tuple[Tokens, Distribution]:
    """The deepest path of tokens likelier than min(epsilon, sqrt(epsilon) exp(-entropy))."""
    epsilon = request.params.threshold

    def passes(path: Tokens) -> bool:
        p = request.p(path[:-1])
        entropy = -sum(value * log(value) for value in p.values() if value)
        return exceeds(p.get(path[-1], 0.0), min(epsilon, math.sqrt(epsilon) * math.exp(-entropy)))

    paths = [path.tokens for paths in new_paths(draft) for path in paths]
    good = [path for path in paths if all(passes(path[: at + 1]) for at in range(len(path)))]
    return likeliest(request, deepest(request, good))


def prefix(request: Request, chain: Tokens, passes: Callable[[Tokens], bool]) -> tuple[Tokens, Distribution]:
    """The chain's tokens before the first that does not pass."""
    length = next((at for at in range(len(chain)) if not passes(chain[: at + 1])), len(chain))
    return chain[:length], request.p(chain[:length])


def threshold(request: Request, draft: Draft, random: Random) -> tuple[Tokens, Distribution]:
    """Tokens with p / q above a fixed ratio."""

    def passes(path: Tokens) -> bool:
        p, q = request.p(path[:-1]), request.q(path[:-1])
        return exceeds(p.get(path[-1], 0.0) / q[path[-1]], request.params.threshold)

    return prefix(request, best(draft), passes)


def bild(request: Request, draft: Draft, random: Random) -> tuple[Tokens, Distribution]:
    """Tokens where the auxiliary is sure, and that the target does not find too unlikely."""

    def passes(path: Tokens) -> bool:
        p, q = request.p(path[:-1]), request.q(path[:-1])
        if exceeds(request.params.confidence, max(q.values())):
            return False
        return not exceeds(-log(p.get(path[-1], 0.0)), request.params.threshold)

    return prefix(request, best(draft), passes)


def whole(request: Request, draft: Draft, random: Random) -> tuple[Tokens, Distribution]:
    """All of the path: the one drawn first, or the likeliest. Its last token takes the bonus token's place."""
    drawn = request.params.spec.drawn and request.params.temperature > 0
    path = draft[-1][0].tokens if drawn else best(draft)
    return path[:-1], {path[-1]: 1.0}


RULES: dict[Rule, Callable[[Request, Draft, Random], tuple[Tokens, Distribution]]] = {
    "token_wise": token_wise,
    "block": block,
    "recursive_rejection": recursive_rejection,
    "joint": joint,
    "joint_sample": joint_sample,
    "modal": modal,
    "typical": typical,
    "threshold": threshold,
    "bild": bild,
    "whole": whole,
}
