"""Which tokens a filter keeps, without a sort of the vocabulary: by bisection on the logit of the last one.

A filter by top-k or top-p keeps the shortest prefix of the tokens, most likely first and of equal ones the smaller id
first, whose count or mass reaches a bound.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import threshold_  # type: ignore[attr-defined]

from mtad.rows import BLOCK, Rows, blocks_of

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.intp]


LEAST = -87.0
"""What is less likely than the most likely token by more nats has no weight and is never drawn, also without a filter.

Less is no float32 in full, and slow to compute with. Of a vocabulary of V tokens this drops a share of V e^-87 at most,
1e-32 at V = 128,256, where float32 rounds off 6e-8."""


def kept_tokens(logits: Tensor, weights: Tensor, measure: Tensor, bound: Tensor) -> Tensor:
    """The prefix as a mask, in a fixed number of passes: for devices.

    Args:
        logits: float32 [..., V].
        weights: float32 [..., V], 0 for tokens that are dropped already.
        measure: float32 [..., V], what is added up: 1 or the weights.
        bound: [..., 1]; one that is never reached keeps all.

    Returns:
        bool [..., V].
    """
    bits = logits.view(torch.int32).long()
    keys = torch.where(bits < 0, -1 - (bits & 0x7FFFFFFF), bits)  # in the order of the floats
    measure = measure * (weights > 0)
    low = torch.full_like(bound, -(2**31), dtype=torch.int64).expand(*keys.shape[:-1], 1)
    high = torch.full_like(low, 2**31 - 1)
    for _ in range(32):
        middle = (low + high) >> 1
        enough = (measure * (keys >= middle)).sum(-1, keepdim=True) >= bound
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
    above, tied = keys > low, (keys == low) & (weights > 0)
    need = (bound - (measure * above).sum(-1, keepdim=True)) / (measure * tied).amax(-1, keepdim=True)
    return above | (tied & (tied.cumsum(-1) <= need.ceil()))


def filter_on_host(logits: Tensor, rows: Rows, wanted: Tensor) -> tuple[Tensor, ...]:
    """`largest`, `lowest`, `last`, `log_total` and `blocks` of `mtad.distributions.table.Table`, for logits [R, S, V].

    One distribution after the other: what fits into a core's cache is worked on several times as fast.

    Args:
        wanted: bool [R, S]; to the others, all tokens are impossible.
    """
    given = logits.float()
    count, positions, size = logits.shape
    largest, lowest = torch.zeros(2, count, positions, 1)
    last, log_total = torch.full((count, positions, 1), size), torch.full((count, positions, 1), math.inf)
    blocks = torch.full((count, positions, blocks_of(size)), -math.inf)
    padded, scratch = torch.zeros(blocks_of(size) * BLOCK), torch.empty(size)
    weights, each = padded[:size], padded.view(-1, BLOCK)
    columns = rows.inverse_temperature, rows.top_k, rows.top_p, rows.min_p, rows.greedy
    asked = list(zip(*(x.flatten().tolist() for x in columns), strict=True))
    for row, at in (wanted & rows.tabulated[:, None]).nonzero().tolist():
        here, own, (scale, *filters, greedy) = (row, at), given[row, at], asked[row]
        top = own.numpy().max()  # faster than torch's
        largest[here] = float(top)
        torch.sub(own, float(top), out=weights)
        threshold_(weights if scale == 1 else weights.mul_(scale), LEAST, -math.inf).exp_()
        lowest[here], last[here] = _filter(own.numpy(), weights, scratch, *filters)
        mass = each.sum(-1)
        log_total[here] = total = mass.sum().log()
        torch.sub((each.amax(-1) if greedy else mass).log(), total, out=blocks[here])
    return largest, lowest, last, log_total, blocks


def log_prob_on_host(
    logits: Tensor, scale: Tensor, largest: Tensor, lowest: Tensor, last: Tensor, log_total: Tensor
) -> Tensor:
    """`mtad.distributions.table.Table.log_prob`, of the table's fields; one distribution after the other."""
    values, size = torch.empty(logits.shape), logits.shape[-1]
    edges = ((lowest - largest) * scale - log_total).flatten().tolist()
    columns = (x.flatten().tolist() for x in (scale, largest, lowest, last, log_total))
    given, found = logits.float().reshape(-1, size), values.view(-1, size)
    numbers = list(zip(edges, *columns, strict=True))
    for own, out, (edge, factor, most, least, final, total) in zip(given, found, numbers, strict=True):
        torch.sub(own, most, out=out)
        (out if factor == 1 else out.mul_(factor)).sub_(total)
        if least > -math.inf:
            threshold_(out, float(np.nextafter(np.float32(edge), np.float32(-math.inf))), -math.inf)
            tied = np.flatnonzero(out.numpy() == np.float32(edge))
            logit = own.numpy()[tied]
            out.numpy()[tied[(logit < least) | ((logit == least) & (tied > final))]] = -math.inf
    return values


