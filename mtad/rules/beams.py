"""Speculative beam sampling: several live beams, verified level by level."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from mtad.distributions.candidates import Candidates
from mtad.draft.live import Live, behind
from mtad.ops import index
from mtad.rows import Rows, choose_rows
from mtad.rules.beam_level import Drafted, draw_pairs, level_width, nodes_of
from mtad.rules.recursive_rejection import auxiliary_after
from mtad.rules.scored import Scored, Verdict


class _Beams(NamedTuple):
    """Live beams of one level, in the order they were drawn; [R, W] each, or [R, W, D + 1].

    Attributes:
        at: where the target's distribution after a beam is: 0 after the root, else 1 + node.
        weight: float64, joint log-likelihood under the target, from the root; -inf for no beam.
        ended: the beam's text has ended.
        path: its tokens, -1 beyond its end.
        trail: its nodes by level; -1 where it has none.
    """

    at: Tensor
    weight: Tensor
    ended: Tensor
    path: Tensor
    trail: Tensor

    @property
    def alive(self) -> Tensor:
        return self.weight > -math.inf


def beams(scored: Scored, rows: Rows) -> Verdict:
    """Dynamic-width speculative beam decoding (arXiv 2409.16560): beam sampling on the target, drafted.

    Beam sampling keeps up to `beam_width` beams, and replaces them at each level by as many of their (beam, token)
    pairs, drawn without replacement with probability proportional to the pair's joint likelihood; an ended beam is a
    pair of its own. A token is decided when all beams have it, or when it is draft_len / 2 (rounded down) tokens old:
    then it is the one of the beam drawn first, and beams without it go.

    A level's pairs come from the draft where they can. Drafted pairs of live beams are a sample without replacement of
    the draft's own joint q over them; one after the other is accepted with probability min(1, p/q), p being the
    target's over what is not drawn yet; a rejected pair leaves the residual max(p - q, 0), an accepted one the rest of
    p, and q loses either. What is still missing is drawn from what is left, and ends the block, for nothing has been
    scored behind it. So each level is distributed as the target's own beam sampling of the same width. What is left of
    q is added up anew for each pair, from logarithms: of a sure draft, 1 - q is nothing but rounding.

    The width of a level is the largest n <= `beam_width` for which n acceptances are expected with probability
    `accept_threshold` (at least 1): it depends on p and q alone, never on what is drawn, so threshold 0 is beam
    sampling of constant width.
    """
    tree, live, drawn, nodes = scored.tree, scored.live, rows.drawn, scored.noise.nodes
    assert live is not None, "the draft begins with the live beams"
    count, width, levels = len(tree.tokens), tree.width, tree.levels
    most = (rows.level_bias[0, :, :width] == 0).sum(-1)
    longest, undecided = rows.draft_len.squeeze(1), live.lengths.amax(1)
    own = auxiliary_after(scored)
    q_after = own.among(scored.after.ids, scored.vocab)
    now, done = _root(count, width, levels, drawn.device), torch.zeros_like(drawn)
    for level in range(1, levels + 2):
        pairs = _pairs(now, scored, rows)
        joint = (pairs - pairs.logsumexp(-1, keepdim=True)).exp().nan_to_num(0.0)
        first, reached = (level - 1) * width, level <= longest
        if level <= levels:
            drafted = _drafted(now, scored, own, q_after, level, reached, _itself(scored))
            wanted = torch.where(drawn & reached, level_width(joint, drafted, rows.threshold, most), most)
        else:
            drafted, wanted = Drafted.nothing(joint), most
        picks, short = draw_pairs(joint, drafted, nodes[:, first : first + width], nodes[:, -width:], wanted, drawn)
        node = nodes_of(picks, drafted.hits, first)
        following = _decided(_follow(now, picks, pairs, node, level, scored, rows), level - longest // 2)
        ends = (short & drawn) | ((picks >= 0) & (node < 0)).any(-1) | (following.ended | ~following.alive).all(-1)
        if level <= levels:
            replayed = undecided >= level
            following = choose_rows(replayed, _replayed(now, scored, rows, live, level), following)
            ends = ends & ~replayed
        now = choose_rows(done, now, following)
        done = done | ends
    return _verdict(now, levels, scored.after.ids.shape[2])


def _root(count: int, width: int, levels: int, device: torch.device) -> _Beams:
    weight = torch.zeros(count, width, dtype=torch.float64, device=device)
    weight = weight.masked_fill(index(width, device) > 0, -math.inf)
    nothing = torch.full((count, width, levels + 1), -1, device=device)
    zero = torch.zeros(count, width, dtype=torch.int64, device=device)
    return _Beams(zero, weight, zero.bool(), nothing, nothing)


def _pairs(now: _Beams, scored: Scored, rows: Rows) -> Tensor:
    """Joint log-likelihood of each (beam, candidate) pair, float64 [R, W K]; an ended beam is its own candidate 0."""
    conditional = _after(scored.after.log_prob, now).double()
    conditional = torch.where(now.ended[:, :, None], _itself(scored).double(), conditional)
    return (conditional + now.weight[:, :, None]).flatten(1)


def _itself(scored: Scored) -> Tensor:
    """Conditional log-probability of an ended beam's only candidate, itself: 0, -inf, -inf, .., [K]."""
    size = scored.after.ids.shape[2]
    return torch.zeros(size, device=scored.log_p.device).masked_fill(index(size, scored.log_p.device) > 0, -math.inf)


