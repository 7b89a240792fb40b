"""The functions of `mtad.block` on a GPU: two kernels filter, one draws a level and prepares its step, one the noise.

What is launched follows from shapes, so a CUDA graph can hold it. The kernels are in `list_kernels`, `table_kernels`
and `draw_kernels`, with `sample_kernels` and `branch_kernels`, and in `noise_kernels`.
"""

from __future__ import annotations

import importlib
import logging
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from mtad import block
from mtad.block import Grown, Inputs
from mtad.distributions.candidates import Candidates
from mtad.distributions.filters import Filters
from mtad.distributions.table import Table, part
from mtad.draft.levels import Level
from mtad.draft.live import Live
from mtad.noise import device as device_noise
from mtad.noise.device import Gumbels
from mtad.noise.host import Noise
from mtad.rows import BLOCK, LISTED, Rows, Shape, blocks_of
from runtime.decoder.eager import BlockFunctions, Given, TorchFunctions

log = logging.getLogger(__name__)

CHUNK, TILE = 4096, 4096
"""`CHUNK`: logits per program of the scan kernels; a distribution has many. `TILE`: logits that the one settling
program of a distribution reads at a time."""
NUMBERS = 1024
"""Numbers of a block's noise that one program draws."""
CELLS, COLUMNS = 8192, 4096
"""Entries of a mask that a program writes at a time, and columns of it at most."""


@cache
def _kernels(name: str) -> ModuleType:
    return importlib.import_module(f"runtime.decoder.cuda_graph.{name}_kernels")


def _power(count: int) -> int:
    return 1 << (count - 1).bit_length()


def warps(width: int) -> int:
    """Warps of `draw_level` for a level of `width` slots; chosen so that most values stay in registers."""
    return 8 if width <= 16 else 16


def filter_lists(logits: Tensor, rows: Rows) -> Candidates:
    """`mtad.distributions.candidates.process`, in two kernels. Of tied logits, those with the smaller ids come first.

    Args:
        logits: float [R, S, V], last axis contiguous.
    """
    count, positions, size = logits.shape
    candidates, chunks = rows.rank_bias.shape[2], -(-size // CHUNK)
    keys = logits.new_empty((count, positions, chunks, LISTED), dtype=torch.int64)
    found = Candidates(
        logits.new_empty((count, positions, candidates), dtype=torch.int64),
        logits.new_empty((count, positions, candidates), dtype=torch.float32),
    )
    kernels, strides = _kernels("list"), logits.stride()[:2]
    with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call] # Triton launches on the current one
        kernels.scan_lists[count * positions, chunks](
            *(logits, keys, positions, *strides, size), LIST=LISTED, CHUNK=CHUNK, num_warps=8
        )
        kernels.settle_lists[count * positions,](
            *(keys, *found, rows.inverse_temperature, rows.rank_bias, rows.top_p, rows.min_p),
            *(positions, chunks, candidates),
            LIST=LISTED,
            CHUNKS=_power(chunks),
            num_warps=8,
        )
    return found


def filter_tables(logits: Tensor, rows: Rows, wanted: Tensor | None = None) -> Table:
    """`mtad.distributions.table.tabulate`, in two kernels; anything for rows whose distributions are lists."""
    count, positions, size = logits.shape
    chunks, blocks = -(-size // CHUNK), blocks_of(size)
    largest = logits.new_empty((count, positions, chunks), dtype=torch.float32)
    bins = logits.new_empty((2, count, positions, chunks, 32), dtype=torch.float32)
    scratch = logits.new_empty((count, positions, TILE), dtype=torch.int64)
    # in this order: the kernel that draws a level reads three of them as one
    numbers = logits.new_empty((3, count, positions, 1), dtype=torch.float32)
    found = Table(
        logits,
        rows.inverse_temperature.expand(-1, positions, -1),
        numbers[0],
        numbers[1],
        logits.new_empty((count, positions, 1), dtype=torch.int64),
        numbers[2],
        logits.new_empty((count, positions, blocks), dtype=torch.float32),
    )
    kernels, strides = _kernels("table"), logits.stride()[:2]
    filters = rows.top_k, rows.top_p
    with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]
        kernels.scan_tables[count * positions, chunks](
            *(logits, largest, *bins, rows.tabulated, rows.inverse_temperature, *filters),
            *(positions, *strides, size),
            CHUNK=CHUNK,
            num_warps=8,
        )
        kernels.settle_tables[count * positions,](
            *(logits, largest, *bins, scratch, *found[2:], rows.tabulated, rows.greedy, rows.inverse_temperature),
            *(*filters, rows.min_p, positions, *strides, size, chunks),
            CHUNKS=_power(chunks),
            TILE=TILE,
            BLOCK=BLOCK,
            BLOCKS=_power(blocks),
            num_warps=16,
        )
    return found


