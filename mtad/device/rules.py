"""The rules of captured methods for all rows of a batch: `mtad.rules.joint`, `chain` and `block` in float64."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from mtad.device.tables import Tables, first_above


class Scored(NamedTuple):
    """The nodes that the target scores, M per row; see `mtad.rules.scored.Scored`.

    Attributes:
        tokens, parents, depths, origins: int64 [R, M]; parents are -1 for the root.
        log_q: float64 [R, M].
        drafted, ends: bool [R, M].
        bounds: float64 [R, M], log-likelihood under the draft of its best path up to the node's depth.
        ancestors: bool [R, M, M], whether a node's path goes through another one; through itself it does.
        longest: int64 [R].
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    origins: Tensor
    log_q: Tensor
    drafted: Tensor
    ends: Tensor
    bounds: Tensor
    ancestors: Tensor
    longest: Tensor


def joint(joint_p: Tensor, bounds: Tensor, drafted: Tensor, depths: Tensor, ends: Tensor, threshold: Tensor) -> Tensor:
    """`mtad.rules.joint.joint` up to its last choice: of the nodes that pass, those of the greatest depth, bool [R, M].

    Args:
        joint_p: float64 [R, M], log-likelihood of each node's path under the target.
        threshold: float64 [R], the logarithm of tau.
    """
    passes = drafted & (joint_p > -math.inf) & (joint_p - bounds > threshold[:, None])
    depth = (depths * passes).amax(1, keepdim=True)
    return passes & ((depths == depth) | ends)


def likeliest(deep: Tensor, joint_p: Tensor) -> Tensor:
    """Of nodes [R, M], the one of the largest likelihood, the first of equal ones, int64 [R]; -1 for none."""
    return torch.where(deep.any(1), joint_p.masked_fill(~deep, -math.inf).argmax(1), -1)


def joint_sample(deep: Tensor, joint_p: Tensor, best: Tensor, uniform: Tensor) -> Tensor:
    """`mtad.rules.joint.joint_sample`: one of the nodes [R, M], drawn by its likelihood; -1 for none."""
    most = joint_p.gather(1, best.clamp(min=0)[:, None])
    weights = torch.where(deep, (joint_p - most).exp().float(), 0.0).double()
    return torch.where(best < 0, -1, first_above(weights, uniform * weights.sum(1))[0])


def joint_log_p(scored: Scored, p: Tables) -> Tensor:
    """Log-likelihood of every node's path under the target, float64 [R, M]."""
    log_p = p.log_prob(scored.parents + 1, scored.tokens)
    whole = torch.where(scored.ancestors & scored.drafted[:, None], log_p[:, None], 0.0).sum(2)
    return whole.masked_fill(~scored.drafted, -math.inf)


def verify(
    scored: Scored, p: Tables, q: Tables, accept: Tensor, levels: int, blockwise: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`token_wise` and `block` of chains, the first `levels` nodes of each row.

    Args:
        q: [R, levels], what each token of the chain was drawn from.
        accept: float32 [R, levels].
        blockwise: bool [R], rows that verify by blocks; None where none does.

    Returns:
        the last kept node, int64 [R], -1 for none, and the weights of the bonus token, float32 [R, V].
    """
    drafted, log_q = scored.drafted[:, :levels], scored.log_q[:, :levels]
    log_p = p.log_prob(scored.parents[:, :levels] + 1, scored.tokens[:, :levels])
    own_q = log_q - pad(log_q[:, :-1], (1, 0))
    ratio = torch.where(drafted, (log_p - own_q).clamp(max=700), 0.0).exp()
    count = drafted.sum(1)
    kept = ((accept < ratio) & drafted).long().cumprod(1).sum(1)
    weight = torch.ones_like(ratio[:, 0])
    if blockwise is not None:
        w, at, scale = weight, torch.zeros_like(kept), weight
        for i in range(1, levels + 1):
            w = (w * ratio[:, i - 1]).clamp(max=1.0)
            bound = w
            if i < levels:
                s = _residual(p, q, count.clamp(max=i), w).sum(1, dtype=torch.float64)
                bound = torch.where(count == i, w, torch.where(s > 0, s / (s + 1.0 - w), 0.0))
            here = (accept[:, i - 1] < bound) & (count >= i)
            at, scale = torch.where(here, i, at), torch.where(here, w, scale)
        kept, weight = torch.where(blockwise, at, kept), torch.where(blockwise, scale, weight)
    rest = _residual(p, q, kept, weight)
    whole = (kept == count) | ~(rest.sum(1) > 0)
    return kept - 1, torch.where(whole[:, None], p.probabilities(kept), rest)


def _residual(p: Tables, q: Tables, at: Tensor, weight: Tensor) -> Tensor:
    """max(weight p - q, 0) after the first `at` [R] tokens of chains, float32 [R, V]."""
    own_q = q.probabilities(at.clamp(max=q.logits.shape[1] - 1))
    return (weight.float()[:, None] * p.probabilities(at) - own_q).clamp(min=0)
