"""Next-token distributions after temperature, top-k, top-p and min-p, kept as their most likely tokens."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from mtad.ops import index, largest, log
from mtad.rows import Rows


class Candidates(NamedTuple):
    """A distribution by its K most likely tokens, most likely first.

    Attributes:
        ids: int64 [..., K], distinct token ids.
        log_prob: float32 [..., K], normalised over the kept tokens; -inf for a token that was filtered out.
    """

    ids: Tensor
    log_prob: Tensor

    @property
    def most(self) -> Tensor:
        """log-probability of the most likely token, [...]."""
        return self.log_prob[..., 0]

    def at(self, tokens: Tensor) -> Tensor:
        """log-probability of `tokens` [...], -inf where the filter removed them."""
        other = self.ids != tokens.unsqueeze(-1)
        return self.log_prob.masked_fill(other, -math.inf).amax(-1)

    def below(self, parents: Tensor, tokens: Tensor) -> Tensor:
        """log-probability of `tokens` [R, N] after positions `parents` [R, N] of the S there are."""
        return self.pick(parents).at(tokens)

    def pick(self, at: Tensor) -> Candidates:
        """The distributions at positions `at` [R, W] of the S there are."""
        spread = at[:, :, None].expand(-1, -1, self.ids.shape[2])
        return Candidates(self.ids.gather(1, spread), self.log_prob.gather(1, spread))

    def leads(self, tokens: Tensor, count: Tensor) -> Tensor:
        """Whether `tokens` [...] are among the `count` [..., 1] most likely ones."""
        first = index(self.ids.shape[-1], tokens.device) < count[..., None]
        return ((self.ids == tokens.unsqueeze(-1)) & first).any(-1)

    def among(self, ids: Tensor, vocab: int) -> Tensor:
        """log-probability of each of `ids` [..., K'], -inf where the filter removed it; `vocab` is V."""
        dense = torch.full((*self.ids.shape[:-1], vocab), -math.inf, device=ids.device)
        return dense.scatter_(-1, self.ids, self.log_prob).gather(-1, ids)


def process(logits: Tensor, rows: Rows) -> Candidates:
    """Apply each row's temperature, then top-k, then top-p, then min-p, and renormalise.

    The order and the meaning are those of the paper's code and of Hugging Face's warpers: top-p counts the mass that
    top-k left, and keeps the token that crosses `top_p`; min-p is relative to the most likely token. Of tokens tied at
    rank k, one is kept; tied logits come in no particular order.

    Sums run one after the other over the sorted tokens, so a row's result does not depend, to the bit, on
    K, which other rows of the batch may have raised.

    Args:
        logits: float [R, S, V].

    Returns:
        Candidates of shape [R, S, K].
    """
    values, ids = largest(logits.float(), rows.rank_bias.shape[2])
    values = torch.addcmul(rows.rank_bias, values - values[..., :1], rows.inverse_temperature)
    weights = values.exp()
    mass = weights.cumsum(-1)
    dropped = (mass - weights >= rows.top_p * mass[..., -1:]) | (weights < rows.min_p)  # the first's weight is 1
    total = mass.masked_fill(dropped, 0.0).amax(-1, keepdim=True)
    return Candidates(ids, (values - log(total)).masked_fill(dropped, -math.inf))


def draw(ids: Tensor, weights: Tensor, noise: Tensor) -> Tensor:
    """One token per row, `ids` int64 [R, K], most likely first, by `invert`: int64 [R]."""
    return ids.gather(1, invert(weights, noise)).squeeze(1)


def invert(weights: Tensor, noise: Tensor) -> Tensor:
    """One entry per row by inversion of the cumulative distribution.

    Args:
        weights: float32 [R, K], >= 0, any scale, at least one positive; most likely first.
        noise: uniform [0, 1) [R], a float32 below 1, so that noise x mass stays below mass; 0 takes the first entry of
            positive weight, which is the most likely one.

    Returns:
        index of the entry, int64 [R, 1]; any below K where no weight is positive, or where one is not a number.
    """
    mass = weights.cumsum(-1)
    return (mass <= noise[:, None] * mass[:, -1:]).sum(-1, keepdim=True).clamp(max=weights.shape[1] - 1)


def alternatives(logits: Tensor, path: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Likeliest tokens after the root and after each accepted node, unprocessed (temperature 1, no filter).

    Args:
        logits: the target's logits after root and nodes, float [R, 1 + N, V].
        path: int64 [R, draft_len], scored-tree node of each accepted token (`Accepted.path`).

    Returns:
        ids int64 and log-probabilities float32, [R, 1 + draft_len, count], likeliest first.
    """
    at = pad(path + 1, (1, 0))[:, :, None].expand(-1, -1, logits.shape[2])
    values, ids = largest(logits.gather(1, at).float().log_softmax(-1), count)
    return ids, values
