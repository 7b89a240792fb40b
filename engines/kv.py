"""Moving and writing columns of a KV cache, as every engine keeps it (`Engine.kv`)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def move_columns(kv: Tensor, source: Tensor, to: Tensor) -> None:
    """Move cache columns within each row 0 .. R-1; all sources are read before anything is written.

    Args:
        kv: [layers, 2, rows, kv_heads, capacity, head_dim], changed in place.
        source: int64 [R, D], columns to read.
        to: int64 [R, D], columns to write; distinct within a row.
    """
    if kv.device.type == "cpu":  # numpy moves columns several times faster than torch's indexing
        cache, rows = _bits(kv).numpy(), np.arange(source.shape[0])[:, None]
        cache[:, :, rows, :, to.numpy()] = cache[:, :, rows, :, source.numpy()]
    else:
        index_columns(kv, source, to)


def index_columns(kv: Tensor, source: Tensor, to: Tensor) -> None:
    """`move_columns` by torch's indexing, which a CUDA graph can hold."""
    at = torch.arange(source.shape[0], device=kv.device)[:, None]
    kv[:, :, at, :, to] = kv[:, :, at, :, source]


def _bits(kv: Tensor) -> Tensor:
    """The same memory; of two-byte types as int16, because numpy has no bfloat16."""
    return kv.view(torch.int16) if kv.element_size() == 2 else kv


def write_columns(kv: Tensor, new: Tensor, write_at: Tensor) -> None:
    """Write the columns of a step, for models that return them instead of writing them.

    Args:
        kv: [layers, 2, R, kv_heads, capacity, head_dim], the step's rows of the cache, changed in place.
        new: [layers, 2, R, kv_heads, S, head_dim].
        write_at: int64 [R], first column of each row.
    """
    rows, steps = new.shape[2], new.shape[4]
    columns = write_at[:, None] + torch.arange(steps, device=write_at.device)
    at = torch.arange(rows, device=write_at.device)[:, None]
    kv[:, :, at, :, columns] = new.permute(2, 4, 0, 1, 3, 5)
