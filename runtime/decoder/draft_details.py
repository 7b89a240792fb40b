"""How tokens came about, for requests that ask with `draft_details`. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from mtad.batch import ScoredTrees, Trees
from mtad.constrain import Floats, Ints


@dataclass(frozen=True)
class DraftedToken:
    """A drafted token.

    Attributes:
        p: its probability under the target, at temperature 1 without filters.
        q: the probability with which it was drafted: under the auxiliary, behind the request's filters.
        beams: how many beams of the draft's last level run through it; 1 in a chain, and where none does.
    """

    token: int
    p: float
    q: float
    beams: int


@dataclass(frozen=True)
class TokenDetails:
    """How a new token came about.

    Attributes:
        accepted: the drafted token that it is; None where it is the target's own.
        rejected: what was drafted in place of the target's own token and behind it: at each place what the draft found
            likeliest.
    """

    accepted: DraftedToken | None = None
    rejected: list[DraftedToken] = field(default_factory=list)


def details_of(row: int, trees: Trees, scored: ScoredTrees, kept: Sequence[int], logits: Floats) -> list[TokenDetails]:
    """Details of a row's accepted tokens, and of the target's own behind them.

    Args:
        kept: the scored node of each accepted token.
        logits: float32 [1 + M, V], the target's after the root and each scored node.
    """
    path, parents, log_q = list(kept), scored.parents[row], trees.log_q[row, scored.origins[row]]
    drafted = scored.drafted[row] & (np.arange(len(parents)) < scored.counts[row])
    while len(below := np.flatnonzero(drafted & (parents == (path[-1] if path else -1)))):
        path.append(int(below[log_q[below].argmax()]))
    beams = _beams_through(trees.parents[row], np.flatnonzero(trees.log_q[row] > -np.inf), trees.starts[row])
    tokens = []
    for before, node in zip([-1, *path], path, strict=False):
        token, own = int(scored.tokens[row, node]), logits[before + 1].astype(np.float64)
        p = np.exp(own[token] - own.max()) / np.exp(own - own.max()).sum()
        q = np.exp(log_q[node] - (log_q[before] if before >= 0 else 0.0))
        tokens.append(DraftedToken(token, float(p), float(q), int(beams[scored.origins[row, node]])))
    return [*map(TokenDetails, tokens[: len(kept)]), TokenDetails(rejected=tokens[len(kept) :])]


def _beams_through(parents: Ints, live: Ints, starts: Ints) -> Ints:
    """How many nodes of the last level lie below each node of a draft; `live` are those that are no dead slots."""
    count = np.zeros(len(parents), np.int64)
    count[live[live >= starts[np.searchsorted(starts, live[-1:], "right") - 1]]] = 1
    for node in live[::-1].tolist():  # children before their parents
        if parents[node] >= 0:
            count[parents[node]] += count[node]
    return np.maximum(count, 1)
