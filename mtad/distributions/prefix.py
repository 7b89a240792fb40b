"""Which tokens a filter keeps, without a sort of the vocabulary: by bisection on the logit of the last one.

A filter by top-k or top-p keeps the shortest prefix of the tokens, most likely first and of equal ones the smaller id
first, whose count or mass reaches a bound.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from threading import get_ident
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import threshold, threshold_  # type: ignore[attr-defined]

from mtad.rows import BLOCK, Rows, blocks_of

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.intp]
T = TypeVar("T")

STEP = 64
"""Every so many tokens are a sample of them."""

TINY = np.finfo(np.float32).smallest_subnormal
"""The least weight of a token that can be drawn."""


_HELPER = ThreadPoolExecutor(1, "filter")
_HAS_CORES = len(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)) > 1


def share(work: Callable[[Iterator[T]], None], items: Sequence[T]) -> None:
    """Do the work on two threads, each of which takes one item after the other from the same iterator.

    That helps where they spend their time within few long calls of numpy and torch, which need no lock. Waking the
    other thread takes as long as one distribution, so few items are left to one.
    """
    rest, other = iter(items), None
    if len(items) > 4 and _HAS_CORES:
        try:
            other = _HELPER.submit(work, rest)
        except RuntimeError:  # the main thread has ended, and this one goes on: no other can be started any more
            other = None
    try:
        work(rest)
    finally:
        if other and not other.cancel():
            other.result()


@lru_cache(maxsize=8)
def _scratch(size: int, blocks: int, thread: int) -> Tensor:
    """One for each vocabulary and thread."""
    with torch.inference_mode(False):  # else nobody could write to it outside of that mode
        return torch.zeros(blocks, BLOCK)


def scratch(size: int) -> tuple[Tensor, Tensor]:
    """Memory for a distribution, [V] and the same as [blocks, BLOCK] with zeros behind it, of this thread.

    New memory would take as long as what is done there.
    """
    blocks = _scratch(size, blocks_of(size), get_ident())
    return blocks.view(-1)[:size], blocks


def softmax(logits: Floats, scale: float) -> tuple[Tensor, Tensor]:
    """Probabilities of scaled logits [V], and the same in blocks: this thread's `scratch`, until it is used again."""
    (values, each), given = scratch(len(logits)), torch.from_numpy(logits)
    torch.softmax(given if scale == 1 else torch.mul(given, scale, out=values), 0, out=values)
    return values, each


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
    given = logits.float().numpy()
    *shape, size = given.shape
    largest, lowest, last = np.zeros(shape, np.float32), np.full(shape, -np.inf, np.float32), np.full(shape, size)
    total, blocks = np.full(shape, np.inf, np.float32), np.zeros((*shape, blocks_of(size)), np.float32)
    columns = rows.inverse_temperature, rows.top_k, rows.top_p, rows.min_p, rows.greedy
    asked = list(zip(*(x.flatten().tolist() for x in columns), strict=True))

    def work(places: Iterator[tuple[int, int]]) -> None:
        for here in places:
            own, (scale, top_k, top_p, min_p, greedy), mass = given[here], asked[here[0]], blocks[here]
            best = int(own.argmax())
            top = largest[here] = float(own[best])
            peak, wide, some = 1.0, True, None
            if math.isfinite(top) and (top_k < size or (top_p >= 1 and min_p > 0)):
                wide, some = False, _by_logits(own, top, scale, top_k, top_p, min_p)
            else:
                values, each = softmax(own, scale)
                peak = float(values[best])
                if math.isfinite(top) and top_p < 1:
                    wide, some = _by_mass(own, values, top_p, min_p * peak)
            total[here] = 0
            if wide:
                mass[:] = (each.amax(-1) if greedy else each.sum(-1)).numpy()
                total[here] = float(values.sum()) if some else 1
            if some:
                ids, weights = some
                (np.maximum if greedy else np.add).at(mass, ids // BLOCK, weights)
                total[here] += weights.sum()
                likely = own[ids]
                lowest[here] = least = likely.min()
                last[here] = ids[likely == least][-1]
            mass /= peak
            total[here] /= peak

    share(work, [(row, at) for row, at in (wanted & rows.tabulated[:, None]).nonzero().tolist()])
    numbers = [torch.from_numpy(x)[:, :, None] for x in (largest, lowest, last, total)]
    return *numbers[:3], numbers[3].log(), torch.from_numpy(blocks).log() - numbers[3].log()


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


def _by_logits(
    logits: Floats, largest: float, scale: float, top_k: int, top_p: float, min_p: float
) -> tuple[Ids, Floats]:
    """The tokens that top-k or min-p, and then top-p, keep, in their order, and weights exp(scale (logit - largest)).

    No weight of another token is needed.
    """
    if top_k < len(logits):
        ids = np.flatnonzero(logits >= _edge(logits, top_k))
        ids = ids if len(ids) >= top_k else np.arange(len(logits))
        ids = ids[_leading(logits[ids], top_k)]
    else:
        least = largest + (math.log(min_p) - 1e-4) / scale
        ids = np.flatnonzero(logits >= least - 1e-6 * abs(least))  # more than it keeps, whatever is rounded
    weights = np.exp((logits[ids] - np.float32(largest)) * np.float32(scale))
    kept = weights >= max(np.float32(min_p), TINY)
    if top_p < 1:
        mass = np.sort(weights)[::-1].cumsum(dtype=np.float64)
        kept &= _leading(logits[ids], int(mass.searchsorted(top_p * mass[-1])) + 1)
    return ids[kept], weights[kept]


def _by_mass(logits: Floats, values: Tensor, top_p: float, least: float) -> tuple[bool, tuple[Ids, Floats]]:
    """The tokens that top-p keeps, but none whose probability is below `least`.

    Only those near the last one's are sorted. Every 64th, sorted, says where these are likely to lie: what is left
    behind the prefix has many tokens, so a sample tells its mass well. Where it does not, more are sorted.

    Args:
        values: probabilities [V]; afterwards, 0 but for the kept tokens above those that were sorted.

    Returns:
        Whether there are tokens above; the kept ones of those that were sorted, in their order, and their
        probabilities.
    """
    weights, total = values.numpy(), float(values.sum())
    floor, bound = float(np.nextafter(np.float32(least), np.float32(0))), top_p * total
    ordered = np.sort(weights[::STEP])
    behind = (total - bound) / STEP
    low, high = ordered.cumsum().searchsorted((0.87 * behind, 1.15 * behind))
    bottom = max(floor, float(ordered[low - 8])) if low >= 8 else floor
    top, before = math.inf, 0.0
    if high + 24 < len(ordered) and ordered[high + 8] > bottom:
        top = float(ordered[high + 8])
        before = float(threshold(values, top, 0.0).sum())
        if before >= bound:
            top, before = math.inf, 0.0
    while True:
        likely = weights > bottom
        ids = np.flatnonzero(likely if top == math.inf else likely & (weights <= top))
        own = weights[ids]
        if bottom == floor or before + own.sum(dtype=np.float64) >= bound:
            break
        bottom = floor
    mass = np.sort(own)[::-1].cumsum(dtype=np.float64)
    kept = _leading(logits[ids], int(mass.searchsorted(bound - before)) + 1)
    if top < math.inf:
        threshold_(values, top, 0.0)
    return top < math.inf, (ids[kept], own[kept])


def _edge(logits: Floats, count: int) -> float:
    """A logit that a few more than the `count` largest reach, as every 64th of them says; most often."""
    ordered = np.sort(logits[::STEP])
    behind = len(ordered) - 9 - int(count / STEP * 1.15)
    return float(ordered[behind]) if behind >= 0 else -math.inf


def _leading(logits: Floats, count: int) -> npt.NDArray[np.bool_]:
    """Which are the `count` largest, of equal ones the first."""
    edge = np.partition(logits, -count)[-count] if count < len(logits) else -math.inf
    kept = logits >= edge
    if (surplus := np.count_nonzero(kept) - count) > 0:
        kept[np.flatnonzero(logits == edge)[-surplus:]] = False
    return kept