def _drafted(
    now: _Beams, scored: Scored, own: Candidates, q_after: Tensor, level: int, reached: Tensor, itself: Tensor
) -> Drafted:
    """Args: the auxiliary's distributions after root and nodes, and what they are of the target's candidates."""
    tree, width = scored.tree, scored.tree.width
    here = slice((level - 1) * width, level * width)
    token, log_q = tree.tokens[:, here], tree.log_q[:, here].double()
    exists = (log_q > -math.inf) & reached[:, None]
    mine = (now.at[:, :, None] == tree.parents[:, None, here] + 1) & now.alive[:, :, None] & exists[:, None]
    above = pad(tree.log_q.double(), (1, 0)).gather(1, now.at).masked_fill(~now.alive, -math.inf)

    def pairs(log_prob: Tensor) -> Tensor:
        """[R, W K] of [R, 1 + N, K]; an ended beam is its own candidate 0."""
        conditional = torch.where(now.ended[:, :, None], itself, _after(log_prob, now)).double()
        return (above[:, :, None] + conditional).flatten(1)

    def hits(ids: Tensor) -> Tensor:
        same = _after(ids, now)[..., None] == token[:, None, None]
        same = torch.where(now.ended[:, :, None, None], (itself == 0)[:, None], same)
        return (mine[:, :, None] & same).flatten(1, 2)

    over = slice((level - 2) * width, (level - 1) * width)
    alive = above.exp().sum(-1)
    whole = tree.log_q[:, over].double().exp().sum(-1) if level > 1 else alive
    return Drafted(
        log_q=pairs(q_after),
        left=pairs(own.log_prob),
        each=log_q.masked_fill(~mine.any(1), -math.inf),
        hits=hits(scored.after.ids),
        own_hits=hits(own.ids),
        share=(alive / whole.clamp(min=1e-300)).clamp(max=1),
    )


def _follow(now: _Beams, picks: Tensor, pairs: Tensor, node: Tensor, level: int, scored: Scored, rows: Rows) -> _Beams:
    ids, at = _after(scored.after.ids, now), picks.clamp(min=0)
    parent, alive = at // ids.shape[2], picks >= 0
    over = now.ended.gather(1, parent)
    token = torch.where(over, -1, ids.flatten(1).gather(1, at))
    weight = pairs.gather(1, at).masked_fill(~alive, -math.inf)
    return _extended(now, parent, token, node, weight, level, rows)


def _replayed(now: _Beams, scored: Scored, rows: Rows, live: Live, level: int) -> _Beams:
    """The beams that were alive before the block, as far as `level`: each in its own slot."""
    tree, width = scored.tree, scored.tree.width
    node = index(width, rows.rule.device).expand(len(tree.tokens), -1)
    parent = node if level > 1 else torch.zeros_like(node)
    node = node + (level - 1) * width
    has, alive = live.lengths[:, :width] >= level, live.weights[:, :width] > -math.inf
    # what was likely enough then is not forbidden now, whatever a device rounds
    log_p = scored.log_p.gather(1, node).double().clamp(min=-1e3)
    weight = (now.weight.gather(1, parent) + torch.where(has, log_p, 0.0)).masked_fill(~alive, -math.inf)
    return _extended(now, parent, torch.where(has, tree.tokens.gather(1, node), -1), node, weight, level, rows)


def _extended(
    now: _Beams, parent: Tensor, token: Tensor, node: Tensor, weight: Tensor, level: int, rows: Rows
) -> _Beams:
    """Beams `parent` [R, W] with one more token; -1 for one that has ended."""
    here = index(now.path.shape[2], token.device) == level - 1

    def longer(values: Tensor, new: Tensor) -> Tensor:
        return torch.where(here, new[:, :, None], values.gather(1, parent[:, :, None].expand(-1, -1, values.shape[2])))

    ended = (token < 0) | (rows.ends[token.clamp(min=0)] & rows.stops_at_eos)
    return _Beams((node + 1).clamp(min=0), weight, ended, longer(now.path, token), longer(now.trail, node))


def _decided(beams: _Beams, upto: Tensor) -> _Beams:
    """Without the beams whose token number `upto` [R], from 1, is not that of the first."""
    at = (upto - 1).clamp(min=0)[:, None, None].expand(-1, beams.path.shape[1], 1)
    token = beams.path.gather(2, at).squeeze(2)
    gone = (upto >= 1)[:, None] & (token != token[:, :1])
    return beams._replace(weight=beams.weight.masked_fill(gone, -math.inf))


def _verdict(beams: _Beams, levels: int, candidates: int) -> Verdict:
    """What all live beams have in common is text; if all have ended, the first of them is."""
    alive, path = beams.alive, beams.path
    same = ((path == path[:, :1]) | ~alive[:, :, None]).all(1) & (path[:, 0] >= 0)
    over = (beams.ended | ~alive).all(-1)
    lengths = (path >= 0).sum(-1)
    count = torch.where(over, lengths[:, 0], same.long().cumprod(-1).sum(-1))
    node = torch.where(count > 1, beams.trail[:, 0].gather(1, (count - 2).clamp(min=0)[:, None]).squeeze(1), -1)
    last = path[:, 0].gather(1, (count - 1).clamp(min=0)[:, None]).clamp(min=0).expand(-1, candidates)
    pending = alive & ~over[:, None]
    live = Live(
        tokens=behind(path, count, levels),
        lengths=torch.where(pending, lengths - count[:, None], 0).clamp(min=0),
        weights=torch.where(pending, beams.weight, -math.inf).float(),
    )
    one = (index(candidates, path.device) == 0).float().expand(len(path), -1)
    return Verdict(node, count - 1, last, one, live)


def _after(values: Tensor, now: _Beams) -> Tensor:
    """What holds after each beam, [R, W, K], of what holds after root and nodes."""
    return values.gather(1, now.at[:, :, None].expand(-1, -1, values.shape[2]))
