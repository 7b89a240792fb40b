"""Next-token distributions after temperature, top-k and top-p, kept as their most likely tokens."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from mtad.rows import Rows


class Candidates(NamedTuple):
    """A distribution by its K most likely tokens, most likely first.

    Attributes:
        ids: int64 [..., K], distinct token ids.
        log_prob: float32 [..., K], normalised over the kept tokens; -inf for a token that was filtered out.
    """

    ids: Tensor
    log_prob: Tensor

    def at(self, tokens: Tensor) -> Tensor:
        """log-probability of `tokens` [...], -inf where the filter removed them."""
        other = self.ids != tokens.unsqueeze(-1)
        return self.log_prob.masked_fill(other, -math.inf).amax(-1)


def process(logits: Tensor, rows: Rows) -> Candidates:
    """Apply each row's temperature, then top-k, then top-p, and renormalise.

    The order and the meaning are those of the paper's code and of Hugging Face's warpers: top-p counts the mass that
    top-k left, and keeps the token that crosses `top_p`. Of tokens tied at rank k, one is kept; tied logits come in no
    particular order.

    Sums run one after the other over the sorted tokens, so a row's result does not depend, to the bit, on
    K, which other rows of the batch may have raised.

    Args:
        logits: float [R, S, V].
        rows: parameters of the R rows.

    Returns:
        Candidates of shape [R, S, K].
    """
    values, ids = largest(logits.float(), rows.rank_bias.shape[2])
    values = torch.addcmul(rows.rank_bias, values - values[..., :1], rows.inverse_temperature)
    weights = values.exp()
    mass = weights.cumsum(-1)
    dropped = mass - weights >= rows.top_p * mass[..., -1:]
    total = mass.masked_fill(dropped, 0.0).amax(-1, keepdim=True)
    return Candidates(ids, (values - _log(total)).masked_fill(dropped, -math.inf))


def _log(values: Tensor) -> Tensor:
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


def draw(ids: Tensor, weights: Tensor, noise: Tensor) -> Tensor:
    """One token a row by inversion of the cumulative distribution.

    Args:
        ids: int64 [R, K], most likely first.
        weights: float32 [R, K], >= 0, any scale, at least one positive.
        noise: uniform [0, 1) [R], a float32 below 1, so that noise x mass stays below mass; 0 takes the first token of
            positive weight, which is the most likely one.

    Returns:
        tokens int64 [R].
    """
    mass = weights.cumsum(-1)
    index = (mass <= noise[:, None] * mass[:, -1:]).sum(-1, keepdim=True)
    return ids.gather(1, index).squeeze(1)


def alternatives(logits: Tensor, path: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Likeliest tokens after the root and after each accepted node, unprocessed (temperature 1, no filter).

    Args:
        logits: the target's logits after root and nodes, float [R, 1 + N, V].
        path: int64 [R, draft_len], scored-tree node of each accepted token (`Accepted.path`).
        count: tokens a position.

    Returns:
        ids int64 and log-probabilities float32, [R, 1 + draft_len, count], likeliest first.
    """
    at = pad(path + 1, (1, 0))[:, :, None].expand(-1, -1, logits.shape[2])
    values, ids = largest(logits.gather(1, at).float().log_softmax(-1), count)
    return ids, values
