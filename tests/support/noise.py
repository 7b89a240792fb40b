"""The random numbers of a block."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mtad.random import Noise, fill_noise


def draw_noise(keys: Sequence[tuple[int, int]], draft_len: int, width: int) -> Noise:
    """Those of (seed, block index) of each of R rows."""
    noise = Noise.empty(len(keys), draft_len, width)
    fill_noise(np.array(keys, np.uint64), noise)
    return noise
