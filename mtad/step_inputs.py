"""Where the tokens of a block lie: the inputs of both models' steps, and the cache columns that are kept.

The committed tokens of a row are followed by the nodes of its draft: node n lies n columns behind them.
"""

from __future__ import annotations

from functools import partial

from mtad.compiled import compiled
from mtad.draft import drafted_path


@compiled
def first_inputs(rows, last_two, committed, tokens, positions, write_at, mask):
    """Write a draft's first step: the last two committed tokens; see `level_inputs`.

    After a fully accepted block the last drafted token has never been run, and a fixed step of two tokens costs less
    than two kinds of step. A row that drafts nothing runs them behind its committed columns, where they change nothing.
    A sequence of one token has it twice, in columns 0 and 1.
    """
    for r in range(len(committed)):
        start = committed[r] - 2 if rows[r].draft_len > 0 else committed[r]
        write_at[r] = max(start, 0)
        for at in range(2):
            tokens[r, at], positions[r, at] = last_two[r, at], max(start + at, 0)
            mask[r, 0, at, : write_at[r] + at + 1] = True
            mask[r, 0, at, write_at[r] + at + 1 :] = False


@compiled
def level_inputs(level, trees, committed, tokens, positions, write_at, mask):
    """Write the auxiliary's step over a level: see `engines.base.Step`.

    Args:
        committed: int64 [R].
        tokens, positions: int64 [R, W].
        write_at: int64 [R].
        mask: bool [R, 1, W, L].
    """
    for r in range(len(committed)):
        first, stop, end = trees.starts[r, level], trees.starts[r, level + 1], committed[r]
        write_at[r] = end + first
        for slot in range(tokens.shape[1]):
            tokens[r, slot], positions[r, slot] = 0, end + level
            mask[r, 0, slot, :end] = True
            mask[r, 0, slot, end:] = False
            if first + slot < stop:
                tokens[r, slot] = trees.tokens[r, first + slot]
                see_path(trees.parents[r], first + slot, mask[r, 0, slot, end:])


@compiled
def see_path(parents, node, columns):
    """Let a node see itself and its ancestors; columns begin behind the committed ones."""
    while node >= 0:
        columns[node] = True
        node = parents[node]


@compiled
def target_inputs(scored, roots, committed, tokens, positions, write_at, mask):
    """Write the target's step over the root and the scored nodes: see `engines.base.Step`.

    The logits after node n are at 1 + n.

    Args:
        roots, committed: int64 [R], the last committed token, and how many there are.
        tokens, positions: int64 [R, 1 + M].
        write_at: int64 [R].
        mask: bool [R, 1, 1 + M, L].
    """
    for r in range(len(committed)):
        end = committed[r]
        write_at[r] = end - 1
        mask[r, 0, :, :end] = True
        mask[r, 0, :, end:] = False
        tokens[r, 0], positions[r, 0] = roots[r], end - 1
        for node in range(tokens.shape[1] - 1):
            known = node < scored.counts[r]
            tokens[r, 1 + node] = scored.tokens[r, node] if known else 0
            positions[r, 1 + node] = end - 1 + (scored.depths[r, node] if known else 1)
            if known:
                see_path(scored.parents[r], node, mask[r, 0, 1 + node, end:])


@compiled
def kept_columns(drawn_rows, committed, scored, decisions, target, auxiliary, to):
    """Which cache columns the accepted tokens lie in, of both models, and where they belong.

    Args:
        drawn_rows: records, `mtad.rows.ROW` [R], whose `draft_len` is 0 where the auxiliary ran nothing.
        target, auxiliary, to: int64 [R, D], written to; beyond the accepted tokens, columns that stay where they are.

    Returns:
        whether some column has to move, of the target and of the auxiliary.
    """
    target_moves = auxiliary_moves = False
    for r in range(len(committed)):
        for at in range(to.shape[1]):
            to[r, at] = target[r, at] = auxiliary[r, at] = committed[r] + at
            if at < decisions.lengths[r]:
                node = decisions.paths[r, at]
                origin = scored.origins[r, node] if drawn_rows[r].draft_len > 0 else at
                target[r, at], auxiliary[r, at] = committed[r] + node, committed[r] + origin
                target_moves, auxiliary_moves = target_moves or node != at, auxiliary_moves or origin != at
    return target_moves, auxiliary_moves


@compiled
def move_columns(cache, source, to):
    """Move columns within each row of a cache.

    Args:
        cache: [R, columns, layers x 2, kv_heads, words], changed in place.
        source, to: int64 [R, D], ascending in each row, with to <= source.
    """
    _, _, parts, heads, words = cache.shape
    for r in range(len(source)):
        for at in range(source.shape[1]):
            old, new = source[r, at], to[r, at]
            for part in range(parts if old != new else 0):
                for head in range(heads):
                    for word in range(words):
                        cache[r, new, part, head, word] = cache[r, old, part, head, word]


@partial(compiled, nogil=True)
def lay_out(memory, rows, heads, before, after, held):
    """Give each row of a cache another number of columns, in place.

    Args:
        memory: uint8 [layers x 2, ..], in which the columns of so many rows' heads follow each other.
        before, after: bytes of all columns of one head, so far and from now on.
        held: bytes of them that stay, at most either; what is behind becomes zeros.
    """
    for part in memory:
        for at in range(rows * heads):
            block = at if after < before else rows * heads - 1 - at  # nothing is overwritten before it has moved
            moved = part[block * before : block * before + held].copy()
            part[block * after : block * after + held] = moved
            part[block * after + held : (block + 1) * after] = 0


@compiled
def node_paths(parents, drafted_tokens, drafted, nodes, tokens, lengths):
    """Write the drafted tokens from the root to each of some nodes [R, S], -1 for the root, itself included.

    Args:
        parents, drafted_tokens, drafted: of `Trees` or `ScoredTrees`.
        tokens: int64 [R, S, D]; lengths: int64 [R, S], how many there are.
    """
    for r in range(nodes.shape[0]):
        for s in range(nodes.shape[1]):
            path = tokens[r, s]  # of nodes, and then of their tokens
            lengths[r, s] = drafted_path(parents[r], drafted[r], nodes[r, s], path)
            for at in range(lengths[r, s]):
                path[at] = drafted_tokens[r, path[at]]
