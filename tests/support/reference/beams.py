"""The rule of `dsbd`, whose beams stay alive from one block to the next."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tests.support.reference.compare import exceeds, ranked
from tests.support.reference.draft import Draft, Path, extended
from tests.support.reference.request import Random, Request, Tokens, draw, log, normalised, residual, rest_of

Weights = dict[Tokens, float]
"""Of the paths of a level, over all beams: of each beam's candidates, and of texts that have ended themselves."""


def beams(request: Request, draft: Draft, live: Sequence[Path], random: Random) -> tuple[Tokens, list[Path]]:
    """Beam sampling on the target (arXiv 2409.16560), which the draft only makes faster.

    Args:
        draft: begins with the live beams.
        live: beams from the block before, the one drawn first first.

    Returns:
        the tokens that are decided now, and the beams behind them.
    """
    longest, undecided = request.params.drafted, max((len(path.tokens) for path in live), default=0)
    now = [Path((), 0.0)]
    for level in range(1, longest + 2):
        if level <= undecided:
            known = True
            now = [Path(path.tokens[:level], request.log_p(path.tokens[:level])) for path in live]
        else:
            now, known = next_beams(request, draft, now, level, random)
        # a token is undecided for half a draft at most; then the first beam decides it
        upto = level - longest // 2
        now = [beam for beam in now if upto < 1 or beam.tokens[upto - 1 : upto] == now[0].tokens[upto - 1 : upto]]
        if level > undecided and (not known or all(request.ends(beam.tokens) for beam in now)):
            break
    first = now[0].tokens
    if all(request.ends(beam.tokens) for beam in now):
        return first, []
    common = 0
    while all(beam.tokens[: common + 1] == first[: common + 1] and len(beam.tokens) > common for beam in now):
        common += 1
    return first[:common], [Path(beam.tokens[common:], beam.log_q) for beam in now]


def next_beams(request: Request, draft: Draft, now: list[Path], level: int, random: Random) -> tuple[list[Path], bool]:
    """The beams of a level, and whether the draft has them all, so that the block can go on behind them."""
    params = request.params
    joint: Weights = {}
    for beam in now:
        behind = {} if request.ends(beam.tokens) else request.p(beam.tokens)
        joint |= {(*beam.tokens, token): beam.log_q + log(p) for token, p in behind.items()} or {
            beam.tokens: beam.log_q
        }
    top = max(joint.values())
    p = normalised({path: math.exp(weight - top) for path, weight in joint.items()})
    nodes = draft[level - 1] if level <= len(draft) else []
    above = {path.tokens: path.log_q for path in (draft[level - 2] if 1 < level <= len(draft) else [Path((), 0.0)])}
    q: Weights = {}
    for beam in now if nodes else []:
        q |= {path.tokens: math.exp(path.log_q) for path in extended(request, Path(beam.tokens, above[beam.tokens]))}
    mine = [node for node in nodes if node.tokens in q]
    if params.temperature == 0:
        picks = ranked(((weight, path) for path, weight in joint.items()), params.beam_width)
        known = True
    else:
        wanted = params.beam_width
        if nodes:
            share = sum(math.exp(above[beam.tokens]) for beam in now) / sum(map(math.exp, above.values()))
            wanted = width(p, normalised(q), share, wanted, params.threshold)
        picks, known = verify(p, q, mine, wanted, random, level)
    known = known and all(path in {node.tokens for node in mine} for path in picks)
    return [Path(path, joint[path]) for path in picks], known


def width(p: Weights, q: Weights, share: float, most: int, threshold: float) -> int:
    """The most beams that are accepted, out of `most` drafted paths, with probability `threshold`; at least 1.

    Counted as if paths were drawn with replacement, each of them below a live beam with probability `share`.
    """
    rates, rest = [], p
    for _ in range(most):
        rates.append(sum(min(value, q.get(path, 0.0)) for path, value in rest.items()))
        rest = normalised(residual(rest, q))
    # by acceptances so far, and rejections since the last
    state = {(0, 0): 1.0}
    for _ in range(most):
        following: dict[tuple[int, int], float] = {}
        for (accepted, rejected), chance in state.items():
            for key, part in (
                ((accepted + 1, 0), share * rates[rejected]),
                ((accepted, rejected + 1), share * (1 - rates[rejected])),
                ((accepted, rejected), 1 - share),
            ):
                following[key] = following.get(key, 0.0) + chance * part
        state = following
    chances = [sum(c for (accepted, _), c in state.items() if accepted >= n) for n in range(1, most + 1)]
    return max(1, sum(not exceeds(threshold, chance) for chance in chances))


def verify(
    p: Weights, q: Weights, drafted: list[Path], wanted: int, random: Random, level: int
) -> tuple[list[Tokens], bool]:
    """Draw paths with probability p without replacement, from the draft as long as it lasts; and whether it did.

    A drafted path is accepted with probability min(1, p/q). A rejected one leaves max(p - q, 0), an accepted one the
    rest of p, and q loses either.
    """
    picks: list[Tokens] = []
    rest, current, known = dict(p), p, True
    for path in drafted:
        if len(picks) == wanted:
            break
        q = normalised(q)
        if exceeds(current.get(path.tokens, 0.0) / q[path.tokens], float(random.nodes[level - 1, path.slot])):
            picks.append(path.tokens)
            del rest[path.tokens]
            current = normalised(rest)
        else:
            current = rest_of(current, q)
        del q[path.tokens]
    for slot in range(wanted - len(picks)):
        if not any(current.values()):
            break
        known = False
        picks.append(draw(current, float(random.nodes[-1, slot])))
        del rest[picks[-1]]
        current = normalised(rest)
    return picks, known
