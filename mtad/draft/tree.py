"""The token tree: what a draft is, whatever its shape. A chain is a tree of width 1."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from mtad.ops import depths, index, running_sum
from mtad.rows import Layout, Rows


class TokenTree(NamedTuple):
    """Drafted tokens of R rows: `draft_len` levels of `width` nodes, node n = level * width + slot, depth level + 1.

    A slot is a *drafted* token; or a beam whose text *ended* higher up, which is carried down so that it keeps its
    weight; or *dead* (log_q -inf: the support or the row's own width is smaller, or all paths have stopped). Only
    drafted slots can be accepted.

    Attributes:
        tokens: int64 [R, N]; any valid id where not drafted.
        parents: int64 [R, N], node index of the parent; -1 is the root, the last committed token.
        log_q: float32 [R, N], joint log-likelihood of the path under the draft; carried unchanged by ended beams.
        drafted: bool [R, N].
        paths: int64 [R, N, draft_len], the slot of each level on the way to the node, its own included; 0 below it.
    """

    tokens: Tensor
    parents: Tensor
    log_q: Tensor
    drafted: Tensor
    paths: Tensor

    @property
    def levels(self) -> int:
        """Levels of the tree, draft_len."""
        return self.paths.shape[2]

    @property
    def width(self) -> int:
        """Nodes of each level, dead slots included."""
        return self.tokens.shape[1] // self.levels

    @property
    def ancestors(self) -> Tensor:
        """Node m lies on the path from the root to node n, n itself included: bool [R, N, N]."""
        rows, nodes = self.tokens.shape
        slots = index(self.width, self.tokens.device)
        on_path = (self.paths[:, :, :, None] == slots).view(rows, nodes, nodes)
        level = depths(self.levels, self.width, self.tokens.device)[1:]
        return on_path & (level <= level[:, None])

    def path(self, nodes: Tensor) -> Tensor:
        """Node of each level on the way to `nodes` [R]: int64 [R, draft_len], the level's slot 0 below them."""
        rows, levels = self.tokens.shape[0], self.levels
        if self.width == 1:
            return index(levels, nodes.device).expand(rows, levels)
        slots = self.paths.gather(1, nodes[:, None, None].expand(rows, 1, levels)).squeeze(1)
        return slots + index(levels, nodes.device, self.width)

    def best(self) -> Tensor:
        """The path that the draft would keep if it kept one, by its node [R]: the likeliest of the last drafted level.

        A text that has ended is carried down to that level and competes there.
        """
        drafted = self.drafted.view(-1, self.levels, self.width).any(-1)
        last = (drafted * index(self.levels, drafted.device)).amax(-1, keepdim=True)
        at = last * self.width + index(self.width, drafted.device)
        return (self.log_q.gather(1, at).argmax(-1, keepdim=True) + last * self.width).squeeze(1)

    def path_sum(self, values: Tensor) -> Tensor:
        """Sum of `values` [R, N] over each node's path, root first: [R, N].

        Added level by level, as `mtad.draft.levels.expand` adds log_q: the same numbers give the same bits, and padding
        a tree with dead slots or levels changes none.
        """
        if self.width == 1:
            return running_sum(values)
        rows, nodes = values.shape
        at = (self.paths + index(self.levels, values.device, self.width)).flatten(1)
        level = depths(self.levels, self.width, values.device)[1:]
        below = index(self.levels, values.device) >= level[:, None]
        on_path = values.gather(1, at).view(rows, nodes, self.levels).masked_fill(below, 0.0)
        return running_sum(on_path)[..., -1]


def tree_columns(committed: Tensor, columns: Tensor, layout: Layout) -> Tensor:
    """What each cache column holds: int64 [R, 1, length], argument of `attend`.

    0 for a committed token, n + 1 for node n, N + 1 beyond the tree.

    Args:
        committed: int64 [R], committed tokens; the tree is stored right behind them.
        columns: int64 [length], 0, 1, ..: the columns of the mask.
        layout: which node is in which column.
    """
    columns = (columns - (committed - 1)[:, None]).clamp(0, layout.held.shape[1] - 1)
    return layout.held.gather(1, columns)[:, None]


def attend(ancestors: Tensor, columns: Tensor) -> Tensor:
    """Attention mask of tree nodes: they see every committed column and their ancestors.

    Args:
        ancestors: bool [R, S, N], which of the N tree columns each of S tokens sees.
        columns: int64 [R, 1, length], of `tree_columns`.

    Returns:
        bool [R, 1, S, length].
    """
    rows, tokens, _ = ancestors.shape
    none = torch.zeros_like(ancestors[:, :, :1])
    table = torch.cat([~none, ancestors, none], 2)
    return table.gather(2, columns.expand(rows, tokens, columns.shape[2])).unsqueeze(1)


def keep_best(tree: TokenTree, rows: Rows) -> tuple[TokenTree, Tensor]:
    """What the target scores of a draft: the whole tree of some rows, one path of the others.

    Args:
        rows: parameters; `tree`, whose own width must be <= the result's, `drawn`, and `slots`, as many as the result
            has nodes per level. Other rows' path is in slot 0.

    Returns:
        the scored tree, and for each of its nodes the node of the draft it came from, int64 [R, levels * width].
    """
    count, levels, width = tree.tokens.shape[0], tree.levels, rows.slots.shape[0]
    first = (rows.draft_len.squeeze(1) - 1).clamp(min=0) * tree.width  # slot 0 of the row's own last level
    best = tree.path(torch.where(rows.drawn & ~rows.tree, first, tree.best()))
    base = index(levels, best.device)
    if width == 1:
        chain = TokenTree(
            tokens=tree.tokens.gather(1, best),
            parents=(base - 1).expand(count, levels),
            log_q=tree.log_q.gather(1, best),
            drafted=tree.drafted.gather(1, best),
            paths=torch.zeros_like(tree.paths[:, :1]).expand(count, levels, levels),
        )
        return chain, best
    keep, slots = rows.tree[:, None, None], rows.slots
    origin = torch.where(keep, (base * tree.width)[:, None] + slots, best[:, :, None]).flatten(1)
    alive = (keep | (slots == 0)).expand(count, levels, width).flatten(1)
    up = tree.parents.gather(1, origin).view(count, levels, width)
    above = (base - 1)[:, None]
    slot = torch.where(keep, up - above * tree.width, 0).clamp(max=width - 1)
    up = torch.where(up < 0, -1, slot + above * width)
    paths = tree.paths.gather(1, origin[:, :, None].expand(count, levels * width, levels))
    scored = TokenTree(
        tokens=tree.tokens.gather(1, origin),
        parents=up.flatten(1),
        log_q=torch.where(alive, tree.log_q.gather(1, origin), -math.inf),
        drafted=tree.drafted.gather(1, origin) & alive,
        paths=torch.where(keep, paths, 0).clamp(max=width - 1),
    )
    return scored, origin
