"""Drafts that are looked up: what followed in the text where its end stood before (prompt lookup, n-gram drafts)."""

from __future__ import annotations

import numpy as np

from mtad.compiled import compiled
from mtad.distribution import NEVER

SHORTEST, COMPARED = 2, 16
"""Tokens of a suffix that has to stand elsewhere in the text, and those that are compared at most."""

MOST, SURE = 16, 40.0
"""Continuations of a draft at most. A node's first child is by so many nats likelier than its second, and so on: beside
1, what the others have is nothing in float64, and the 16th has something."""


@compiled
def look_up(text, count, drafts):
    """Write what followed the longest suffix of a text where it stood before, of several such places the last first.

    What reaches the text's end goes on as if the draft were its continuation.

    Args:
        text: int64, of which the first `count` tokens are the text.
        drafts: int64 [C, D], written to; no two that are found are the same.

    Returns:
        how many were found; 0 where none of `SHORTEST` tokens stood elsewhere.
    """
    longest, found = SHORTEST, 0
    for end in range(count - 1, SHORTEST - 1, -1):
        length = 0
        while length < min(end, COMPARED) and text[end - 1 - length] == text[count - 1 - length]:
            length += 1
        if length > longest:
            longest, found = length, 0
        if length == longest and found < len(drafts):
            differs = True
            for at in range(drafts.shape[1]):
                drafts[found, at] = text[end + at] if end + at < count else drafts[found, end + at - count]
            for other in range(found):
                differs = differs and (drafts[other] != drafts[found]).any()
            found += differs
            if found == len(drafts) and longest == COMPARED:
                break
    return found


@compiled
def draft_looked_up(rows, looked_up, drafts, trees, q, is_end):
    """Make continuations the drafts of rows, merged where they begin alike; returns the levels of the deepest.

    Each token was certain. So q is sure of a node's first child, and without it of the second: a rule for branches sees
    them as drawn without replacement, and judges the second by what the first has left of the target's law.

    Args:
        looked_up: bool [R]; the other rows stay as they are.
        drafts: int64 [R, C, D], continuations in ascending order, as q's ids are; -1 behind the end of each.
        trees: `Trees`, of which `starts` is written as well.
        q: `Distributions` [R, 1 + N], for rules that read them.
        is_end: bool [V]; nothing is drafted behind a token that ends the text.
    """
    deepest = 0
    for r in range(len(rows)):
        if not looked_up[r]:
            continue
        trees.drafted[r], trees.growing[r], trees.log_q[r] = False, False, NEVER  # what the block before left
        q.counts[r], trees.starts[r] = 0, 0
        count, nodes = 0, np.full(drafts.shape[1], -1)
        for level in range(drafts.shape[2]):
            first = count
            for at in range(len(nodes)):
                token, parent = drafts[r, at, level], nodes[at]
                if token < 0 or (parent >= 0 and rows[r].stops_at_eos and is_end[trees.tokens[r, parent]]):
                    continue
                last = count - 1  # those that begin alike follow each other
                if last < first or trees.tokens[r, last] != token or trees.parents[r, last] != parent:
                    trees.tokens[r, count], trees.parents[r, count] = token, parent
                    trees.log_q[r, count], trees.drafted[r, count] = 0.0, True
                    if rows[r].reads_draft:
                        child = q.counts[r, parent + 1]
                        q.ids[r, parent + 1, child], q.log_p[r, parent + 1, child] = token, -SURE * child
                        q.counts[r, parent + 1] += 1
                    count, deepest = count + 1, max(deepest, level + 1)
                nodes[at] = count - 1
            trees.starts[r, level + 1 :] = count
    return deepest
