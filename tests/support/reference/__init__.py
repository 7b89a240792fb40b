"""The definition of every decoding method: one block of one request, in float64 and plain loops.

This is the specification. The tensor functions of `mtad` compute the same for many rows at once, and the tests compare
them with it. A model is a function from tokens to logits, a distribution a dictionary with the most likely token first,
and a path the tokens behind the request's context. What is random is given.

    draft  ->  a rule  ->  the accepted path, and the distribution of the bonus token  ->  the bonus token
"""

from __future__ import annotations

from typing import NamedTuple

from tests.support.reference.draft import Draft, draft
from tests.support.reference.request import Distribution, Random, Request, Tokens, draw
from tests.support.reference.rules import RULES

__all__ = ["Distribution", "Draft", "Outcome", "Random", "Request", "Tokens", "draft", "run_block"]


class Outcome(NamedTuple):
    """A block: the drafted tokens that are kept, the bonus token's distribution, that token, and the draft."""

    accepted: Tokens
    bonus: Distribution
    drawn: int
    draft: Draft


def run_block(request: Request, random: Random) -> Outcome:
    """Draft, accept, and draw the token that the target adds."""
    drafted = draft(request, random)
    accepted, bonus = RULES[request.params.spec.rule](request, drafted, random) if drafted else ((), request.p())
    return Outcome(accepted, bonus, draw(bonus, random.bonus), drafted)
