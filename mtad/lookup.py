"""Drafts that are looked up: what followed in the text where its end stood before (prompt lookup, n-gram drafts)."""

from __future__ import annotations

from mtad.batch import tree_of
from mtad.compiled import compiled
from mtad.distribution import NEVER

SHORTEST, LONGEST = 2, 16
"""Tokens of a suffix that has to stand elsewhere in the text, and those that are compared at most."""


@compiled
def look_up(text, count, draft):
    """Write what followed the longest suffix of a text where it stood before, of several such places the last.

    What reaches the text's end goes on as if the draft were its continuation.

    Args:
        text: int64, of which the first `count` tokens are the text.
        draft: int64 [D], written to.

    Returns:
        tokens of the suffix; 0 where none of `SHORTEST` tokens stood elsewhere, and nothing is written.
    """
    longest, place = SHORTEST - 1, 0
    for end in range(count - 1, SHORTEST - 1, -1):
        length = 0
        while length < min(end, LONGEST) and text[end - 1 - length] == text[count - 1 - length]:
            length += 1
        if length > longest:
            longest, place = length, end
            if length == LONGEST:
                break
    for at in range(len(draft) if place else 0):
        draft[at] = text[place + at] if place + at < count else draft[place + at - count]
    return longest if place else 0


@compiled
def draft_looked_up(rows, drafts, counts, trees, q, is_end):
    """Make looked-up tokens the drafts of rows, chains of which each token was certain; returns the longest's length.

    Args:
        drafts, counts: int64 [R, D] and [R], tokens and how many there are; -1 for rows that stay as they are.
        trees: `Trees`; q: `Distributions` [R, 1 + N], for rules that read them.
        is_end: bool [V]; nothing is drafted behind a token that ends the text.
    """
    longest = 0
    for r in range(len(rows)):
        tree = tree_of(trees, r)
        if counts[r] >= 0:  # what the block before left
            tree.drafted[:], tree.growing[:], tree.log_q[:] = False, False, NEVER
        for node in range(counts[r]):
            token = drafts[r, node]
            tree.tokens[node], tree.parents[node], tree.log_q[node], tree.drafted[node] = token, node - 1, 0.0, True
            if rows[r].reads_draft:
                q.ids[r, node, 0], q.log_p[r, node, 0], q.counts[r, node] = token, 0.0, 1
            longest = max(longest, node + 1)
            if rows[r].stops_at_eos and is_end[token]:
                break
    return longest