def hash_numbers(states: Tensor, scales: Tensor, uniforms: Tensor, gumbels: Gumbels) -> Tensor:
    """`mtad.noise.device.numbers`, in one kernel."""
    (lists, list_size), (tables, table_size) = gumbels
    sizes = len(uniforms), len(lists) * list_size, len(tables) * table_size
    found = scales.new_empty((len(states), sum(sizes)))
    with torch.cuda.device_of(states):  # type: ignore[no-untyped-call]
        _kernels("noise").hash_numbers[len(states), -(-sum(sizes) // NUMBERS)](
            *(states, scales, uniforms, lists, tables, found, *sizes, max(1, list_size), max(1, table_size)),
            NUMBERS=NUMBERS,
        )
    return found


class FusedBlock(BlockFunctions):
    """The functions of a block whose levels are drawn by one kernel each."""

    filters = Filters(filter_lists, filter_tables)

    def grow(self, depth: int, given: Given, live: Live | None = None) -> Grown:
        shape = self._shape
        above, sees, logits, noise, place, holds, context, rows = given
        keeps_all = "branches" in shape.forms or live is not None
        found = block.distributions(logits, rows, shape.tables, None, self.filters)
        (count, beams), size, device = above.tokens.shape, logits.shape[2], logits.device
        width, columns = place.bias.shape[1], sees.shape[3]

        def empty(dtype: torch.dtype, *sizes: int) -> Tensor:
            return torch.empty((count, *sizes), dtype=dtype, device=device)

        level = Level(
            tokens=empty(torch.int64, width),
            parents=empty(torch.int64, width),
            log_q=empty(torch.float32, width),
            drafted=empty(torch.bool, width),
            growing=empty(torch.bool, width),
            ended=empty(torch.bool, width),
            paths=empty(torch.int64, width, above.paths.shape[2]),
        )
        inputs = Inputs(
            tokens=level.tokens,
            positions=empty(torch.int64, width),
            write_at=empty(torch.int64),
            mask=empty(torch.bool, 1, width, columns),
        )
        lists = next((x for x in found if isinstance(x, Candidates)), None)
        table = next((x for x in found if isinstance(x, Table)), None)
        # a kernel that is compiled for one kind of distributions reads nothing of the other
        listed = lists or Candidates(level.tokens, level.log_q)
        numbers = (table.logits, table.largest, table.last, table.blocks) if table else (level.log_q,) * 4
        above = Level(*(x.contiguous() for x in above))
        with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]
            _kernels("draw").draw_level[count,](
                *(*level, *inputs[1:], *above[2:3], *above[4:], sees.contiguous(), holds, *listed, *numbers, *noise),
                *(context.committed, place.behind, place.bias, place.ends, rows.form, rows.tabulated, rows.greedy),
                *(rows.inverse_temperature, rows.log_confidence, rows.log_fallback, rows.ends, rows.stops_at_eos),
                *(place.branch_at, rows.replacement, *(live or [level.log_q] * 3)),
                *(depth - 1, beams, columns, shape.candidates, size),
                *(x.stride(0) for x in noise),
                LISTS=lists is not None,
                TABLES=table is not None,
                CHILDREN=shape.children,
                LIVE=live is not None,
                WIDTH=width,
                SLOTS=_power(width),
                BEAMS=_power(beams),
                LEVELS=above.paths.shape[2],
                DEPTHS=_power(above.paths.shape[2]),
                LIST=LISTED,
                BLOCK=BLOCK,
                BLOCKS=_power(blocks_of(size)),
                COLUMNS=min(COLUMNS, CELLS // _power(width)),
                num_warps=warps(width),
            )
        return Grown(level, tuple(part(each, lambda x: x[:, 0]) for each in found), inputs, found if keeps_all else ())

    def hold_back(self, grown: Grown, rows: Rows) -> None:
        """Nothing to do: `draw_level` has already applied `log_fallback`."""


class FusedFunctions(TorchFunctions):
    """The functions of blocks that launch few kernels."""

    def of(self, rows: int, shape: Shape, length: int) -> BlockFunctions:
        return FusedBlock(shape)

    def draw_noise(self, states: Tensor, scales: Tensor, shape: Shape) -> Noise:
        return device_noise.draw(states, scales, shape, hash_numbers)


def gpu_functions() -> TorchFunctions:
    """The functions for a GPU: with Triton the fused ones; without it torch's, and a warning says so."""
    try:
        _kernels("draw")
    except ImportError:
        log.warning("filtering and drafting launch many kernels, because Triton is not installed: mtad[gpu] brings it")
        return TorchFunctions()
    return FusedFunctions()
