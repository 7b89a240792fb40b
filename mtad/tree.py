"""The token tree: what a draft is, whatever its shape. A chain is a tree of width 1."""

from __future__ import annotations

import math
from functools import lru_cache, reduce
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from mtad.rows import Layout, index


class TokenTree(NamedTuple):
    """Drafted tokens of R rows: `draft_len` levels of `width` nodes, node n = level * width + slot, depth level + 1.

    A slot is a *drafted* token; or a beam that *ended* higher up (its path is complete: after EOS, or at the row's own
    draft length) and is carried down so that it keeps its weight; or *dead* (log_q -inf: the support, or the row's own
    width, was smaller). Only drafted slots can be accepted.

    Attributes:
        tokens: int64 [R, N]; any valid id where not drafted.
        parents: int64 [R, N], node index of the parent; -1 is the root, the last committed token.
        log_q: float32 [R, N], joint log-likelihood of the path under the draft; carried unchanged by ended beams.
        drafted: bool [R, N].
        ancestors: bool [R, N, N], node m lies on the path from the root to node n, n itself included.
        width: nodes a level.
    """

    tokens: Tensor
    parents: Tensor
    log_q: Tensor
    drafted: Tensor
    ancestors: Tensor
    width: int

    @property
    def levels(self) -> int:
        """Levels of the tree, draft_len."""
        return self.tokens.shape[1] // self.width if self.width else 0

    def path(self, nodes: Tensor) -> Tensor:
        """Node of each level on the way to `nodes` [R]: int64 [R, draft_len], the level's slot 0 below them."""
        count, size = self.tokens.shape
        if self.width == 1:
            return index(size, nodes.device).expand(count, size)
        own = self.ancestors.gather(1, nodes[:, None, None].expand(count, 1, size))
        slots = own.view(count, self.levels, self.width).byte().argmax(-1)
        return slots + index(self.levels, nodes.device, self.width)

    def best_final(self) -> Tensor:
        """The last level's node of largest joint log_q, [R]: the beam that the draft would keep if it kept one."""
        last = (self.levels - 1) * self.width
        return self.log_q[:, last:].argmax(-1) + last

    def along(self, values: Tensor) -> Tensor:
        """Sum of `values` [R, N] over each node's path, root first: [R, N].

        Added level by level, as `mtad.draft.expand` adds log_q: the same numbers give the same bits, and padding a tree
        with dead slots or levels changes none.
        """
        rows, nodes = values.shape
        on_path = values[:, None, :].expand(rows, nodes, nodes).masked_fill(~self.ancestors, 0.0)
        by_level = on_path.view(rows, nodes, self.levels, self.width).sum(-1).unbind(-1)
        return reduce(torch.add, by_level)


def tree_columns(committed: Tensor, nodes: int, length: int, layout: Layout | None) -> Tensor:
    """What each cache column holds: int64 [R, 1, length], argument of `attend`.

    0 for a committed token, n + 1 for node n, N + 1 beyond the tree.

    Args:
        committed: int64 [R], committed tokens; the tree is stored right behind them.
        nodes: N.
        length: columns of the mask.
        layout: which node is in which column; None for node n in column committed + n.
    """
    columns = (index(length, committed.device) - (committed - 1)[:, None]).clamp(0, nodes + 1)
    if layout is not None:
        table = pad(pad(layout.node_at + 1, (1, 0)), (0, 1), value=nodes + 1)
        columns = table.gather(1, columns)
    return columns[:, None]


def attend(ancestors: Tensor, columns: Tensor) -> Tensor:
    """Attention mask of tree nodes: they see every committed column and their ancestors.

    Args:
        ancestors: bool [R, S, N], which of the N tree columns each of S tokens sees.
        columns: int64 [R, 1, length] of `tree_columns`.

    Returns:
        bool [R, 1, S, length].
    """
    rows, tokens, _ = ancestors.shape
    seen, unseen = _edges(ancestors.device)
    edge = (rows, tokens, 1)
    table = torch.cat([seen.expand(edge), ancestors, unseen.expand(edge)], 2)
    return table.gather(2, columns.expand(rows, tokens, columns.shape[2])).unsqueeze(1)


@lru_cache(maxsize=256)
def depths(levels: int, width: int, device: torch.device) -> Tensor:
    """Depth of the root, 0, and of each node: int64 [1 + N]."""
    return torch.cat([torch.zeros(1, dtype=torch.int64), torch.arange(levels).repeat_interleave(width) + 1]).to(device)


@lru_cache(maxsize=16)
def _edges(device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.ones(1, 1, 1, dtype=torch.bool, device=device), torch.zeros(1, 1, 1, dtype=torch.bool, device=device)


@lru_cache(maxsize=256)
def _chain(levels: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Parents [N] and ancestors [N, N] of a chain."""
    ancestors = torch.ones(levels, levels, dtype=torch.bool, device=device).tril()
    return torch.arange(-1, levels - 1, device=device), ancestors


def keep_best(tree: TokenTree, whole: Tensor, width: int) -> tuple[TokenTree, Tensor]:
    """What the target scores of a draft: the whole tree of some rows, the best final beam of the others.

    Args:
        tree: the draft.
        whole: bool [R], rows whose whole tree is scored; their own width must be <= `width`.
        width: nodes a level of the result; other rows' chain is in slot 0.

    Returns:
        the scored tree, and for each of its nodes the node of the draft it came from, int64 [R, levels * width].
    """
    rows, levels = tree.tokens.shape[0], tree.levels
    best = tree.path(tree.best_final())
    if width == 1:
        parents, ancestors = _chain(levels, best.device)
        chain = TokenTree(
            tokens=tree.tokens.gather(1, best),
            parents=parents.expand(rows, levels),
            log_q=tree.log_q.gather(1, best),
            drafted=tree.drafted.gather(1, best),
            ancestors=ancestors.expand(rows, levels, levels),
            width=1,
        )
        return chain, best
    slots = torch.arange(width, device=tree.tokens.device)
    base = torch.arange(levels, device=tree.tokens.device)[:, None]
    keep = whole[:, None, None]
    origin = torch.where(keep, base * tree.width + slots, best[:, :, None]).reshape(rows, -1)
    alive = (keep | (slots == 0)).expand(rows, levels, width).reshape(rows, -1)
    up = tree.parents.gather(1, origin).view(rows, levels, width)
    up = torch.where(up < 0, -1, torch.where(keep, up % tree.width, 0).clamp(max=width - 1) + (base - 1) * width)
    ancestors = tree.ancestors.gather(1, origin[:, :, None].expand(-1, -1, tree.tokens.shape[1]))
    ancestors = ancestors.gather(2, origin[:, None, :].expand(-1, levels * width, -1)) & alive[:, None, :]
    scored = TokenTree(
        tokens=tree.tokens.gather(1, origin),
        parents=up.reshape(rows, -1),
        log_q=torch.where(alive, tree.log_q.gather(1, origin), -math.inf),
        drafted=tree.drafted.gather(1, origin) & alive,
        ancestors=ancestors,
        width=width,
    )
    return scored, origin
