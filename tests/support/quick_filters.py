"""The filter kernels' stand-in for tests of what is around them: the host's filter, which is much faster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from mtad.device import launches
from mtad.device.tables import Given, Tables
from mtad.filters import filter_logits
from mtad.rows import ROW

_launch = launches.launch


def launch(kernel: str, grid: tuple[int, ...], arguments: tuple[Any, ...], **constants: Any) -> None:
    """`mtad.device.launches.launch`, but distributions are filtered by `mtad.filters.filter_logits`."""
    with torch._C.DisableTorchFunction():  # a kernel looks into its tensors, and the host does not
        if not kernel.startswith(("filter.", "cut.")) or kernel == "filter.weigh_blocks":
            _launch(kernel, grid, arguments, **constants)
        if kernel == "cut.settle_tables":
            _settle(arguments[0], arguments[2])


def _settle(tables: Tables, given: Given) -> None:
    """`mtad.device.cut_kernels.settle_tables`; what the kernels before have found is not needed."""
    logits, numbers, last = (x.numpy() for x in (tables.logits, tables.numbers, tables.last))
    of_row = given.inverse_temperature, given.top_k, given.top_p, given.min_p
    scale, top_k, top_p, min_p = (x.numpy() for x in of_row)
    vocab = logits.shape[2]
    ids, log_p, row = np.empty(vocab, np.int32), np.empty(vocab, np.float32), np.zeros(1, np.dtype((np.record, ROW)))[0]
    for r, s in np.ndindex(logits.shape[:2]):
        own = logits[r, s].astype(np.float32)
        row.temperature, row.top_k, row.top_p, row.min_p = 1 / float(scale[r]), top_k[r], top_p[r], min_p[r]
        count = filter_logits(own, row, ids, log_p)
        kept = ids[:count]
        log_total = np.nan if np.isnan(log_p[0]) else -log_p[:count].max()
        numbers[r, s] = own.max(), own[kept].min(), log_total, np.log(np.exp(own - own.max()).sum())
        last[r, s] = kept[own[kept] == numbers[r, s, 1]].max(initial=0)


@contextmanager
def quick_filters() -> Iterator[None]:
    """Inside, all filters are the host's."""
    with patch.object(launches, "launch", launch):
        yield
