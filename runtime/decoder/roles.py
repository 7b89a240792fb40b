"""The two roles of the loop: an auxiliary that drafts, a target that scores. Implemented once for all engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from mtad.block import Draft
from mtad.draft.tree import TokenTree
from mtad.rules.accept import Accepted
from runtime.decoder.batch import Batch
from runtime.scheduler.request import TokenScore


class Role(Protocol):
    """What both have: a KV cache of their own, row by row."""

    def prefill(self, row: int, tokens: Sequence[int], start: int) -> None:
        """Store the keys and values of `tokens` in columns start .. start + len - 1 of `row`, in one step."""

    def move_row(self, source: int, to: int, columns: int) -> None:
        """Move a request's first `columns` columns to another row."""

    def clear_row(self, row: int, start: int = 0) -> None:
        """Zero a row's keys and values from column `start` on."""


class Auxiliary(Role, Protocol):
    """Drafts: grows a token tree under each row."""

    def draft(self, batch: Batch) -> tuple[Batch, Draft]:
        """Grow a tree under each row; `batch.shape.draft_len` >= 1.

        Returns:
            the tree, and the batch to go on with: `batch`, or its cut if the draft has stopped before its last level.
        """

    def commit(self, batch: Batch, draft: Draft, accepted: Accepted) -> None:
        """Keep the accepted nodes, drop the others."""


class Target(Role, Protocol):
    """Scores a draft in one pass and decides what is accepted."""

    def score_prompt(self, row: int, tokens: Sequence[int], start: int, count: int) -> list[TokenScore]:
        """Store all of `tokens` but the last, as `prefill` does; returns the score of each but the first.

        `count` likeliest alternatives are reported at each.
        """

    def score(self, batch: Batch, tree: TokenTree | None) -> Tensor:
        """Logits after the root and after each node, float32 [R, 1 + N, V], in one pass; valid until the next."""

    def accept(self, batch: Batch, draft: Draft | None, logits: Tensor) -> Accepted:
        """Decide the block of a draft and of the logits that `score` returned."""

    def commit(self, batch: Batch, accepted: Accepted) -> None:
        """Keep the accepted nodes, drop the others."""
