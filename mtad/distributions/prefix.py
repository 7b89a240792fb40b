"""Which tokens a filter keeps, without a sort of the vocabulary.

On a device by bisection on the logit of the last one; on the host by sorting a sample, and then the tokens near that
one.

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
Tokens = tuple[Ids, Floats]
"""Ids, ascending, and their weights."""
T = TypeVar("T")

STEP = 64
"""Every so many tokens are a sample of them."""

SLACK, MARGIN = 1.15, 8
"""By which share, and by how many of the sample besides, its estimate may be wrong. If it is more, that costs time."""


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


def softmax(logits: Floats, largest: float, scale: float) -> tuple[Tensor, Tensor]:
    """Probabilities of scaled logits [V], and the same in blocks: this thread's `scratch`, until it is used again."""
    (values, each), given = scratch(len(logits)), torch.from_numpy(logits)
    if scale != 1:
        given = torch.sub(given, largest, out=values).mul_(scale)  # the other way round, digits would be lost
    torch.softmax(given, 0, out=values)
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
            own, (*asked_for, greedy), mass = given[here], asked[here[0]], blocks[here]
            largest[here], peak, each, tokens = _kept(own, *asked_for)
            total[here] = 0
            if each is not None:
                mass[:] = (each.amax(-1) if greedy else each.sum(-1)).numpy()
                total[here] = float(each.sum()) if tokens else 1
            if tokens:
                ids, weights = tokens
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


def _kept(
    logits: Floats, scale: float, top_k: int, top_p: float, min_p: float
) -> tuple[float, float, Tensor | None, Tokens | None]:
    """What a filter keeps of a distribution, given by logits [V].

    Top-p without top-k needs the sum over all tokens, hence a softmax; otherwise tokens are cut by their logits first.

    Returns:
        The largest logit, and its weight; weights in blocks [blocks, BLOCK], 0 for tokens that are dropped or listed;
        and listed tokens. A kept token is in one of the last two, either of which may be None.
    """
    best, size = int(logits.argmax()), len(logits)
    largest = float(logits[best])
    finite = math.isfinite(largest)
    if finite and (top_k < size or (top_p >= 1 and min_p > 0)):
        return largest, 1.0, None, _by_logits(logits, largest, scale, top_k, top_p, min_p)
    values, each = softmax(logits, largest, scale)
    peak = float(values[best])
    if top_p >= 1 or not finite:
        return largest, peak, each, None
    wide, tokens = _by_mass(logits, values, top_p, min_p * peak)
    return largest, peak, each if wide else None, tokens


def _by_logits(logits: Floats, largest: float, scale: float, top_k: int, top_p: float, min_p: float) -> Tokens:
    """The tokens that top-k or min-p, and then top-p, keep; exp(scale (logit - largest)) is their weight.

    The weight of no other token is needed.
    """
    if top_k < len(logits):
        ordered = np.sort(logits[::STEP])
        at = len(ordered) - 1 - MARGIN - int(top_k / STEP * SLACK)
        ids = np.flatnonzero(logits >= ordered[at]) if at >= 0 else np.arange(0)
        ids = ids if len(ids) >= top_k else np.arange(len(logits))
        ids = ids[_leading(logits[ids], top_k)]
    else:
        least = largest + (math.log(min_p) - 1e-4) / scale
        ids = np.flatnonzero(logits >= least - 1e-6 * abs(least))  # more than it keeps, whatever is rounded
    weights = np.exp((logits[ids] - np.float32(largest)) * np.float32(scale))
    kept = (weights > 0) & (weights >= np.float32(min_p))
    if top_p < 1:
        kept &= _nucleus(logits[ids], weights, top_p * float(weights.sum(dtype=np.float64)))
    return ids[kept], weights[kept]


def _by_mass(logits: Floats, values: Tensor, top_p: float, least: float) -> tuple[bool, Tokens]:
    """The tokens that top-p keeps, but none whose probability is below `least`.

    Only those near the last one's are sorted, with probabilities in (bottom, top]. A sorted sample says where these are
    likely to lie: what is left behind the prefix has many tokens, so a sample tells its mass well. Where it does not,
    more are sorted.

    Args:
        values: probabilities [V]; afterwards, 0 but for tokens above `top`, if there are any.

    Returns:
        Whether there are tokens above `top`; the kept ones of those that were sorted.
    """
    weights, total = values.numpy(), float(values.sum())
    floor, bound = float(np.nextafter(np.float32(least), np.float32(0))), top_p * total
    ordered = np.sort(weights[::STEP])
    behind = (total - bound) / STEP
    low, high = ordered.cumsum().searchsorted((behind / SLACK, behind * SLACK)) + np.array((-MARGIN, MARGIN))
    bottom = max(floor, float(ordered[low])) if low >= 0 else floor
    top, above = math.inf, 0.0
    if high + 2 * MARGIN < len(ordered) and ordered[high] > bottom:
        top = float(ordered[high])
        above = float(threshold(values, top, 0.0).sum())
        if above >= bound:
            top, above = math.inf, 0.0
    for edge in (bottom, floor):
        likely = weights > edge
        ids = np.flatnonzero(likely if top == math.inf else likely & (weights <= top))
        own = weights[ids]
        if above + own.sum(dtype=np.float64) >= bound:
            break
    kept = _nucleus(logits[ids], own, bound - above)
    if top < math.inf:
        threshold_(values, top, 0.0)
    return top < math.inf, (ids[kept], own[kept])


def _nucleus(logits: Floats, weights: Floats, bound: float) -> npt.NDArray[np.bool_]:
    """Which are the shortest prefix whose mass reaches `bound`; all, if theirs does not."""
    mass = np.sort(weights)[::-1].cumsum(dtype=np.float64)
    return _leading(logits, int(mass.searchsorted(bound)) + 1)


def _leading(logits: Floats, count: int) -> npt.NDArray[np.bool_]:
    """Which are the `count` largest, of equal ones the first."""
    edge = np.partition(logits, -count)[-count] if count < len(logits) else -math.inf
    kept = logits >= edge
    if (surplus := np.count_nonzero(kept) - count) > 0:
        kept[np.flatnonzero(logits == edge)[-surplus:]] = False
    return kept
