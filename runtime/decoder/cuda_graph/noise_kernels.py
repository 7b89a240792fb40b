"""The kernel that draws the noise of a block, in Triton: one launch; see `mtad.noise.device`."""

from __future__ import annotations

import triton
import triton.language as tl

from mtad.noise.device import FACTORS, GAMMA, signed

_STEP = tl.constexpr(signed(GAMMA))
_FIRST, _SECOND = tl.constexpr(signed(FACTORS[0][1])), tl.constexpr(signed(FACTORS[1][1]))
_FIRST_SHIFT, _SECOND_SHIFT = tl.constexpr(FACTORS[0][0]), tl.constexpr(FACTORS[1][0])


@triton.jit(do_not_specialize=["count", "lists", "tables", "list_size", "table_size"])
def hash_numbers(
    states: tl.tensor,
    scales: tl.tensor,
    uniforms: tl.tensor,
    list_slots: tl.tensor,
    table_slots: tl.tensor,
    out: tl.tensor,
    count: tl.tensor,
    lists: tl.tensor,
    tables: tl.tensor,
    list_size: tl.tensor,
    table_size: tl.tensor,
    NUMBERS: tl.constexpr,
) -> None:
    """What `mtad.noise.device.numbers` gives. Grid: (R, numbers / NUMBERS), rounded up.

    Args:
        states, scales, uniforms: its arguments.
        list_slots, table_slots: int64, offsets of slots that have `list_size` and `table_size` numbers each.
        out: float32 [R, count + lists + tables].
        count, lists, tables: numbers of each kind.
    """
    row, total = tl.program_id(0).to(tl.int64), count + lists + tables
    at = tl.program_id(1) * NUMBERS + tl.arange(0, NUMBERS)
    listed, tabled = at - count, at - count - lists
    in_list, in_table = (listed >= 0) & (listed < lists), (tabled >= 0) & (tabled < tables)
    x = tl.load(uniforms + at, mask=at < count, other=0)
    x += tl.load(list_slots + listed // list_size, mask=in_list, other=0)
    x += tl.load(table_slots + tabled // table_size, mask=in_table, other=0)
    rank = tl.where(in_list, listed % list_size, tl.where(in_table, tabled % table_size, 0))
    x += tl.load(states + row) + rank.to(tl.int64) * _STEP
    x = (x ^ ((x >> _FIRST_SHIFT) & (2 ** (64 - _FIRST_SHIFT) - 1))) * _FIRST
    x = (x ^ ((x >> _SECOND_SHIFT) & (2 ** (64 - _SECOND_SHIFT) - 1))) * _SECOND
    value = ((x >> 40) & (2**24 - 1)).to(tl.float32) * tl.load(scales + 2 * row)
    inside = tl.minimum(tl.maximum(value, 2.0**-25), 1.0 - 2.0**-24)  # the logarithms stay finite
    gumbel = tl.log(-tl.log(inside)) * tl.load(scales + 2 * row + 1)
    tl.store(out + row * total + at, tl.where(at < count, value, gumbel), mask=at < total)
