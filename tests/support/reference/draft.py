"""Drafts: chains, beams and branches, drawn level by level."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from tests.support.reference.compare import exceeds, ranked
from tests.support.reference.request import Random, Request, Tokens, draw, log


class Path(NamedTuple):
    """A drafted path, the draft's joint log-likelihood of it, and the slot it has in its level."""

    tokens: Tokens
    log_q: float
    slot: int = 0


Draft = list[list[Path]]
"""The paths of each level; a text that has ended is carried down, shorter than the others."""


def draft(request: Request, random: Random, live: Sequence[Path] = ()) -> Draft:
    """Level by level, by the method's form. A path grows until its text ends, or it is too unlikely, or long enough.

    Args:
        live: paths that the first levels have already, with the weight they have.
    """
    params, above = request.params, [Path((), 0.0)]
    levels: Draft = []
    sampler = {"chain": sample_chain, "beams": sample_beams, "branches": sample_branches}[params.spec.form]
    least = log(params.confidence) if params.spec.rule != "bild" else -math.inf
    for level in range(params.drafted):
        if level < max((len(path.tokens) for path in live), default=0):
            above = [path._replace(tokens=path.tokens[: level + 1], slot=slot) for slot, path in enumerate(live)]
        else:
            alive = [path for path in above if request.ends(path.tokens) or not exceeds(least, path.log_q)]
            above = sampler(request, alive, random, level)
        levels.append(above)
    return levels


def extended(request: Request, path: Path) -> list[Path]:
    """The path with each of its candidates; a text that has ended has one, itself."""
    if request.ends(path.tokens):
        return [path]
    return [Path((*path.tokens, token), path.log_q + log(q)) for token, q in request.q(path.tokens).items()]


def sample_chain(request: Request, above: list[Path], random: Random, level: int) -> list[Path]:
    """One token of q."""
    if not above or request.ends(above[0].tokens):
        return above
    q = request.q(above[0].tokens)
    token = draw(q, float(random.uniform[level]))
    return [Path((*above[0].tokens, token), above[0].log_q + log(q[token]))]


def sample_beams(request: Request, above: list[Path], random: Random, level: int) -> list[Path]:
    """`beam_width` of all beams' continuations without replacement, with probability q(path), by Gumbel top-k."""
    pool = [
        (path.log_q + float(random.gumbel[level, beam.slot, rank]), path)
        for beam in above
        for rank, path in enumerate(extended(request, beam))
    ]
    return [path._replace(slot=slot) for slot, path in enumerate(ranked(pool, request.params.beam_width))]


def sample_branches(request: Request, above: list[Path], random: Random, level: int) -> list[Path]:
    """Each path's own children, without replacement or with it. A text that has ended has none."""
    children = request.params.children[level]
    found = []
    for path in above:
        if request.ends(path.tokens):
            continue
        pairs = list(enumerate(extended(request, path)))
        slots = range(path.slot * children, (path.slot + 1) * children)
        if request.params.replaces:  # each child has noise of its own
            drawn = [ranked((p.log_q + float(random.gumbel[level, s, k]), p) for k, p in pairs)[0] for s in slots]
        else:
            drawn = ranked(((p.log_q + float(random.gumbel[level, path.slot, k]), p) for k, p in pairs), children)
        found += [child._replace(slot=slot) for slot, child in zip(slots, drawn, strict=False)]
    return found


def new_paths(draft: Draft) -> list[list[Path]]:
    """The paths of each level whose last token is new there."""
    return [[path for path in paths if len(path.tokens) == depth] for depth, paths in enumerate(draft, 1)]


def best(draft: Draft) -> Tokens:
    """The draft's likeliest path among those of the last level that has new ones; ended texts compete there."""
    last = max((level for level, paths in enumerate(new_paths(draft)) if paths), default=None)
    return () if last is None else ranked((path.log_q, path.tokens) for path in draft[last])[0]
