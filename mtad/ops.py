"""Operations that a graph is exported with in another form than torch runs them in; both compute the same.

An exporter that traces `mtad` keeps what Python decides: a branch on a size, a cached constant, a sum in torch's own
order. Each such decision is made here, so no other module of `mtad` asks whether it is being exported.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from itertools import accumulate
from typing import Any, ParamSpec

import torch
from torch import Tensor
from torch.nn.functional import pad

P = ParamSpec("P")


def constant(make: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """A tensor that depends on sizes and device alone is made once and kept; a graph makes its own."""
    kept = lru_cache(maxsize=1024)(make)

    @wraps(make)
    def found(*args: P.args, **kwargs: P.kwargs) -> Tensor:
        one: Callable[..., Tensor] = make if torch.compiler.is_exporting() else kept
        return one(*args, **kwargs)

    return found


@constant
def index(size: int, device: torch.device, step: int = 1) -> Tensor:
    """0, step, 2 step, ..: int64 [size]."""
    return torch.arange(size, device=device) * step


@constant
def depths(levels: int, width: int, device: torch.device) -> Tensor:
    """Depth of a tree's root, 0, and of each of its nodes: int64 [1 + levels * width]."""
    nodes = torch.arange(levels * width, device=device)
    return pad(nodes // width + 1, (1, 0))


def flat(values: Tensor) -> Tensor:
    """[R, A, B] as [R, A B]; exported, without the arithmetic of shapes."""
    if not torch.compiler.is_exporting():
        return values.flatten(1)
    shape = (values.shape[0], values.shape[1] * values.shape[2])
    return torch.onnx.ops.symbolic("Reshape", (values, torch.tensor([0, -1])), dtype=values.dtype, shape=shape)


def take_slots(values: Tensor, slots: Tensor) -> Tensor:
    """Entries `slots` int64 [R, W] of `values` [R, B, X], row by row: [R, W, X]."""
    shape = (*slots.shape, values.shape[2])
    if not torch.compiler.is_exporting():
        return values.gather(1, slots[:, :, None].expand(shape))
    attributes: dict[str, Any] = {"batch_dims": 1}
    return torch.onnx.ops.symbolic("GatherND", (values, slots[:, :, None]), attributes, dtype=values.dtype, shape=shape)


def running_sum(values: Tensor) -> Tensor:
    """Running sum over the last axis, rounded at every step: as the operator CumSum adds; torch's cumsum does not."""
    if torch.compiler.is_exporting():
        return values.cumsum(-1)
    return torch.stack(list(accumulate(values.unbind(-1), torch.add)), -1)


def total(values: Tensor) -> Tensor:
    """Sum over the last axis, [..., 1]: entry by entry, so that zeros behind the others do not change its bits."""
    return values.cumsum(-1)[..., -1:]


def log_total(values: Tensor) -> Tensor:
    """Logarithm of the sum of exponentials over the last axis, [..., 1], added up as `total` does; -inf for none."""
    largest = values.amax(-1, keepdim=True).clamp(min=torch.finfo(values.dtype).min)
    return largest + total((values - largest).exp()).log()


def log(values: Tensor) -> Tensor:
    """Logarithms of [..., 1], the same bits wherever in the tensor a value is.

    Compiled, a vectorised logarithm rounds otherwise than the scalar one that ends a tensor of odd size, so each value
    fills a vector of its own.
    """
    return (values * values.new_ones(16)).log()[..., :1] if torch.compiler.is_exporting() else values.log()


def largest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """`values.topk(count)` over the last axis, in two passes where that is faster: large vocabularies, many rows.

    The axis is laid out as a table of 128 columns. The largest values lie in the columns with the largest maxima, and
    column maxima are vectorised, where torch's CPU `topk` compares one value at a time.
    """
    columns = 128
    if torch.compiler.is_exporting() or values.numel() < 2**17 or values.shape[-1] % columns or count > columns // 2:
        found = values.topk(count, dim=-1)
        return found.values, found.indices
    table = torch.unflatten(values, -1, (-1, columns))
    best = table.amax(-2).topk(count, dim=-1).indices
    picked = table.gather(-1, best.unsqueeze(-2).expand(*table.shape[:-1], count)).flatten(-2)
    found = picked.topk(count, dim=-1)
    return found.values, found.indices // count * columns + best.gather(-1, found.indices % count)


def missing(wanted: int, available: int) -> int:
    """How many of `wanted` candidates there are not. Graphs are only given batches that lack none."""
    return 0 if torch.compiler.is_exporting() else max(0, wanted - available)
