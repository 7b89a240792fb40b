"""Rules: from a request, its draft and the block's numbers to the accepted path and the bonus token's distribution."""

from __future__ import annotations

import math
from collections.abc import Callable

from mtad.methods import Rule
from tests.support.reference.compare import exceeds, ranked
from tests.support.reference.draft import Draft, best, new_paths
from tests.support.reference.lossless import (
    accepts,
    block,
    greedy_multi_path,
    recursive_rejection,
    token_wise,
    traversal,
)
from tests.support.reference.request import Distribution, Random, Request, Tokens, draw, log, normalised, rest_of


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


def ensemble(request: Request, draft: Draft, random: Random) -> tuple[Tokens, Distribution]:
    """`token_wise` against w p + (1 - w) q, whose residual is that of p; behind a draft that is kept whole, p itself.

    At temperature 0, the drafted tokens that are the most likely of the mixture, and the target's most likely one.
    """
    w, chain = request.params.threshold, best(draft)
    for at, token in enumerate(chain):
        p, q = request.p(chain[:at]), request.q(chain[:at])
        mixed = {other: w * p.get(other, 0.0) + (1 - w) * q.get(other, 0.0) for other in {**p, **q}}
        if request.params.temperature == 0:
            if any(exceeds(value, mixed[token]) for other, value in mixed.items() if other != token):
                return chain[:at], p
        elif not exceeds(mixed[token] / q[token], float(random.accept[at])):
            return chain[:at], rest_of(p, q)
    return chain, request.p(chain)


def relaxed(request: Request, draft: Draft, random: Random) -> tuple[Tokens, Distribution]:
    """Tokens among the target's `relaxed_topk` most likely ones, at most the threshold less likely than the first."""

    def passes(path: Tokens) -> bool:
        p = dict(list(request.p(path[:-1]).items())[: request.params.relaxed_topk])
        return path[-1] in p and not exceeds(max(p.values()) - p[path[-1]], request.params.threshold)

    return prefix(request, best(draft), passes)


def fly(request: Request, draft: Draft, random: Random) -> tuple[Tokens, Distribution]:
    """`token_wise`, but a rejected token is kept where the target is undecided and the next tokens would be accepted.

    Undecided is a target whose three most likely tokens have an entropy of at least the threshold: the sum of
    -p log p over these, as they are. A token that the target excludes is never kept.
    """
    chain = best(draft)
    native = [accepts(request, chain, at, random) for at in range(len(chain))]
    for at, token in enumerate(chain):
        p, window = request.p(chain[:at]), native[at + 1 : at + 1 + request.params.fly_window_size]
        entropy = -sum(value * log(value) for value in sorted(p.values())[-3:])
        agrees = len(window) == request.params.fly_window_size and all(window)
        if not native[at] and not (agrees and token in p and not exceeds(request.params.threshold, entropy)):
            greedy = request.params.temperature == 0
            return chain[:at], p if greedy else rest_of(p, request.q(chain[:at]))
    return chain, request.p(chain)


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
    "greedy_multi_path": greedy_multi_path,
    "traversal": traversal,
    "recursive_rejection": recursive_rejection,
    "joint": joint,
    "joint_sample": joint_sample,
    "modal": modal,
    "typical": typical,
    "threshold": threshold,
    "ensemble": ensemble,
    "relaxed": relaxed,
    "fly": fly,
    "bild": bild,
    "whole": whole,
}
