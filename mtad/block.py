"""A block as a few functions of tensors: what runs between the steps of the two models, and nothing else.

    begin ; per level: auxiliary step, grow ; finish ; arrange ; target step ; decide

Each is eager torch here, is what a device graph captures, and is what the runtime compiles for ONNX Runtime.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from mtad.distributions.filters import FILTERS, Filters
from mtad.distributions.table import Distributions, part
from mtad.draft.levels import Level, assemble, by_parent, expand
from mtad.draft.live import Live, replay
from mtad.draft.tree import TokenTree, attend, keep_best, tree_columns
from mtad.methods import Form, Rule
from mtad.noise.host import LevelNoise, Noise
from mtad.ops import depths, index
from mtad.rows import Place, Rows, choose_rows
from mtad.rules.accept import Accepted, accept, moves


class Inputs(NamedTuple):
    """What a model's step needs: see `engines.base.Step`.

    Attributes:
        tokens, positions: int64 [R, S].
        write_at: int64 [R].
        mask: bool [R, 1, S, L].
    """

    tokens: Tensor
    positions: Tensor
    write_at: Tensor
    mask: Tensor


class Context(NamedTuple):
    """Where a block's rows stand, for a mask of L columns.

    Attributes:
        last_two: int64 [R, 2], the last two committed tokens; the last is the root of the tree.
        committed: int64 [R], committed tokens.
        columns: int64 [L], 0, 1, ..
    """

    last_two: Tensor
    committed: Tensor
    columns: Tensor


class Begun(NamedTuple):
    """The draft's first step, and what its levels share.

    Attributes:
        inputs: the first step: the last two committed tokens.
        holds: int64 [R, 1, L], what each column holds (`mtad.draft.tree.tree_columns`).
        sees: bool [R, 1, 1, L], what the root sees of the columns the tree is stored behind.
    """

    inputs: Inputs
    holds: Tensor
    sees: Tensor


class Grown(NamedTuple):
    """One level of a draft.

    Attributes:
        first: the distributions its slot 0 was drawn from, [R, K], of each of `Shape.tables`.
        inputs: the drafter's step over the level; not to be run for the last one.
        above: of a branching draft, and of one with live beams, the distributions after each node of the level above,
            [R, B, K], of each of `Shape.tables`; else ().
    """

    level: Level
    first: tuple[Distributions, ...]
    inputs: Inputs
    above: tuple[Distributions, ...] = ()


class Draft(NamedTuple):
    """What the auxiliary proposes.

    Attributes:
        tree: what the target is to score.
        origin: int64 [R, N], for each node of `tree` the node of the auxiliary's own tree that it is.
        q: distributions that slot 0 of each level was drawn from, [draft_len, R, K], of each of `Shape.tables`.
        above: of a branching draft, and of one with live beams, see `Grown`, level by level; else ().
        live: the beams it begins with; None where no row has any.
    """

    tree: TokenTree
    origin: Tensor
    q: tuple[Distributions, ...]
    above: tuple[tuple[Distributions, ...], ...] = ()
    live: Live | None = None


def begin(context: Context, rows: Rows) -> Begun:
    """Start a draft.

    The first step runs the last two committed tokens: after a fully accepted block the last drafted token has never
    been run, and a fixed step of two tokens costs less than a branch on how much was accepted. A row that drafts
    nothing runs them behind its committed columns, where they change nothing.
    """
    last_two, committed, columns = context
    idle = (rows.draft_len == 0).long() * 2
    tail = (committed[:, None] + index(2, committed.device) - 2 + idle).clamp(min=0)
    write_at = tail[:, 0]
    # a sequence of one token has it twice, in columns 0 and 1
    mask = columns <= (write_at[:, None] + index(2, committed.device))[:, :, None]
    holds = tree_columns(committed, columns, rows.draft_layout)
    return Begun(Inputs(last_two, tail, write_at, mask[:, None]), holds, (holds == 0)[:, None])


def grow(
    above: Level,
    sees: Tensor,
    logits: Tensor,
    noise: LevelNoise,
    place: Place,
    holds: Tensor,
    context: Context,
    rows: Rows,
    forms: Sequence[Form],
    live: Live | None = None,
    depth: int = 0,
    tables: Sequence[bool] = (False,),
    filters: Filters = FILTERS,
) -> Grown:
    """Draw a level and prepare the auxiliary's step over it.

    Args:
        above: the level above, B slots.
        sees: bool [R, 1, B, L], the mask of its step; of the root, `Begun.sees`.
        logits: the auxiliary's logits after each of its slots, under the requests' constraints: float [R, B, V]. Tables
            refer to them (`Shape.keeps_logits`).
        noise: of the level.
        forms: of the rows' drafts.
        live: beams to go on with; None where no row has any.
        depth: of the level, from 1; where there are any.
        tables: which distributions rows have (`Shape.tables`).
        filters: make them.
    """
    keeps_all = "branches" in forms or live is not None
    growing = above.growing if live is None else None  # of live beams, what they grow to be is known later
    found = distributions(logits, rows, tables, growing, filters)
    levels = [expand(above, candidates, noise, rows, place, forms) for candidates in found]
    level = levels[0] if len(levels) == 1 else choose_rows(rows.tabulated, levels[1], levels[0])
    if live is not None:
        level = replay(level, above, live, depth, place, rows)
    mask = by_parent(sees.squeeze(1), level.parents) | (holds == place.held)
    positions = context.committed[:, None] + place.ahead
    first = tuple(part(candidates, lambda x: x[:, 0]) for candidates in found)
    inputs = Inputs(level.tokens, positions, context.committed + place.behind, mask[:, None])
    return Grown(level, first, inputs, found if keeps_all else ())


def distributions(
    logits: Tensor,
    rows: Rows,
    tables: Sequence[bool],
    wanted: Tensor | None = None,
    filters: Filters = FILTERS,
) -> tuple[Distributions, ...]:
    """The filtered distributions of the drafter's logits [R, B, V], of each of `tables`."""
    return tuple(filters.tables(logits, rows, wanted) if table else filters.lists(logits, rows) for table in tables)


