"""Block verification of the best of several independent chains: lossless."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mtad.distributions.candidates import Candidates
from mtad.distributions.table import Table
from mtad.rows import Rows
from mtad.rules.chain import verify_block
from mtad.rules.recursive_rejection import auxiliary_after
from mtad.rules.scored import Chain, Scored, Verdict, after_node


def greedy_multi_path(scored: Scored, rows: Rows) -> Verdict:
    """Greedy multi-path block verification (arXiv 2602.16961).

    The K chains are compared token by token: at their first difference, the token of larger p / q wins. So they are in
    a strict order that does not depend on what was drawn, and the best one lies in a part of probability m above a part
    of probability a with probability (a + m)^K - a^K. The distributions of its tokens follow, and block verification is
    lossless whatever a path was drawn from.

    Of (a, m) only the ratio counts, and (a + m)^K - a^K is m times a sum of products: nothing is subtracted.
    """
    tree, q = scored.tree, auxiliary_after(scored)
    rows_, levels, width = tree.tokens.shape[0], tree.levels, tree.width
    paths = (rows.child_at[:, 0] >= 0).sum(-1, keepdim=True)
    node = torch.full((rows_,), -1, dtype=torch.int64, device=paths.device)
    worse = torch.zeros(rows_, 1, device=paths.device)
    mass = torch.ones_like(worse)
    members = torch.ones(rows_, width, dtype=torch.bool, device=paths.device)
    tokens, drafted = tree.tokens.view(rows_, levels, width), tree.drafted.view(rows_, levels, width)
    found: list[tuple[Tensor, ...]] = []
    for level in range(levels):
        p, own = after_node(scored.after, node), after_node(q, node)
        if isinstance(scored.after, Table):  # equal ratios are in the order of q, which is that of a list
            log_q, own_ids = own.log_prob.sort(descending=True, stable=True)
            own = Candidates(own_ids, log_q)
        likelier = p.among(own.ids, scored.vocab) - own.log_prob
        order = torch.where(own.log_prob > -math.inf, likelier, -math.inf).sort(descending=True, stable=True).indices
        share = mass * own.log_prob.exp().gather(1, order)
        below = worse + torch.cat([share.flip(1).cumsum(1).flip(1)[:, 1:], torch.zeros_like(worse)], 1)
        upper = below + share
        ratio = _powers(upper, below, paths, width) / _powers(worse + mass, worse, paths, width)
        log_q = own.log_prob + torch.empty_like(ratio).scatter(1, order, ratio).log()
        # the chains that share the path so far, by the place of their next token
        ids, here = own.ids.gather(1, order), tokens[:, level]
        members = members & drafted[:, level]
        place = (ids[:, None] == here[:, :, None]).long().argmax(-1).masked_fill(~members, ids.shape[1])
        slot = place.argmin(-1, keepdim=True)
        some = members.any(-1)
        token = here.gather(1, slot)
        members = members & (here == token)
        at = place.gather(1, slot).clamp(max=ids.shape[1] - 1)
        top = upper.gather(1, at).clamp(min=1e-37)
        worse, mass = below.gather(1, at) / top, share.gather(1, at) / top
        node = torch.where(some, slot.squeeze(1) + level * width, node)
        found.append((token.squeeze(1), some, node, own.ids, log_q))
    token, some, nodes, ids, log_q = (torch.stack(column, 1) for column in zip(*found, strict=True))
    drawn = Candidates(ids, log_q)
    at = torch.cat([torch.zeros_like(nodes[:, :1]), nodes + 1], 1)[:, :, None].expand(-1, -1, scored.after.ids.shape[2])
    after = Candidates(scored.after.ids.gather(1, at), scored.after.log_prob.gather(1, at))
    log_p = scored.log_p.gather(1, nodes.clamp(min=0))
    return verify_block(scored, Chain(token, some, log_p, drawn.at(token), after, drawn, nodes))


def _powers(upper: Tensor, lower: Tensor, count: Tensor, most: int) -> Tensor:
    """(upper^count - lower^count) / (upper - lower), `count` int64 [R, 1], at most `most`."""
    found, power = torch.ones_like(upper), torch.ones_like(lower)
    for done in range(1, most):
        power = power * lower
        found = torch.where(done < count, upper * found + power, found)
    return found
