"""The device's part of a block: what runs between the steps of the two models, as `mtad.block` has it for the host."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn.functional import pad

from mtad.device import launches, rules
from mtad.device.tables import Given, Results, Scored, Step, Tables, Tree, by_block
from mtad.rows import RULES

BLOCKWISE, BUDGET, SAMPLED = "block.block", "budget.budget", "joint.joint_sample"
JOINT, CHAINS = ("joint.joint", SAMPLED), ("chain.token_wise", BLOCKWISE, BUDGET)
"""Captured rules: those that read tokens and likelihoods alone, and those that read what a chain was drawn from. What
is done for one is enough for those before it."""


def widest(rules: Iterable[str]) -> frozenset[str]:
    """Of rules, one of each kind: the one that is enough for the others."""
    given = set(rules)
    return frozenset(max(own, key=kind.index) for kind in (JOINT, CHAINS) if (own := given.intersection(kind)))


def first_inputs(given: Given, length: int, capacity: int) -> Step:
    """The draft's first step, over the last two committed tokens: `mtad.step_inputs.first_inputs`."""
    columns, two = torch.arange(length, device=given.real.device), torch.arange(2, device=given.real.device)
    start = torch.where(given.draft_len > 0, given.committed - 2, given.committed)
    write_at = start.clamp(min=0)
    mask = columns <= (write_at[:, None] + two)[:, :, None]
    positions = (start[:, None] + two).clamp(min=0)
    return given.last_two, positions, torch.where(given.real, write_at, capacity), mask[:, None]


def select_nodes(tree: Tree, given: Given, is_end: Tensor, whole: bool) -> Scored:
    """The nodes that the target scores: `mtad.block.select_nodes`.

    Args:
        whole: some row's whole draft is scored, M = D * W; else the best path of all rows, M = D.
    """
    rows, levels, width = tree.tokens.shape
    depth = torch.arange(levels, device=tree.tokens.device)
    longest = ((depth + 1) * tree.drafted.any(2)).amax(1)
    last = (longest - 1).clamp(min=0)
    every = torch.arange(rows, device=last.device)
    best = tree.log_q.nan_to_num(nan=-torch.inf)[every, last].argmax(1)
    path = depth * width + torch.where(depth < longest[:, None], tree.ways[every, last, best], 0)
    bounds = tree.log_q.flatten(1).gather(1, path).gather(1, torch.minimum(depth, last[:, None]))
    tokens, log_q = (x.flatten(1).gather(1, path) for x in (tree.tokens, tree.log_q))
    drafted = tree.drafted.flatten(1).gather(1, path) & (depth < longest[:, None])
    parents, depths = (depth - 1).expand(rows, -1), (depth + 1).expand(rows, -1)
    below = (depth <= depth[:, None]).expand(rows, -1, -1)
    own: tuple[Tensor, ...] = tokens, parents, depths, path, log_q, drafted, bounds, below
    if whole:
        more, node = levels * (width - 1), torch.arange(levels * width, device=last.device)
        level, slot, ways = node // width, node % width, tree.ways.flatten(1, 2)
        above = ways.gather(2, (level - 1).clamp(min=0).expand(rows, -1)[..., None])[..., 0] + (level - 1) * width
        goes_through = (ways[..., None] == slot[:width]).flatten(2) & (level <= level[:, None])
        theirs = (
            *(tree.tokens.flatten(1), torch.where(level > 0, above, -1), level + 1, node, tree.log_q.flatten(1)),
            *(tree.drafted.flatten(1), bounds.gather(1, level.expand(rows, -1)), goes_through),
        )
        padded = [pad(x, (0, more) if x.dim() == 2 else (0, more, 0, more)) for x in own]
        tree_rows = given.tree[:, None]
        own = tuple(
            torch.where(tree_rows if x.dim() == 2 else tree_rows[..., None], y, x)
            for x, y in zip(padded, theirs, strict=True)
        )
    tokens, parents, depths, path, log_q, drafted, bounds, below = own
    ends = is_end[tokens] & given.stops_at_eos[:, None]
    return Scored(tokens, parents, depths, path, log_q, drafted, ends, bounds, below, longest)