def _filter(
    logits: Floats, weights: Tensor, scratch: Tensor, top_k: int, top_p: float, min_p: float
) -> tuple[float, int]:
    """Make the weights of dropped tokens 0; the smallest logit that is kept, and the last token that has it."""
    own, lowest, last = weights.numpy(), -math.inf, len(logits)
    if top_k < len(logits):
        edge = np.partition(own, len(own) - top_k)[-top_k]
        tied, above = np.flatnonzero(own == edge), int(np.count_nonzero(own > edge))
        lowest, last = _cut(logits, weights, edge, tied, top_k - above)
    if top_p < 1:
        lowest, last = _cut(logits, weights, *_crossing(weights, scratch, top_p))
    if min_p > 0:
        threshold_(weights, float(np.nextafter(np.float32(min_p), np.float32(0))), 0.0)
        least = float(np.where(own > 0, logits, np.inf).min())
        lowest, last = (lowest, last) if least == lowest else (least, len(logits))
    return lowest, last


def _crossing(weights: Tensor, scratch: Tensor, top_p: float) -> tuple[np.float32, Ids, int]:
    """The weight at which the mass reaches `top_p` of all, the tokens that have it, and how many of them are needed.

    About two thousand of the largest weights are tried first, which are enough for most distributions of a text. Every
    64th weight, sorted, says where those begin; and otherwise, between which two weights the one that is asked for is
    likely to lie. Only what lies between is sorted.
    """
    own, total = weights.numpy(), float(weights.sum())
    bound, grid = top_p * total, np.sort(own[::64])[::-1]
    upper, lower, before = -1, min(32, len(grid) - 1), 0.0
    between = np.flatnonzero(own > grid[lower])
    if (first := float(own[between].sum(dtype=np.float64))) < bound and grid[lower] > 0:
        upper, lower, before = lower, len(grid), first
        rest = grid[upper:].cumsum()
        guess = upper + int(np.searchsorted(rest, (bound - first) / max(total - first, 1e-30) * rest[-1]))
        likely = [guess + 48, guess - 48]  # three standard deviations
        while lower - upper > 50:
            at = likely.pop() if likely else (upper + lower) // 2
            if upper < at < lower:
                mass = float(torch.ops.aten.threshold.out(weights, float(grid[at]), 0.0, out=scratch).sum())
                if mass < bound:
                    upper, before = at, mass
                else:
                    lower = at
        between = np.flatnonzero((own <= grid[upper]) & (own > (grid[lower] if lower < len(grid) else 0)))
    values = own[between]
    ordered = np.sort(values)[::-1]
    at = min(int(np.searchsorted(before + ordered.cumsum(dtype=np.float64), bound)), len(ordered) - 1)
    edge = ordered[at]
    return edge, between[values == edge], at + 1 - int((ordered > edge).sum())


def _cut(logits: Floats, weights: Tensor, edge: np.float32, tied: Ids, count: int) -> tuple[float, int]:
    """Make weights below `edge`, and all but `count` of those `tied` with it, 0; the last token's logit, and its id."""
    own = weights.numpy()
    kept = tied[np.argsort(-logits[tied], kind="stable")][:count]  # weights may be equal where logits are not
    threshold_(weights, float(edge), 0.0)
    own[kept] = edge
    return float(logits[kept[-1]]), int(kept[-1])
