"""A block of the loop."""

from __future__ import annotations

import time
from typing import NamedTuple

from torch import Tensor

from mtad.accept import Accepted
from mtad.block import Draft
from mtad.live import Beams
from runtime.batch import Batch
from runtime.roles import Auxiliary, Target


class Block(NamedTuple):
    """What a block of R rows gave. Tensors are valid until the next block begins.

    Attributes:
        draft: None where nothing was drafted.
        levels: drafted tokens of each row's longest path; None where that is what its parameters say.
        logits: of the target, float32 [R, 1 + N, V].
        accepted: what was decided.
        tokens, log_probs, lengths: the same as lists, by row: emitted tokens and their log-probabilities, of which the
            first length + 1 count, and accepted draft tokens (-1: none, and no other either).
        beams: of each row whose method keeps some, those that the next block goes on with; None if none does.
        drafted, scored: `time.perf_counter()` when the draft was there, and when it was scored.
    """

    draft: Draft | None
    levels: list[int] | None
    logits: Tensor
    accepted: Accepted
    tokens: list[list[int]]
    log_probs: list[list[float]]
    lengths: list[int]
    beams: list[Beams] | None
    drafted: float
    scored: float


def decode_block(auxiliary: Auxiliary, target: Target, batch: Batch) -> Block:
    """Draft, score, accept, commit."""
    draft, stops = None, batch.stops
    if batch.shape.draft_len:
        batch, draft = auxiliary.draft(batch)
    drafted = time.perf_counter()
    logits = target.score(batch, draft.tree if draft else None)
    scored = time.perf_counter()
    accepted = target.accept(batch, draft, logits)
    if draft:
        target.commit(batch, accepted)
        auxiliary.commit(batch, draft, accepted)
    tokens, log_probs, lengths = accepted.tokens.tolist(), accepted.log_probs.tolist(), accepted.length.tolist()
    levels = None
    if draft and stops:
        tree = draft.tree
        levels = tree.drafted.view(-1, tree.levels, tree.width).any(-1).sum(-1).tolist()
    beams = accepted.live.beams() if accepted.live is not None else None
    return Block(draft, levels, logits, accepted, tokens, log_probs, lengths, beams, drafted, scored)
