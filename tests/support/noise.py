"""The noise of one block, in memory of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np
import torch

from mtad.noise import device as device_noise
from mtad.noise.host import Draws, Floats, LevelNoise, Noise, gumbel_noise, node_noise, table_noise
from mtad.params import DecodingParams
from mtad.rows import Shape
from mtad.stacking import block_shape


def draw_noise(
    params: Sequence[DecodingParams],
    keys: Sequence[tuple[int, int]],
    shape: Shape,
    vocab_size: int,
    device: torch.device | str = "cpu",
) -> Noise:
    """Of a shape at least as large as each request's own; see `mtad.noise.host.Draws`."""
    uniform = np.zeros((shape.draft_len, len(params)), dtype=np.float32)
    gumbel = np.zeros((shape.draft_len, len(params), shape.width, gumbel_noise(shape)), dtype=np.float32)
    table = np.zeros((shape.draft_len, len(params), shape.width, table_noise(shape)), dtype=np.float32)
    accept = np.zeros((len(params), shape.draft_len), dtype=np.float32)
    bonus = np.zeros(len(params), dtype=np.float32)
    nodes = np.zeros((len(params), *node_noise(shape)), dtype=np.float32)
    Draws(params, vocab_size, shape.listed).into(uniform, gumbel, table, accept, bonus, nodes, keys)
    levels = (
        LevelNoise(*(torch.from_numpy(x).to(device) for x in level))
        for level in zip(uniform, gumbel, table, strict=True)
    )
    others = (torch.from_numpy(x).to(device) for x in (accept, bonus, nodes.reshape(len(params), -1)))
    return Noise(tuple(levels), *others)


class DeviceDraws(Draws):
    """What a batch draws on a device, as the host draws it."""

    def __init__(self, params: Sequence[DecodingParams], vocab_size: int, listed: int) -> None:
        self._shape = block_shape(params, vocab_size, listed)
        self._scales = torch.tensor([device_noise.scale(p.temperature) for p in params])

    def into(
        self,
        uniform: Floats,
        gumbel: Floats,
        table: Floats,
        accept: Floats,
        bonus: Floats,
        nodes: Floats,
        keys: Sequence[tuple[int, int]],
    ) -> None:
        states = torch.tensor([device_noise.begin(*key) for key in keys])
        noise = device_noise.draw(states, self._scales, self._shape)
        for level, own in enumerate(noise.levels):
            uniform[level], gumbel[level], table[level] = own
        accept[:], bonus[:], nodes[:] = noise.accept, noise.bonus, noise.nodes.reshape(nodes.shape)


@contextmanager
def device_numbers() -> Iterator[None]:
    """Inside, loops on the host draw the numbers that a device draws."""
    with patch("runtime.decoder.batch_builder.Draws", DeviceDraws):
        yield
