"""The memory of a batch's blocks, which lives as long as the parameters of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_not

import numpy as np

from mtad.batch import Decisions, ScoredTrees, Trees
from mtad.distribution import Distributions
from mtad.params import DecodingParams
from mtad.random import Noise
from mtad.rows import stack_rows


class BatchArrays:
    """What follows from the parameters of a batch's rows, and the memory of its blocks.

    Attributes:
        rows: records, `mtad.rows.ROW` [R].
        looked_up: bool [R], rows whose drafts are looked up.
        looks_up: whether there are any.
        drawn_rows, drawn_trees: records and trees as the auxiliary sees them: for those rows nothing is drafted.
        level_starts: nodes before each level of the largest of those trees, and of all of it; 0 if nothing is drafted.
        draft_len, width: D and W, of the largest draft.
        starts: int64 [R, D + 1], see `mtad.batch.Trees`; each looked-up draft has its own.
        kept: tokens of a distribution that a rule reads of the draft at most; 0 where no rule does.
        noise, trees, q, scored, decisions: of the block that runs.
        columns: int64 [3, R, D]: where accepted tokens lie in both caches, target's first, and where they belong.
    """

    def __init__(self, params: Sequence[DecodingParams], vocab_size: int) -> None:
        self.params = list(params)
        self.rows = stack_rows(params, vocab_size)
        self.draft_len, self.width = int(self.rows["draft_len"].max()), int(self.rows["width"].max())
        widths = np.zeros((len(params), self.draft_len), dtype=np.int64)
        for own, p in zip(widths, params, strict=True):
            own[: p.drafted] = p.widths
        self.starts = np.zeros((len(params), self.draft_len + 1), dtype=np.int64)
        np.cumsum(widths, axis=1, out=self.starts[:, 1:])
        readers = self.rows["top_k"][self.rows["reads_draft"]]
        self.kept = max(int(readers.max()), self.width) if len(readers) else 0
        self.trees, self.q = Trees.empty(self.starts), empty_distributions(self)
        self.looked_up = np.array([p.drafts and not p.uses_model for p in params])
        self.looks_up = bool(self.looked_up.any())
        self.drawn_rows = self.rows.copy()
        self.drawn_rows["draft_len"][self.looked_up] = 0
        self.drawn_trees = self.trees._replace(starts=np.where(self.looked_up[:, None], 0, self.starts))
        self.level_starts = self.drawn_trees.starts.max(0).tolist()
        self.scored = ScoredTrees.empty(len(params), int(self.starts.max()), self.draft_len)
        self.starts[self.looked_up], self.q.counts[self.looked_up] = 0, 0  # nothing has been looked up yet
        self.decisions = Decisions.empty(len(params), self.draft_len)
        self.noise = Noise.empty(len(params), self.draft_len, self.width)
        self.columns = np.zeros((3, len(params), self.draft_len), np.int64)

    def is_of(self, params: Sequence[DecodingParams]) -> bool:
        """Whether these are the parameters, the same objects."""
        return len(params) == len(self.params) and not any(map(is_not, params, self.params))


def empty_distributions(arrays: BatchArrays) -> Distributions:
    """Memory for what rows were drafted from, where their rules read it."""
    shape = len(arrays.rows), 1 + (int(arrays.starts.max()) if arrays.kept else 0), max(arrays.kept, 1)
    logits = np.empty((0, 0, 0), np.float32)
    ids, log_p = np.empty(shape, np.int32), np.empty(shape, np.float32)
    return Distributions(logits, ids, log_p, np.full(shape[:2], -1))
