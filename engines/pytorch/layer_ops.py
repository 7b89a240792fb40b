"""What a decoder layer does around its matrix products and its attention, one kernel each.

The kernels are in `engines.pytorch.layer_kernels`; this launches them, in sizes that follow from shapes alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from engines.base import KV_PAGE
from engines.pytorch.attention import contiguous_last, kernels, padded, processors, shared_memory

STORED_ENTRIES = 1024
"""Entries of keys that one program stores."""
GATED_ENTRIES = 1024
"""Entries that one program gates."""
NARROW = 16
"""Vectors that `narrow_product` takes at most: what tensor cores take at least."""


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """`x` [..., D], up to four axes, by the root of its mean square, times `weight` [D] + offset; contiguous."""
    assert x.dim() <= 4
    x = contiguous_last(x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    first, second, third, size = (wide := x[(None,) * (4 - x.dim())]).shape
    width = padded(size)
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        kernels("layer_kernels").rms_norm[first * second * third,](
            *(x, weight, out, *wide.stride()[:3], second, third, eps, offset),
            SIZE=size,
            WIDTH=width,
            num_warps=max(1, min(16, width // 512)),
        )
    return out


def gate(x: Tensor, activation: str) -> Tensor:
    """The first half of each vector of `x` [..., 2 D], through an activation, times the second: [..., D]."""
    x = x.contiguous()
    size = x.shape[-1] // 2
    out = x.new_empty(*x.shape[:-1], size)
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        kernels("layer_kernels").gate[x.numel() // (2 * size), -(-size // GATED_ENTRIES)](
            x, out, SIZE=size, ACTIVATION=activation, BLOCK=GATED_ENTRIES
        )
    return out


class Norm(NamedTuple):
    """A root mean square norm, as of `rms_norm`."""

    weight: Tensor
    eps: float
    offset: float


class ProductTile(NamedTuple):
    """Sizes of a program of `narrow_product`: rows of the matrix, entries of each at a time, warps, stages.

    Half of the rows of a gated block's program are of what goes through the activation.
    """

    outputs: int
    inputs: int
    warps: int
    stages: int

    @property
    def memory(self) -> int:
        """Bytes of shared memory that it takes at most, in bfloat16, with 1 KiB for sums of the norm."""
        return 2 * (self.outputs + NARROW) * self.inputs * self.stages + 1024


ADDED_TILES = ProductTile(32, 256, 4, 4), ProductTile(16, 256, 4, 4)
GATED_TILES = ProductTile(256, 128, 8, 3), ProductTile(128, 128, 8, 4)
"""The fastest of those tried on an H200 with five vectors and the matrices of Llama-3.1-8B and of Llama-3.2-1B."""


def product_tile(x: Tensor, weight: Tensor, gated: bool) -> ProductTile | None:
    """The tile with which `narrow_product` multiplies `x` [..., D] by `weight` [O, D]; None if cuBLAS should.

    It is for few vectors of bfloat16, since float16 has no room for what is not normed yet, and for matrices whose
    tiles keep three quarters of the processors busy and fit in their memory. What is added to has no fewer outputs than
    inputs: cuBLAS divides the inputs of others among processors, which is faster.
    """
    outputs, size = weight.shape
    if not (x.dtype == weight.dtype == torch.bfloat16 and weight.is_contiguous()):
        return None
    if x.numel() > NARROW * size or (outputs < size and not gated):
        return None
    for tile in GATED_TILES if gated else ADDED_TILES:
        whole = size % tile.inputs == 0 == outputs % tile.outputs
        busy = outputs / tile.outputs >= 0.75 * processors(x.device)
        if whole and busy and tile.memory <= shared_memory(x.device):
            return tile
    return None


def narrow_product(
    x: Tensor, weight: Tensor, out: Tensor, tile: ProductTile, activation: str = "", norm: Norm | None = None
) -> Tensor:
    """`x` [..., D] times `weight` [O, D], added to `out` [..., O] in place; or with an activation put there, gated.

    Args:
        x: contiguous, like the others.
        tile: see `product_tile`.
        activation: then `weight` is [2 O, D], and `out` what `gate` makes of the products.
        norm: with an activation, what `x` goes through before.
    """
    size, block = x.shape[-1], tile.outputs // 2 if activation else tile.outputs
    of_norm = norm or Norm(x, 0.0, 0.0)
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        kernels("layer_kernels").narrow_product[out.shape[-1] // block,](
            *(x, weight, of_norm.weight, out, x.numel() // size, of_norm.eps, of_norm.offset),
            SIZE=size,
            OUTPUTS=out.shape[-1],
            ACTIVATION=activation,
            NORMED=norm is not None,
            VECTORS=NARROW,
            BLOCK=block,
            DEPTH=tile.inputs,
            STAGES=tile.stages,
            num_warps=tile.warps,
        )
    return out


class PendingRope(NamedTuple):
    """Queries and keys that are yet to be rotated by their positions.

    Attributes:
        query: [R, H, S, D].
        key: [R, KV, S, D].
        cos, sin: [R, S, T], T <= D even: entries i and i + T / 2 of a head are rotated against each other.
        norms: what each goes through before, weights [D], with one `eps` and one `offset`.
    """

    query: Tensor
    key: Tensor
    cos: Tensor
    sin: Tensor
    norms: tuple[Norm, Norm] | None = None


def store_columns(
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    page_table: Tensor,
    write_at: Tensor,
    rope: PendingRope | None = None,
) -> Tensor | None:
    """Write a step's keys and values [R, KV, S, D] into a pool of pages, as columns write_at[r] .. of their rows.

    Args:
        keys, values: [KV, pages x 64, D], last two axes contiguous.
        page_table: int32 [R, pages of a row + 1], last axis contiguous; the last is for all columns behind.
        rope: rotate `key`, which is its key, on the way, and its queries.

    Returns:
        the rotated queries [R, H, S, D]; None without `rope`.
    """
    key, value = map(contiguous_last, (key, value))
    rows, kv_heads, steps, dim = key.shape
    width, heads, rotary = padded(dim), 0, 0
    query = out = cos = sin = key
    of_query = of_key = Norm(key, 0.0, 0.0)
    if rope is not None:
        query, cos, sin = map(contiguous_last, (rope.query, rope.cos, rope.sin))
        of_query, of_key = rope.norms or (of_query, of_key)
        heads, rotary = query.shape[1], cos.shape[2]
        cos, sin = (x.expand(rows, steps, rotary) for x in (cos, sin))
        assert cos.stride() == sin.stride()
        out = query.new_empty(rows, steps, heads, dim)
    together = min(1 << (max(heads, kv_heads) - 1).bit_length(), max(1, STORED_ENTRIES // width))
    assert {x.stride()[1:] for x in (keys, values)} == {(dim, 1)}
    assert page_table.stride(1) == 1
    with torch.cuda.device_of(key):  # type: ignore[no-untyped-call]
        kernels("layer_kernels").store_columns[steps, rows, -(-kv_heads // together) - (-heads // together)](
            *(key, value, keys, values, page_table, write_at, query, out, cos, sin),
            *(of_query.weight, of_key.weight),
            *(write_at.stride(0), page_table.stride(0), page_table.shape[1]),
            *key.stride()[:3],
            *value.stride()[:3],
            *(keys.stride(0), values.stride(0)),
            *query.stride()[:3],
            *cos.stride()[:2],
            *(heads, kv_heads, of_key.eps, of_key.offset),
            HEAD=dim,
            WIDTH=width,
            HEADS=together,
            ROTARY=rotary,
            NORMED=rope is not None and rope.norms is not None,
            PAGE=KV_PAGE,
        )
    return out.transpose(1, 2) if rope is not None else None
