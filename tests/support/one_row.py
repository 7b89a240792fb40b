"""One row's draft and decision by the uncompiled functions of `mtad`, for a request of `tests.support.law`."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mtad.rows import RULES, stack_rows
from tests.support.enumeration import Numbers, outcomes, uncompiled
from tests.support.law import Distribution, Draft, Outcome, Path, Request, Tokens, log

mtad = uncompiled()


class OneRow:
    """A request over `vocab` tokens; a distribution that nothing may look at is NaN, or sure of token 0.

    Args:
        unfiltered: distributions have an entry for each token, as without a filter, also for impossible ones.
    """

    def __init__(self, request: Request, vocab: int, unfiltered: bool = False) -> None:
        params, self.request, self.vocab, self.unfiltered = request.params, request, vocab, unfiltered
        self.row = stack_rows([params], vocab)[0]
        self.rule = mtad.block.FUNCTIONS[RULES.index(params.spec.rule)]
        self.is_end = np.isin(np.arange(vocab), list(request.eos))
        self.starts = np.cumsum([0, *params.widths])[None]

    def empty(self, count: int) -> Any:
        """So many distributions."""
        shape = count, self.vocab
        return mtad.distribution.Distributions(
            np.full(shape, math.nan, np.float32),
            np.zeros(shape, np.int32),
            np.full(shape, math.nan if self.unfiltered else 0.0),
            np.ones(count, int),
        )

    def write(self, into: Any, node: int, distribution: Distribution) -> None:
        """Set the distribution after a node."""
        ids = range(self.vocab) if self.unfiltered else sorted(distribution)
        count = into.counts[node + 1] = len(ids)
        for at, token in enumerate(ids):
            into.ids[node + 1, at], into.log_p[node + 1, at] = token, log(distribution.get(token, 0.0))
        into.log_p[node + 1, count:] = math.nan

    def tree(self, uniforms: Any) -> Any:
        """A draft, a row of `mtad.batch.Trees`; `uniforms(width)` gives a level's numbers."""
        trees = mtad.batch.Trees.empty(self.starts)
        tree = mtad.batch.tree_of(trees, 0)
        for level, width in enumerate(self.request.params.widths):
            low, high = (-1, 0) if level == 0 else self.starts[0, level - 1 : level + 1]
            q = self.empty(high - low)
            for node in range(low, high):
                if node < 0 or tree.growing[node]:
                    self.write(q, node - low - 1, self.request.q(path_of(tree, node)))
            assert mtad.draft.draft_level(self.row, level, tree, q, uniforms(width), self.is_end)
        return tree

    def draft(self, tree: Any) -> Draft:
        """The same as a law sees it."""
        return [
            [
                Path(path_of(tree, node), float(tree.log_q[node]), node, int(tree.parents[node]))
                for node in range(*level)
                if tree.log_q[node] > -math.inf
            ]
            for level in self.levels
        ]

    @property
    def levels(self) -> list[tuple[int, int]]:
        """The first node of each level, and that behind its last."""
        return list(zip(self.starts[0, :-1].tolist(), self.starts[0, 1:].tolist(), strict=True))

    def scored(self, tree: Any, accept: Sequence[Any]) -> Any:
        """What the rule is given; `accept` has a number for each node, of a chain for each depth."""
        trees = mtad.batch.Trees(*(x[None] for x in tree))
        params = self.request.params
        most = len(tree.tokens) if params.spec.tree else params.drafted
        found = mtad.batch.ScoredTrees.empty(1, most, params.drafted)
        rows = stack_rows([params], self.vocab)
        mtad.block.select_nodes(rows, params.drafted, trees, self.is_end, found)
        parts = {name: value[0] for name, value in found._asdict().items() if name not in ("counts", "longest")}
        p, q = self.empty(1 + most), self.empty(1 + len(tree.tokens))
        for node in np.flatnonzero(parts["drafted"]).tolist():
            parent = parts["parents"][node]
            path = path_of(tree, parts["origins"][node])[:-1]
            self.write(p, parent, self.request.p(path))
            self.write(q, parts["origins"][parent] if parent >= 0 else -1, self.request.q(path))
        return mtad.rules_scored.Scored(**parts, p=p, q=q, accept=accept)

    def judged(self, tree: Any) -> list[Outcome]:
        """Every outcome of the rule for a draft."""

        def judge(numbers: Numbers) -> tuple[Tokens, Distribution]:
            return self.judge(tree, numbers(len(tree.tokens)))

        return [(chance, *found) for chance, found in outcomes(judge)]

    def blocks(self) -> Iterator[tuple[float, Draft, list[Outcome]]]:
        """Every draft: its probability, and the outcomes of the rule."""
        for chance, tree in outcomes(self.tree):
            yield chance, self.draft(tree), self.judged(tree)

    def emitted(self) -> dict[Tokens, float]:
        """The law of a block's text and the target's own samples behind it, one token more than the draft has."""
        masses, length = defaultdict[Tokens, float](float), self.request.params.drafted + 1
        for drafted, _, found in self.blocks():
            for chance, path, bonus in found:
                for value, text in self.request.texts(path, length, bonus):
                    masses[text] += drafted * chance * value
        return masses

    def judge(self, tree: Any, accept: Sequence[Any]) -> tuple[Tokens, Distribution]:
        """The path that the rule keeps, and the distribution of the bonus token."""
        scored = self.scored(tree, accept)
        ids, weights, spent = np.zeros(self.vocab, np.int32), np.zeros(self.vocab), np.zeros(1 + len(scored.tokens))
        bonus = mtad.rules_scored.Bonus(ids, weights, np.zeros(1, int), spent)
        node = self.rule(self.row, scored, bonus)
        path: Tokens = ()
        at = node
        while at >= 0:
            assert scored.drafted[at]
            path, at = (int(scored.tokens[at]), *path), scored.parents[at]
        self.write(scored.p, node, self.request.p(path))
        token = mtad.block.draw_bonus(self.row, scored.p, node, bonus, 0.0)
        count = int(bonus.count[0])
        if self.row.greedy:
            return path, {int(token): 1.0}
        weights = bonus.weights[:count] / bonus.weights[:count].sum()
        return path, {int(token): float(value) for token, value in zip(bonus.ids, weights, strict=False) if value > 0}


def path_of(tree: Any, node: int) -> Tokens:
    """The drafted tokens from the root to a node."""
    path: Tokens = ()
    while node >= 0:
        path, node = ((int(tree.tokens[node]), *path) if tree.drafted[node] else path), tree.parents[node]
    return path
