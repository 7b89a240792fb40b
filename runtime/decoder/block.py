"""A block of the loop."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from torch import Tensor

from mtad.block import Draft
from mtad.draft.live import Beams, Live
from mtad.rules.accept import Accepted
from runtime.decoder.batch import Batch
from runtime.decoder.roles import Auxiliary, Target


class Block(NamedTuple):
    """What a block of R rows gave. Tensors are valid until the next block begins.

    Attributes:
        levels: drafted tokens of each row's longest path; None where that is what its parameters say.
        logits: of the target, float32 [R, 1 + N, V].
        path: int64 [R, draft_len], see `mtad.rules.accept.Accepted`.
        tokens, log_probs, lengths: what was decided, as lists by row: emitted tokens and their log-probabilities, of
            which the first length + 1 count, and accepted draft tokens (-1: none, and no other either).
        finite: whether each row's draft has likelihoods that are numbers.
        beams: of each row whose method keeps some, those that the next block goes on with; None if none does.
        drafted, scored: `time.perf_counter()` when the draft was there, and when it was scored. Of a block that a
            device runs as a whole: when it was launched, and when its result was there.
    """

    levels: list[int] | None
    logits: Tensor
    path: Tensor
    tokens: list[list[int]]
    log_probs: list[list[float]]
    lengths: list[int]
    finite: list[bool]
    beams: list[Beams] | None
    drafted: float
    scored: float


class Ran(NamedTuple):
    """What a block's steps and functions gave, before the host looks at it.

    Attributes:
        draft: None where nothing was drafted.
    """

    draft: Draft | None
    logits: Tensor
    accepted: Accepted
    drafted: float
    scored: float

    @property
    def levels(self) -> Tensor:
        """Drafted tokens of each row's longest path, int64 [R]."""
        assert self.draft is not None
        tree = self.draft.tree
        return tree.drafted.view(-1, tree.levels, tree.width).any(-1).sum(-1)

    def results(self, stops: bool) -> Results:
        """What the host reads of it; `stops` says whether a draft may have stopped before its last level."""
        draft, accepted = self.draft, self.accepted
        return Results(
            tokens=accepted.tokens,
            log_probs=accepted.log_probs,
            length=accepted.length,
            path=accepted.path,
            levels=self.levels if draft and stops else None,
            finite=~draft.tree.log_q.isnan().any(-1) if draft else None,
            live=accepted.live,
        )


class Results(NamedTuple):
    """What the host reads of a block, or the logits' users later.

    Attributes:
        tokens, log_probs, length, path, live: of `mtad.rules.accept.Accepted`.
        levels: int64 [R]; None where nobody asks.
        finite: bool [R]; None where nothing was drafted.
    """

    tokens: Tensor
    log_probs: Tensor
    length: Tensor
    path: Tensor
    levels: Tensor | None
    finite: Tensor | None
    live: Live | None

    def block(self, count: int, logits: Tensor, path: Tensor, drafted: float, scored: float) -> Block:
        """The block of the first `count` rows; these results are on the host, the path may be elsewhere."""

        def rows(values: Tensor) -> list[Any]:
            found: list[Any] = values[:count].tolist()
            return found

        return Block(
            levels=None if self.levels is None else rows(self.levels),
            logits=logits,
            path=path,
            tokens=rows(self.tokens),
            log_probs=rows(self.log_probs),
            lengths=rows(self.length),
            finite=[True] * count if self.finite is None else rows(self.finite),
            beams=None if self.live is None else self.live.beams()[:count],
            drafted=drafted,
            scored=scored,
        )


def run_block(auxiliary: Auxiliary, target: Target, batch: Batch) -> Ran:
    """Draft, score, accept, commit. On the roles of a device, work that a CUDA graph can hold."""
    draft = None
    if batch.shape.draft_len:
        batch, draft = auxiliary.draft(batch)
    drafted = time.perf_counter()
    logits = target.score(batch, draft.tree if draft else None)
    scored = time.perf_counter()
    accepted = target.accept(batch, draft, logits)
    if draft:
        target.commit(batch, accepted)
        auxiliary.commit(batch, draft, accepted)
    return Ran(draft, logits, accepted, drafted, scored)


def run_block_on_host(auxiliary: Auxiliary, target: Target, batch: Batch) -> Block:
    """A block whose functions run on the host, and what the host needs of it."""
    ran = run_block(auxiliary, target, batch)
    results = ran.results(batch.stops)
    return results.block(len(results.length), ran.logits, results.path, ran.drafted, ran.scored)
