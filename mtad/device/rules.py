"""The rules of captured methods for all rows of a batch: `mtad.rules.joint`, `chain` and `block` in float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from mtad.device.launches import probabilities
from mtad.device.tables import Scored, Tables, first_above


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


def move(p: Tensor, q: Tensor, divergence: Tensor, plausible: Tensor) -> tuple[Tensor, Tensor]:
    """`mtad.rules.budget.move` of probabilities [R, V]: p~, and how far it is from p, float32 [R]."""
    most, more = p.amax(1), (q - p).double()
    likely = (p > 0) & (p >= (plausible * most)[:, None])
    gains, losses = (more * (likely & (more > 0))), (-more).clamp(min=0)
    spent = torch.minimum(divergence.double() * (1.0 - most.double()), gains.sum(1))[:, None]
    shares = [part / part.sum(1, keepdim=True).clamp(min=1e-300) for part in (gains, losses)]
    change = spent * (shares[0] - shares[1])
    return (p + torch.where(spent > 0, change, 0.0)).clamp(min=0).float(), spent[:, 0].float()


def move_all(p: Tables, q: Tables, count: Tensor, divergence: Tensor, plausible: Tensor) -> tuple[Tensor, Tensor]:
    """p~ along chains of `count` [R] tokens, float32 [R, levels + 1, V], and how far each is from p, [R, levels + 1].

    It is p where nothing is moved: behind a chain, and where divergence, float32 [R], is 0.
    """
    places = torch.arange(q.logits.shape[1] + 1, device=count.device)
    moved = probabilities(p, places.expand(len(count), -1))
    spent = torch.zeros(moved.shape[:2], device=count.device)
    for level, at in enumerate(places[:-1]):
        own, far = move(moved[:, level], probabilities(q, at.expand(len(count), 1))[:, 0], divergence, plausible)
        drafted = level < count
        moved[:, level] = torch.where(drafted[:, None], own, moved[:, level])
        spent[:, level] = torch.where(drafted & (divergence > 0), far, 0.0)
    return moved, spent


def verify(
    scored: Scored,
    p: Tables,
    q: Tables,
    accept: Tensor,
    levels: int,
    blockwise: Tensor | None,
    budget: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`token_wise`, `block` and `budget` of chains, the first `levels` nodes of each row.

    Args:
        q: [R, levels], what each token of the chain was drawn from.
        accept: float64 [R, levels].
        blockwise: bool [R], rows that verify by blocks; None where none does.
        budget: divergence, 0 but for rows of `budget`, and plausible, float32 [R] each; None where no row has one.

    Returns:
        the last kept node, int64 [R], -1 for none; the weights of the bonus token, float32 [R, V]; and how far the law
        of each token was moved, in total variation, float32 [R, levels + 1], None without a budget.
    """
    drafted, log_q = scored.drafted[:, :levels], scored.log_q[:, :levels]
    count, tokens = drafted.sum(1), scored.tokens[:, :levels]
    depth, every = torch.arange(1, levels + 1, device=count.device), torch.arange(len(count), device=count.device)
    log_p = p.log_prob((depth - 1).expand_as(tokens), tokens)
    moved, spent = None, None
    if budget is not None:
        moved, spent = move_all(p, q, count, *budget)
        own = moved[:, :levels].gather(2, tokens[..., None])[..., 0].double().log()
        log_p = torch.where((budget[0] > 0)[:, None], own, log_p)

    def after(at: Tensor) -> Tensor:
        """The target's probabilities after the first `at` [R, N] tokens, float32 [R, N, V]."""
        return probabilities(p, at) if moved is None else moved[every[:, None], at]

    def residual(at: Tensor, weight: Tensor) -> Tensor:
        """max(weight p - q, 0) after the first `at` tokens, float32 [R, N, V]; weight [R, N]."""
        return (weight.float()[..., None] * after(at)).sub_(probabilities(q, at.clamp(max=levels - 1))).clamp_(min=0)

    own_q = log_q - pad(log_q[:, :-1], (1, 0))
    ratio = torch.where(drafted, (log_p - own_q).clamp(max=700), 0.0).exp()
    kept = ((accept < ratio) & drafted).long().cumprod(1).sum(1)
    weight = torch.ones_like(ratio[:, 0])
    if blockwise is not None:
        running = [weight]
        for step in ratio.unbind(1):
            running.append((running[-1] * step).clamp(max=1.0))
        bounds = w = torch.stack(running[1:], 1)
        if levels > 1:
            s = residual(depth[:-1].expand(len(w), -1), w[:, :-1]).sum(2, dtype=torch.float64)
            inner = torch.where(s > 0, s / (s + 1.0 - w[:, :-1]), 0.0)
            bounds = torch.where(depth < count[:, None], pad(inner, (0, 1)), w)
        at = (depth * ((accept < bounds) & (depth <= count[:, None]))).amax(1)
        scale = torch.where(at > 0, w.gather(1, (at - 1).clamp(min=0)[:, None])[:, 0], 1.0)
        kept, weight = torch.where(blockwise, at, kept), torch.where(blockwise, scale, weight)
    rest = residual(kept[:, None], weight[:, None])[:, 0]
    whole = (kept == count) | ~(rest.sum(1) > 0)
    weights = torch.where(whole[:, None], after(kept[:, None])[:, 0], rest)
    return kept - 1, weights, spent