def target_inputs(scored: Scored | None, given: Given, length: int, capacity: int) -> Step:
    """The target's step over the root and the scored nodes: `mtad.step_inputs.target_inputs`."""
    behind = torch.arange(length, device=given.real.device) - given.committed[:, None]
    mask = (behind < 0)[:, None]
    tokens, positions = given.last_two[:, 1:], given.committed[:, None] - 1
    if scored is not None:
        nodes = scored.tokens.shape[1]
        at = behind.clamp(0, nodes - 1)[:, None].expand(-1, nodes, -1)
        sees = scored.ancestors.gather(2, at) & ((behind >= 0) & (behind < nodes))[:, None]
        mask = torch.cat([mask, mask | sees], 1)
        tokens, positions = torch.cat([tokens, scored.tokens], 1), torch.cat([positions, positions + scored.depths], 1)
    return tokens, positions, torch.where(given.real, given.committed - 1, capacity), mask[:, None]


def decide(
    scored: Scored | None, p: Tables, q: Tables | None, given: Given, finite: Tensor, used: frozenset[str], out: Results
) -> None:
    """Accept drafts and add the target's own token: `mtad.block.decide`.

    Args:
        scored: None where nothing is drafted.
        p: of the target [R, 1 + M]. q: [R, D], what chains were drawn from; None where no rule reads it.
        finite: bool [R], whether the draft's logits are.
        used: of the rules of rows that draft, the widest.
        out: is written to.
    """
    node, weighed, spent = torch.full_like(given.committed, -1), None, None
    if scored is not None and used.intersection(JOINT):
        joint_p = rules.joint_log_p(scored, p)
        deep = rules.joint(joint_p, scored.bounds, scored.drafted, scored.depths, scored.ends, given.threshold)
        node = best = rules.likeliest(deep, joint_p)
        if SAMPLED in used:
            drawn = rules.joint_sample(deep, joint_p, best, given.accept[:, 0, 0])
            node = torch.where((given.rule == RULES.index(SAMPLED)) & ~given.greedy, drawn, best)
    if scored is not None and q is not None:
        own, levels = given.rule == RULES.index(BUDGET), out.paths.shape[1]
        by_blocks = (given.rule == RULES.index(BLOCKWISE)) | own if used.intersection((BLOCKWISE, BUDGET)) else None
        limits = (given.divergence * own, given.plausible) if BUDGET in used else None
        kept, weights, spent = rules.verify(scored, p, q, given.accept[:, :, 0], levels, by_blocks, limits)
        node = torch.where(given.reads_draft, kept, node)
        # rows of other rules draw from p itself
        plain = launches.probabilities(p, node[:, None] + 1)[:, 0]
        weights = torch.where(given.reads_draft[:, None], weights, plain)
        blocks = by_block(weights)
        weighed = weights, torch.where(given.greedy[:, None], blocks.amax(2), blocks.sum(2))
    launches.emit(out, node, finite, scored, p, weighed, given)
    out.longest.copy_(scored.longest if scored is not None else out.lengths)
    out.spent.zero_() if spent is None else out.spent.copy_(spent)


def kept_columns(results: Results, scored: Scored, given: Given) -> tuple[Tensor, Tensor, Tensor]:
    """Where the accepted tokens' columns are, of target and auxiliary, and where they belong: int64 [R, D] each."""
    depth = torch.arange(results.paths.shape[1], device=given.real.device)
    kept = (depth < results.lengths[:, None]) & given.real[:, None]
    target, auxiliary = torch.where(kept, results.paths, depth), scored.origins.gather(1, results.paths)
    behind = given.committed[:, None]
    return behind + target, behind + torch.where(kept, auxiliary, depth), behind + depth
