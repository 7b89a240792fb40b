"""The engine contract, held by every engine: right logits, an in-place cache, rows that do not disturb each other."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from engines.base import DTYPES, Engine, mask_length
from engines.cache.columns import column_mover
from engines.folder import open_engine
from export.verification.verify import TOLERANCE, expect, verify
from tests.support.steps import LENGTHS, change, columns_of, make_step, more_tokens, some_tokens


@pytest.fixture(scope="module")
def opened(pair_folder: Path) -> Engine:
    return open_engine(pair_folder / "target")


@pytest.fixture
def engine(opened: Engine) -> Iterator[Engine]:
    """An engine whose rows hold `LENGTHS` tokens."""
    opened.cache.reset()
    for row, length in enumerate(LENGTHS):
        opened.step(make_step(some_tokens(row, length)[None], [0], first_row=row, keep=[]))
    yield opened
    opened.cache.reset()


def assert_same(engine: Engine, ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Equal to the bit with ONNX Runtime; torch picks other kernels for other shapes, which round differently."""
    tolerance = 0.0 if engine.spec.format == "onnx" else 1e-5
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def test_logits_of_ragged_rows_with_chain_and_tree_are_the_checkpoints(
    opened: Engine, reference: LlamaForCausalLM
) -> None:
    assert verify(opened, expect(reference, opened.spec)) <= TOLERANCE["float32"]


def test_a_step_writes_its_columns_in_place_and_nothing_else(engine: Engine) -> None:
    before, address = columns_of(engine).clone(), engine.cache.kv.data_ptr()
    write_at, steps = [33, 9], 3
    engine.step(make_step(more_tokens(2, steps), write_at, first_row=1))
    assert engine.cache.kv.data_ptr() == address
    written = torch.zeros(engine.spec.rows, engine.spec.capacity, dtype=torch.bool)
    for row, start in zip((1, 2), write_at, strict=True):
        written[row, start : start + steps] = True
    changed = (columns_of(engine) != before).any(-1)
    assert torch.equal(changed.any(3).any(1).any(0).any(0), written.any(0))
    assert torch.equal(changed, written[None, None, :, None].expand_as(changed))


def test_the_cache_is_what_attention_reads(engine: Engine) -> None:
    step = make_step(more_tokens(1, 1), [70])
    first = engine.step(step)
    change(engine, 0, slice(10, 11), lambda values: values + 1.0)
    assert not torch.equal(engine.step(step), first)


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_a_rows_logits_do_not_depend_on_the_batch_or_the_mask(engine: Engine, steps: int) -> None:
    tokens = more_tokens(4, steps)
    batched = engine.step(make_step(tokens, LENGTHS))
    for row, length in itertools.product(range(4), (128, 192, 256)):
        alone = engine.step(make_step(tokens[row : row + 1], LENGTHS[row : row + 1], first_row=row, length=length))
        assert_same(engine, alone[0], batched[row])
    for rows in (2, 3):
        fewer = engine.step(make_step(tokens[:rows], LENGTHS[:rows]))
        assert_same(engine, fewer, batched[:rows])
    shortest = engine.step(make_step(tokens[1:2], LENGTHS[1:2], first_row=1))
    assert_same(engine, shortest[0], batched[1])


def test_a_rows_logits_and_cache_do_not_depend_on_the_tokens_a_step(engine: Engine) -> None:
    tokens = more_tokens(4, 5)
    batched = engine.step(make_step(tokens, LENGTHS))
    cache = columns_of(engine).clone()
    for pieces in ([1] * 5, [2, 1, 2], [3, 2]):
        for row in range(4):
            engine.cache.clear(row, 75)
        done = 0
        for size in pieces:
            logits = engine.step(make_step(tokens[:, done : done + size], [length + done for length in LENGTHS]))
            assert_same(engine, logits, batched[:, done : done + size])
            done += size
        assert_same(engine, columns_of(engine)[:, :, :, :, :75], cache[:, :, :, :, :75])


