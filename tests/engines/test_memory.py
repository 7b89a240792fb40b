"""The memory budget: rows from a size, a size from rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from engines.memory import format_bytes, parse_bytes
from mtad import LLM, RuntimeConfig
from mtad.errors import InvalidInput

pytestmark = pytest.mark.slow


def test_the_budget_counts_what_is_allocated(pair_folders: Callable[[str], Path]) -> None:
    folder = pair_folders("onnx")
    llm = LLM(folder, RuntimeConfig(threads=1, prefix_tokens=192))
    memory, engines = llm.memory, (llm.pair.target, llm.pair.auxiliary)
    assert memory.rows * memory.row == sum(engine.cache.kv.nbytes for engine in engines)
    prefixes = llm.loop.caches.prefixes
    assert prefixes is not None
    assert memory.prefixes == sum(cast(Any, cache)._pool.nbytes for cache in prefixes)
    stored = [folder / name / file for name in ("target", "auxiliary") for file in ("model.onnx", "model.onnx.data")]
    assert memory.weights == sum(path.stat().st_size for path in stored)
    assert memory.total == memory.weights + memory.prefixes + memory.rows * (memory.row + memory.logits)
    assert f"{memory.rows} rows x {memory.capacity} columns" in str(memory)


@pytest.mark.parametrize("rows", [1, 9])
def test_a_size_gives_the_rows_that_fit_it(pair_folders: Callable[[str], Path], rows: int) -> None:
    need = LLM(pair_folders("onnx"), RuntimeConfig(threads=1, rows=rows)).memory.total
    fitting = LLM(pair_folders("onnx"), RuntimeConfig(threads=1, memory=need))
    assert fitting.memory.rows == fitting.pair.target.spec.rows == rows == fitting.pair.target.cache.kv.shape[2]
    assert fitting.loop.scheduler.rows == rows
    assert LLM(pair_folders("onnx"), RuntimeConfig(threads=1, memory=need + fitting.memory.row)).memory.rows == rows
    for asked in (1, 12):
        both = LLM(pair_folders("onnx"), RuntimeConfig(threads=1, rows=asked, memory=need))
        assert both.memory.rows == min(asked, rows)


def test_a_size_that_holds_no_row_is_refused_with_the_size_one_takes(pair_folders: Callable[[str], Path]) -> None:
    need = LLM(pair_folders("onnx"), RuntimeConfig(threads=1, rows=1)).memory.total
    with pytest.raises(InvalidInput, match=f"^memory .*weights and one row take {format_bytes(need)}"):
        LLM(pair_folders("onnx"), RuntimeConfig(memory=need - 1))


@pytest.mark.parametrize(
    ("text", "size"), [(5, 5), ("5", 5), ("1KiB", 1024), ("1.5 GB", 3 * 2**29), ("2g", 2**31), ("7MiB", 7 * 2**20)]
)
def test_sizes_are_bytes_or_powers_of_1024(text: int | str, size: int) -> None:
    assert parse_bytes(text) == size
    for nothing in ("much", True):
        with pytest.raises(InvalidInput, match="memory = "):
            parse_bytes(nothing)


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (200 * 2**20, "200.0 MiB")]
)
def test_sizes_are_shown_with_their_unit(size: int, text: str) -> None:
    assert format_bytes(size) == text
