"""The cache of ONNX Runtime on the CPU, whose rows have as many columns as the longest of them needs."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
import torch

from engines.base import KV_PAGE
from engines.cache.columns import ColumnCache
from engines.folder import read_spec
from engines.onnx.engine import OnnxRuntimeEngine, without_slices
from tests.support.mock_engine import mock_spec
from tests.support.steps import columns_of, make_step, some_tokens


@pytest.fixture
def folder(pair_folders: Callable[[str], Path]) -> Path:
    return pair_folders("onnx") / "target"


@pytest.fixture
def packed(folder: Path) -> OnnxRuntimeEngine:
    return OnnxRuntimeEngine(folder, read_spec(folder), 1, packed=True)


def test_attention_reads_the_cache_and_no_copy_of_it(folder: Path) -> None:
    graph = onnx.load_from_string(without_slices(folder / "model.onnx")).graph
    cache = {value.name for value in graph.output if value.name.startswith("present_")}
    readers = [node.op_type for node in graph.node for name in node.input if name in cache]
    assert readers == ["Attention"] * len(cache)


@pytest.mark.parametrize("seed", range(3))
def test_rows_that_come_go_and_move_have_the_bits_of_rows_of_the_whole_capacity(
    folder: Path, packed: OnnxRuntimeEngine, seed: int
) -> None:
    whole = OnnxRuntimeEngine(folder, packed.spec, 1)
    engines, prefixes = (whole, packed), [engine.cache.prefix_cache(256) for engine in (whole, packed)]
    rows, capacity, choose = packed.spec.rows, packed.spec.capacity, random.Random(seed)
    held, lengths = [0] * rows, set()
    for number in range(100):
        row = choose.randrange(rows)
        what = choose.choice(
            ["prompt", "prompt", "decode", "decode", "decode", "free", "copy", "cut", "move", "prefix"]
        )
        if what == "prompt":
            tokens = some_tokens(number, choose.randint(2, capacity // 2))[None]
            if held[row] + tokens.shape[1] > capacity:
                held[row] = 0
            steps, held[row] = [make_step(tokens, [held[row]], first_row=row, keep=[0])], held[row] + tokens.shape[1]
        elif what == "decode" and max(held) + 3 <= capacity:
            some = choose.choice([2, rows])
            tokens = torch.stack([some_tokens(number + at, 3) for at in range(some)])
            steps, held = [make_step(tokens, held[:some])], [n + 3 * (at < some) for at, n in enumerate(held)]
        else:
            steps = []
            for engine, kept in zip(engines, prefixes, strict=True):
                if what == "free":
                    engine.cache.release(row)
                elif what == "copy":
                    engine.cache.copy(row, (row + 1) % rows, held[row])
                elif what == "cut":
                    engine.cache.clear(row, held[row] // 2)
                elif what == "move" and min(held) > 8:
                    engine.cache.keep(torch.tensor([[7, 6]] * rows), torch.tensor([[1, 2]] * rows))
                elif what == "prefix":
                    kept.store(row, tuple(range(held[row])))
                    kept.restore((row + 1) % rows, tuple(range(held[row])))
            if what == "copy":
                held[(row + 1) % rows] = held[row]
            elif what == "prefix":
                held[(row + 1) % rows] = held[row] // KV_PAGE * KV_PAGE
            elif what in ("free", "cut"):
                held[row] = held[row] // 2 if what == "cut" else 0
        for step in steps:
            assert torch.equal(packed.step(step), whole.step(step))
        lengths.add(packed.cache.kv.shape[4])
        for at, count in enumerate(held):
            columns = [columns_of(engine)[:, :, at, :, :count] for engine in engines]
            assert torch.equal(*columns), what
    assert len(lengths) > 1


def test_what_is_not_a_number_does_not_come_back_with_the_columns_that_held_it(packed: OnnxRuntimeEngine) -> None:
    packed.step(make_step(some_tokens(0, 200)[None], [0], first_row=1, keep=[]))
    packed.cache.kv[:, :, 1] = torch.nan
    packed.cache.clear(1)
    packed.step(make_step(some_tokens(1, 10)[None], [0], keep=[]))
    assert packed.cache.kv.shape[4] == KV_PAGE
    assert packed.step(make_step(some_tokens(2, 190)[None], [10])).isfinite().all()
    assert packed.cache.kv.isfinite().all()


def test_what_a_released_row_held_is_gone_when_it_is_used_again() -> None:
    cache = ColumnCache(mock_spec(2))
    cache.kv[:, :, 1] = torch.nan
    cache.release(1)
    assert not cache.kv.any()


def test_a_prompt_beside_a_longer_row_takes_the_columns_that_it_needs(packed: OnnxRuntimeEngine) -> None:
    packed.step(make_step(some_tokens(0, 240)[None], [0], first_row=3, keep=[]))
    prompt = make_step(some_tokens(1, 10)[None], [0], keep=[])
    copy = packed.cache.prepare(prompt)
    assert copy is not None
    assert (copy.shape[4], packed.cache.kv.shape[4]) == (KV_PAGE, 256)
    packed.step(prompt)
    assert packed.cache.kv.shape[4] == 256


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_rows_keep_their_columns_where_others_need_more_or_fewer(dtype: str) -> None:
    spec = replace(mock_spec(3), dtype=dtype, kv_heads=2, head_dim=5, capacity=256)
    cache = ColumnCache(spec, packed=True)
    cache._used[:2] = 60, 9
    cache._lay_out(KV_PAGE)
    held = torch.randn(cache.kv[:, :, :2].shape).to(cache.kv.dtype)
    cache.kv[:, :, :2] = held
    for columns in (192, 256, 128, 64):
        cache._lay_out(columns)
        assert torch.equal(cache.kv[:, :, :2, :, :60], held[..., :60, :])
        assert not cache.kv[:, :, :2, :, 60:].any()
        cache.kv[:, :, :2, :, 60:] = 7


def test_logits_of_prompts_are_not_kept(packed: OnnxRuntimeEngine) -> None:
    prompt = make_step(some_tokens(0, 10)[None], [0])
    logits, masks = weakref.ref(packed.step(prompt)), weakref.ref(prompt.mask)
    del prompt
    assert logits() is None
    assert masks() is None
