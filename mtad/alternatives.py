"""The target's likeliest tokens at each emitted position, for requests that ask to see them."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad

from mtad.distribution import largest


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