def finish(levels: Level, rows: Rows, selects: bool) -> tuple[TokenTree, Tensor]:
    """The tree that the target scores of a draft, and for each of its nodes the node of the draft that it is.

    Args:
        selects: whether some row is scored along its best beam only, out of several.
    """
    tree = assemble(levels)
    if selects:
        return keep_best(tree, rows)
    return tree, index(tree.tokens.shape[1], tree.tokens.device).expand_as(tree.tokens)


def arrange(tree: TokenTree | None, context: Context, rows: Rows) -> Inputs:
    """The target's step over the root and, in the order of their columns, the tree's nodes.

    Returns:
        inputs of 1 + N tokens; the logits of node n are at 1 + `rows.score_layout.column[n]`.
    """
    last_two, committed, columns = context
    root, at = last_two[:, 1:], (committed - 1)[:, None]
    if tree is None:
        return Inputs(root, at, at[:, 0], (columns <= at)[:, None, None])
    layout, levels = rows.score_layout, tree.levels
    if tree.width == 1:  # nothing to rearrange, and the mask of a chain is causal
        positions = at + index(levels + 1, at.device)
        mask = columns <= positions[:, :, None]
        return Inputs(torch.cat([root, tree.tokens], 1), positions, at[:, 0], mask[:, None])
    tokens = torch.cat([root, tree.tokens.gather(1, layout.node_at)], 1)
    depth = depths(levels, tree.width, at.device)
    positions = at + pad(depth[layout.node_at + 1], (1, 0))
    ancestors = tree.ancestors
    sees = ancestors.gather(1, layout.node_at[:, :, None].expand(-1, -1, ancestors.shape[2]))
    mask = attend(pad(sees, (0, 0, 1, 0)), tree_columns(committed, columns, layout))
    return Inputs(tokens, positions, at[:, 0], mask)


def decide(
    draft: Draft | None,
    adjusted: Tensor,
    logits: Tensor,
    noise: Noise,
    committed: Tensor,
    rows: Rows,
    rules: Sequence[Rule],
    tables: Sequence[bool] = (False,),
    filters: Filters = FILTERS,
) -> Accepted:
    """Accept, and say which cache columns that keeps.

    Args:
        draft: None where nothing was drafted.
        adjusted, logits, noise, rows, rules, tables, filters: see `mtad.rules.accept.accept`.
        committed: int64 [R], committed tokens before the block.
    """
    if draft is None:
        return accept(None, adjusted, logits, (), noise, rows, rules, tables=tables, filters=filters)
    q = [part(each, lambda x: x.transpose(0, 1)) for each in draft.q]
    accepted = accept(draft.tree, adjusted, logits, q, noise, rows, rules, draft.above, draft.live, tables, filters)
    return accepted._replace(moves=moves(accepted, draft.tree, draft.origin, committed, rows))