def test_kept_positions_are_those_of_the_whole_step(engine: Engine) -> None:
    tokens = more_tokens(4, 5)
    whole = engine.step(make_step(tokens, LENGTHS))
    for keep in ([4], [0, 3], [1, 2, 3]):
        assert_same(engine, engine.step(make_step(tokens, LENGTHS, keep=keep)), whole[:, keep])


def test_a_step_that_keeps_nothing_still_fills_the_cache(engine: Engine) -> None:
    tokens = more_tokens(4, 5)
    engine.step(make_step(tokens, LENGTHS))
    filled = columns_of(engine).clone()
    for row, length in enumerate(LENGTHS):
        engine.cache.clear(row, length)
    logits = engine.step(make_step(tokens, LENGTHS, keep=[]))
    assert logits.shape == (4, 0, engine.spec.vocab_size)
    assert torch.equal(columns_of(engine), filled)


def test_the_last_column_can_be_written(engine: Engine) -> None:
    capacity = engine.spec.capacity
    logits = engine.step(make_step(more_tokens(1, 4), [capacity - 4], first_row=3))
    assert logits.isfinite().all()
    assert columns_of(engine)[:, :, 3, :, capacity - 1].any()
    assert not columns_of(engine)[:, :, 3, :, LENGTHS[3] : capacity - 4].any()


def test_masked_columns_have_no_influence(engine: Engine) -> None:
    step = make_step(more_tokens(4, 2), LENGTHS)
    first = engine.step(step)
    for row, length in enumerate(LENGTHS):
        change(engine, row, slice(length + 2, None), lambda values: torch.full_like(values, 1e4))
    assert torch.equal(engine.step(step), first)


def test_mask_lengths_are_rounded_up_to_whole_blocks() -> None:
    assert [mask_length(n, 256) for n in (1, 64, 65, 250, 256, 300)] == [64, 64, 128, 256, 256, 256]


def test_engines_are_opened_with_a_zeroed_cache_of_the_size_they_say(pair_folder: Path) -> None:
    engine = open_engine(pair_folder / "auxiliary")
    spec = engine.spec
    assert columns_of(engine).shape == (spec.layers, 2, spec.rows, spec.kv_heads, spec.capacity, spec.head_dim)
    assert columns_of(engine).nbytes == spec.kv_bytes
    assert not engine.cache.kv.any()


def random_cache() -> torch.Tensor:
    return torch.randn(2, 2, 3, 2, 12, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("seed", range(5))
def test_moving_columns_copies_each_to_its_place(seed: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    source = torch.stack([torch.randperm(12, generator=generator)[:5].sort().values for _ in range(2)])
    to = source.amin(1, keepdim=True) + torch.arange(5)
    cache = random_cache().to(dtype)
    expected = cache.clone()
    for row, (columns, places) in enumerate(zip(source.tolist(), to.tolist(), strict=True)):
        for column, place in zip(columns, places, strict=True):
            expected[:, :, row, :, place] = cache[:, :, row, :, column]
    address = cache.data_ptr()
    column_mover(cache)(source, to)
    assert torch.equal(cache, expected)
    assert cache.data_ptr() == address


def test_moved_columns_keep_their_bits() -> None:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)  # every bfloat16, not-a-numbers among them
    cache = bits.view(torch.bfloat16).view(1, 2, 1, 16, 64, 32).clone()
    columns = torch.arange(32)[None]
    column_mover(cache)(columns + 32, columns)
    expected = bits.view(1, 2, 1, 16, 64, 32).clone()
    expected[..., :32, :] = expected[..., 32:, :]
    assert torch.equal(cache.view(torch.int16), expected)


def test_a_step_in_memory_that_comes_again_reads_what_is_there_now(engine: Engine) -> None:
    """An engine may keep its bindings to the tensors of a step with an `out`, never their contents."""
    tokens = more_tokens(4, 5)
    plain = make_step(tokens, LENGTHS)
    out = torch.empty(4, 5, engine.spec.vocab_size)
    kept = replace(plain, tokens=tokens.clone(), write_at=plain.write_at.clone(), out=out)
    for shift in range(3):
        kept.tokens.copy_(tokens.roll(shift, 1))
        assert_same(engine, engine.step(kept), engine.step(replace(plain, tokens=kept.tokens.clone())))
