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


def softmax(logits: Floats, scale: float) -> tuple[Tensor, float, float]:
    """Probabilities of scaled logits [V], the largest logit, and its probability.

    The probabilities are blocks of this thread's `scratch`, so they last until it is used again.
    """
    (values, each), given = scratch(len(logits)), torch.from_numpy(logits)
    torch.softmax(given if scale == 1 else torch.mul(given, scale, out=values), 0, out=values)
    best = int(logits.argmax())
    return each, float(logits[best]), float(values[best])


def _weigh(logits: Floats, largest: float, scale: float, out: Floats | None = None) -> Floats:
    """exp(scale (logits - largest)); numpy takes half the time of torch, and less where results are denormal."""
    values = np.subtract(logits, np.float32(largest), out=out)
    if scale != 1:
        np.multiply(values, np.float32(scale), out=values)
    return np.exp(values, out=values)


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

    def weigh(distributions: Iterator[tuple[int, int]]) -> None:
        for row, at in distributions:
            here, own, (scale, *_, greedy) = (row, at), given[row, at], asked[row]
            weights, largest[here], peak = softmax(own, scale)
            total[here] = 1 / peak
            blocks[here] = (weights.amax(-1) if greedy else weights.sum(-1)).numpy() / peak

    free: list[tuple[int, int]] = []
    for row, at in (wanted & rows.tabulated[:, None]).nonzero().tolist():
        here, own, (scale, top_k, top_p, min_p, greedy) = (row, at), given[row, at], asked[row]
        top = float(own.max()) if top_k < size or top_p < 1 or min_p > 0 else math.nan
        largest[here] = top
        if not math.isfinite(top):
            free.append(here)
        elif top_k == size and top_p >= 1:
            token, weight, lowest[here], last[here] = _likely(own, top, scale, min_p)
            block, mass = token // BLOCK, np.zeros(blocks.shape[-1], np.float32)
            (np.maximum if greedy else np.add).at(mass, block, weight)
            blocks[here], total[here] = mass, weight.sum()
        else:
            values, each = scratch(size)
            _weigh(own, top, scale, values.numpy())
            lowest[here], last[here] = _filter(own, values, top_k, top_p, min_p)
            blocks[here] = (each.amax(-1) if greedy else each.sum(-1)).numpy()
            total[here] = values.sum() if greedy else blocks[here].sum()
    share(weigh, free)
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


def _likely(logits: Floats, largest: float, scale: float, min_p: float) -> tuple[Ids, Floats, float, int]:
    """The tokens that min-p alone keeps, and their weights; the smallest logit of them, and the last that has it."""
    least = largest + (math.log(min_p) - 1e-4) / scale
    ids = np.flatnonzero(logits >= least - 1e-6 * abs(least))  # more than it keeps, whatever is rounded
    weights = _weigh(logits[ids], largest, scale)
    kept = weights >= np.float32(min_p)
    ids, weights = ids[kept], weights[kept]
    own = logits[ids]
    lowest = own.min()
    return ids, weights, float(lowest), int(ids[own == lowest][-1])


def _filter(logits: Floats, values: Tensor, top_k: int, top_p: float, min_p: float) -> tuple[float, int]:
    """Make the weights of dropped tokens 0; the smallest logit that is kept, and the last token that has it."""
    last = -math.inf, len(logits)
    if top_k < len(logits):
        last = _cut(logits, values, top_k, None, 0.0)
    if top_p < 1 or min_p > 0:
        total = float(values.sum())
        floor = float(np.nextafter(np.float32(min_p), np.float32(0)))
        last = _cut(logits, values, top_p * total if top_p < 1 else math.inf, total, floor)
    return last


def _cut(logits: Floats, values: Tensor, bound: float, total: float | None, floor: float) -> tuple[float, int]:
    """`_filter` to the shortest prefix whose mass reaches `bound`, or else all, of the weights above `floor`.

    Only weights near the last one's are sorted. Every 64th weight, sorted, says where these are likely to lie: what is
    left behind the prefix has many tokens, so a sample tells its mass well. Where it does not, more are sorted.

    Args:
        total: sum of the weights; None if `bound` is a number of tokens rather than a mass.
    """
    weights = values.numpy()
    edges, part, before = [math.inf, math.inf, floor, floor], 1, 0.0
    if bound < math.inf:
        grid = np.append(np.sort(weights[::64])[::-1], np.float32(0))
        size = len(grid) - 1
        if total is None:
            upper, lower = int(bound / 73), int(bound / 56)
        else:
            behind = (total - bound) / 64
            upper, lower = size - grid[::-1].cumsum().searchsorted((behind * 1.15, behind * 0.87))
        edges[2] = max(floor, float(grid[min(lower + 8, size)]))
        if upper > 24:
            edges[1] = max(floor, float(grid[upper - 8]))
            above = threshold(values, edges[1], 0.0)
            before = float(above.count_nonzero() if total is None else above.sum())
            if before >= bound or edges[1] == floor:
                part, before = 0, 0.0
    while True:
        top, bottom = edges[part : part + 2]
        likely = weights > bottom
        between = np.flatnonzero(likely if top == math.inf else likely & (weights <= top))
        own = weights[between]
        mass = len(own) if total is None else float(own.sum(dtype=np.float64))
        if before + mass >= bound or bottom == floor:
            break
        part, before = part + 1, before + mass
    ordered = np.sort(own)[::-1]
    at = (
        int(bound - before) - 1 if total is None else int(ordered.cumsum(dtype=np.float64).searchsorted(bound - before))
    )
    at = min(at, len(own) - 1)
    edge = ordered[at]
    tied = between[own == edge]
    tied = tied[np.argsort(-logits[tied], kind="stable")]  # weights may be equal where logits are not
    wanted = at + 1 - np.count_nonzero(ordered > edge)
    threshold_(values, float(np.nextafter(edge, np.float32(0))), 0.0)
    weights[tied[wanted:]] = 0
    return float(logits[tied[wanted - 1]]), int(tied[wanted - 1])
