"""What lasts a block lies in memory that all blocks share: bounded by the largest block, however many shapes come."""

from __future__ import annotations

import gc
import random
import types
import unittest.mock
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from engines.buffers import Arena, size_of, to_device, views
from mtad import LLM, DecodingParams, RuntimeConfig
from runtime.pair import open_pair

SMALL = 2**16


class Two(NamedTuple):
    left: torch.Tensor
    right: tuple[torch.Tensor, torch.Tensor | None]


def example(columns: int) -> Two:
    return Two(torch.arange(columns), (torch.rand(3, columns).t() > 0.5, None))


def test_views_are_shaped_like_what_they_are_for_aligned_and_apart() -> None:
    like = example(5)
    memory = torch.zeros(size_of(like), dtype=torch.uint8)
    made = views(like, memory)
    assert type(made) is Two
    assert made.right[1] is None
    for view, tensor in zip((made.left, made.right[0]), (like.left, like.right[0]), strict=True):
        assert (view.shape, view.dtype) == (tensor.shape, tensor.dtype)
        assert view.is_contiguous()
        assert (view.data_ptr() - memory.data_ptr()) % 64 == 0
        view.fill_(1)
    assert made.left.tolist() == [1] * 5


def test_an_arena_gives_every_shape_the_same_memory_and_grows_by_half_at_least() -> None:
    arena = Arena()
    first, second = arena.view_like(example(100)), arena.view_like(example(90))
    assert first.left.data_ptr() == second.left.data_ptr()
    sizes = {len(arena.bytes(size).untyped_storage()) for size in range(1, 100_000, 1000)}
    assert sum(sizes) <= 3 * max(sizes)


def held(roots: Iterable[object], known: frozenset[int] = frozenset()) -> dict[int, int]:
    """Bytes of every tensor's memory that can be reached from `roots`, by address; without `known`."""
    seen: set[int] = set()
    waiting, found = list(roots), dict[int, int]()
    while waiting:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, (type, types.ModuleType, types.FunctionType, str, int, float)):
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            if storage.data_ptr() not in known:
                found[storage.data_ptr()] = storage.nbytes()
        else:
            waiting += gc.get_referents(value)
    return found


@pytest.mark.slow
def test_the_memory_of_blocks_is_that_of_the_largest_however_many_shapes_there_were(
    pair_folders: Callable[[str], Path],
) -> None:
    chance, pair = random.Random(5), open_pair(pair_folders("onnx"), RuntimeConfig(threads=1))
    rows = pair.target.spec.rows
    largest = DecodingParams(
        method="mmtad", draft_len=8, beam_width=8, top_k=0, max_tokens=8, seed=1, repetition_penalty=1.1
    )

    def used(batches: Iterable[list[DecodingParams]]) -> int:
        """Bytes that decoding these batches, one after another, leaves held."""
        fresh = LLM(pair, RuntimeConfig(prefix_tokens=0, max_draft_len=8, max_beam_width=8))
        roots = fresh.loop, pair.target, pair.auxiliary
        before = frozenset(held(roots))
        for batch in batches:
            fresh.generate([[3 + chance.randrange(200) for _ in range(chance.randint(2, 90))] for _ in batch], batch)
        return sum(held(roots, before).values())

    def anything() -> DecodingParams:
        return DecodingParams(
            method=chance.choice(["sample", "speculative", "mtad", "mmtad"]),
            draft_len=chance.randint(1, 8),
            beam_width=chance.randint(1, 8),
            top_k=chance.choice([0, 0, 5, 20]),
            temperature=chance.choice([0.0, 1.0]),
            max_tokens=chance.randint(1, 2),
            repetition_penalty=chance.choice([1.0, 1.2]),
            seed=chance.getrandbits(30),
        )

    one = used([[largest] * rows])
    assert one > 4 * SMALL
    many = used([anything() for _ in range(chance.randint(1, rows))] for _ in range(50))
    assert many <= 3 * one + 2 * SMALL


def test_numbers_of_numpy_are_pinned_once_they_are_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.11 refuses to make a pinned tensor of them: "Can't pin tensor constructed from numpy"."""
    pinned = unittest.mock.Mock(side_effect=lambda tensor: tensor)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pinned(self))
    monkeypatch.setattr(torch.Tensor, "to", lambda self, device, non_blocking: self)
    assert to_device(np.arange(3), torch.device("cuda")).tolist() == [0, 1, 2]
    pinned.assert_called_once()
