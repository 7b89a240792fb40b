"""Attention of a GPU over a cache of pages: reads a row's own columns, whatever the capacity or the mask's length.

The kernels are in `engines.pytorch.attention_kernels`; this chooses their sizes and launches them. Everything they
are launched with follows from shapes, so a launch can be captured in a CUDA graph; what a row's length changes,
the programs decide.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engines.base import KV_PAGE
from mtad.device import launches
from mtad.errors import InvalidInput, imported

ATTENTION = ("sdpa", "triton")
"""Attention of the torch engine: torch's, which reads all columns of the mask; the kernels here."""
MAX_HEAD_DIM = 256
"""Largest head dimension; a wider head's running sums do not fit a program's registers."""
PROGRAMS_PER_PROCESSOR = 2
"""Programs per processor that splitting aims at."""
MIN_SPLIT_COLUMNS = 128
"""Columns of a split at least, a multiple of a tile's: a shorter one costs more to combine than it gains."""
MEMBERS, CHUNK = 4, 8
"""Queries of a program that combines splits, and splits that it adds at once."""
INTERPRETER_PROCESSORS, INTERPRETER_MEMORY = 8, 227 * 1024
"""Processors that the interpreter stands for, and bytes of shared memory of each."""


class Tile(NamedTuple):
    """Sizes of a program.

    Attributes:
        queries: rows of its tile, a power of two and at least 16, the least that tensor cores take.
        columns: of the cache that it reads at a time; divides `KV_PAGE`, so a mask's length is a multiple of it.
        warps: of 32 threads.
        stages: blocks of columns on the way from memory at a time.
    """

    queries: int
    columns: int
    warps: int
    stages: int


def tile(queries: int, head_dim: int, itemsize: int) -> Tile:
    """The tile for `queries` of one row and KV head, which may be more than one tile holds.

    Chosen by what the compiler makes of them for compute capabilities 8.0 to 12.0: no more registers than there are,
    and shared memory for one program on any, for two on those of data centers. In float32, which the tensor cores do
    not take, products are unrolled, so a tile is as small as it gets.
    """
    width, whole = padded(head_dim), itemsize == 4
    most = 16 if whole else 128 if width <= 128 else 32
    rows = next(size for size in (16, 32, 64, 128) if size >= min(queries, most))
    columns = KV_PAGE if width <= (64 if whole else 128) else 16 if whole else 32
    stages = 3 if rows * width <= 4096 and not whole else 2
    return Tile(rows, columns, 8 if rows == 128 else 4, stages)


def padded(head_dim: int) -> int:
    """Size of a head in a program: rounded up to a power of two, 16 at least."""
    return max(16, 1 << (head_dim - 1).bit_length())


def split_count(programs: int, length: int, processors: int) -> int:
    """Most splits of a row's columns: as many as leave no more than `PROGRAMS_PER_PROCESSOR` programs per processor.

    Each row's own length decides how long they are, and so how many it has. A row has the same ones whatever the mask's
    length: `MIN_SPLIT_COLUMNS` is what keeps a row from having more than the mask has room for.

    Args:
        programs: without splitting.
        length: columns of the mask.
        processors: of the device.
    """
    return max(1, min(-(-length // MIN_SPLIT_COLUMNS), PROGRAMS_PER_PROCESSOR * processors // programs))


def require(attention: str, device: torch.device, head_dim: int) -> None:
    """Refuse an attention that cannot run.

    Raises:
        InvalidInput: unknown; or for `triton`: it is not installed, the head is too wide, or the device is a CPU and
            Triton's interpreter was not asked for.
    """
    if attention not in ATTENTION:
        raise InvalidInput("attention", attention, f"known: {', '.join(ATTENTION)}")
    if attention == "sdpa":
        return
    if head_dim > MAX_HEAD_DIM:
        raise InvalidInput("attention", attention, f"heads of {head_dim} exceed the limit of {MAX_HEAD_DIM}; give sdpa")
    interpreted = kernels().INTERPRETED
    if missing := launches.missing_compiler():
        raise InvalidInput("attention", attention, f"{missing}; or give sdpa")
    if device.type != "cuda" and not interpreted:
        problem = f"runs on a GPU, not on {device.type}; give sdpa, or TRITON_INTERPRET=1 in tests"
        raise InvalidInput("attention", attention, problem)


@functools.cache
def kernels(name: str = "attention_kernels") -> ModuleType:
    """One of the modules that need Triton."""
    return imported(f"engines.pytorch.{name}", "attention", "triton", "the extra gpu installs Triton, or give sdpa")


@functools.cache
def processors(device: torch.device) -> int:
    """How many a device has."""
    if device.type != "cuda":
        return INTERPRETER_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes that a program on one of its processors may have."""
    if device.type != "cuda":
        return INTERPRETER_MEMORY
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


def contiguous_last(x: Tensor) -> Tensor:
    """The same, copied if its last axis is not contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def attend_cached(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    page_table: Tensor,
    mask: Tensor,
    write_at: Tensor,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    """Attention of a step's queries to what its rows hold: columns 0 .. write_at + S - 1, as far as `mask` shows them.

    A query that attends to nothing gets zeros. What lies behind a row's end may be anything, NaN included.

    Args:
        query: float32, float16 or bfloat16 [R, H, S, D]; D <= 256. Copied, as others are, if its last axis has gaps.
        key, value: [KV, pages x 64, D], of its dtype, the step's own included; H a multiple of KV.
        page_table: int32 [R, >= L / 64], of each row's pages among those; last axis contiguous.
        mask: bool [R, 1, S, L], L a multiple of 64; nothing behind a row's end is shown.
        write_at: int64 [R]; a row that writes behind the mask has no request and attends to nothing.
        scale: of scores.
        softcap: scores s become softcap * tanh(s / softcap).
        window: a query attends to columns greater than its position - window only.
        positions: int64 [R, S], read with a window only: no token lies in a column before its position.

    Returns:
        [R, S, H, D], contiguous, of `query`'s dtype; sums are float32.
    """
    query, key, value = map(contiguous_last, (query, key, value))
    rows, heads, steps, dim = query.shape
    kv_heads, length = len(key), mask.shape[3]
    group, width = heads // kv_heads, padded(dim)
    size = tile(group * steps, dim, query.element_size())
    tiles = -(-group * steps // size.queries)
    pairs = rows * kv_heads
    splits = split_count(pairs * tiles, length, processors(query.device))
    shown = mask.view(torch.uint8)
    positions = write_at[:, None].expand(rows, steps) if positions is None else positions.expand(rows, steps)
    assert length % KV_PAGE == 0, "masks are multiples of KV_PAGE"
    assert page_table.stride(1) == 1, "page tables are contiguous"
    assert shown.stride(3) == 1, "masks are contiguous"
    assert window is None or positions.stride(1) == 1, "positions are contiguous"

    out = query.new_empty(rows, steps, heads, dim)
    several = splits > 1
    partial = query.new_empty((pairs, splits, tiles * size.queries, width) if several else (0,), dtype=torch.float32)
    statistics = partial.new_empty((*partial.shape[:3], 2) if several else (0,))
    tiling = {"GROUP": group, "HEAD": dim, "WIDTH": width, "QUERIES": size.queries, "COLUMNS": size.columns}
    constants = {**tiling, "WINDOWED": window is not None, "SHORTEST": MIN_SPLIT_COLUMNS}
    with torch.cuda.device_of(query):  # type: ignore[no-untyped-call] # Triton launches on the current one
        kernels().attend_split[tiles, splits, pairs](
            *(query, key, value, page_table, shown, write_at, positions, out, partial, statistics),
            *query.stride()[:3],
            *key.stride()[:2],
            *value.stride()[:2],
            page_table.stride(0),
            *(shown.stride(0), shown.stride(2), write_at.stride(0), positions.stride(0)),
            *(kv_heads, steps, length, scale, softcap or 0.0, window or 0),
            **constants,
            SOFTCAPPED=softcap is not None,
            SPLIT=several,
            PAGE=KV_PAGE,
            num_warps=size.warps,
            num_stages=size.stages,
        )
        if several:
            kernels().combine_splits[-(-group * steps // MEMBERS), pairs](
                *(partial, statistics, write_at, positions, out),
                *(write_at.stride(0), positions.stride(0), kv_heads, steps, length, splits, window or 0),
                **constants,
                MEMBERS=MEMBERS,
                CHUNK=CHUNK,
            )
    return out
