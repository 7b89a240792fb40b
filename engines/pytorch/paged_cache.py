"""The torch engine's cache as transformers sees it: a step's rows of a pool of pages, which is written in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from engines.base import KV_PAGE
from engines.cache.paged import gathered, slots
from engines.pytorch.fixed_cache import cut
from engines.pytorch.layer_ops import Norm, PendingRope, store_columns
from mtad.errors import InvalidInput


class Rotation:
    """Rotary positions that are applied when keys are stored: what a model's attentions call in place of their own.

    Attributes:
        pending: queries and keys whose keys are not stored yet.
        query: the queries that attention is going to be given, and the rotated ones that it is to take for them.
    """

    def __init__(self) -> None:
        self.pending: PendingRope | None = None
        self.query: tuple[Tensor, Tensor] | None = None

    def __call__(
        self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, norms: tuple[Norm, Norm] | None = None
    ) -> tuple[Tensor, Tensor]:
        if self.pending is not None:
            raise InvalidInput("attention", "triton", "a fused model runs in its engine only; load it again elsewhere")
        self.pending = PendingRope(query, key, cos, sin, norms)
        return query, key

    def take_pending(self, key: Tensor) -> PendingRope | None:
        """What is to be rotated when `key` is stored; None if the model has rotated it itself."""
        pending, self.pending = self.pending, None
        if pending is not None and pending.key is not key:
            raise InvalidInput("attention", "triton", "the model changes its keys after rotating them; give sdpa")
        return pending

    def rotated_query(self, query: Tensor) -> Tensor:
        if self.query is None:
            return query
        (given, rotated), self.query = self.query, None
        if given is not query:
            raise InvalidInput("attention", "triton", "the model changes its queries after rotating them; give sdpa")
        return rotated


class PagedCache(Cache):  # type: ignore[misc]
    """A step's rows of a pool of pages, for torch's attention: keys and values are scattered to pages, and gathered.

    Args:
        pool: [layers, 2, H, pages x 64, D].
        page_table: int32 [R, pages of a row + 1], see `engines.cache.paged.PageCache`.
        write_at: int64 [R].
        length: columns of the mask.
    """

    def __init__(self, pool: Tensor, page_table: Tensor, write_at: Tensor, length: int) -> None:
        super().__init__(layers=[])
        self.pool, self.page_table, self.write_at, self.length = pool, page_table, write_at, length
        self._to: Tensor | None = None

    def update(self, key: Tensor, value: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store [R, H, S, D] of one layer; return what attention reads, [R, H, length, D] each."""
        if self._to is None:  # the same in all layers
            self._to = slots(self.page_table, self.write_at[:, None] + torch.arange(key.shape[2], device=key.device))
        for part, new in zip(self.pool[layer], (key, value), strict=True):
            part[: new.shape[1], self._to, : new.shape[3]] = new.transpose(0, 1)
        keys, values = gathered(self.pool[layer], self.page_table[:, : self.length // KV_PAGE])
        return cut(keys, key), cut(values, value)

    def __len__(self) -> int:
        return len(self.pool)


class KernelCache(PagedCache):
    """The same for `engines.pytorch.attention`: keys and values of a layer are written by one kernel, and not gathered.

    Attributes:
        rotation: what that kernel is to rotate on the way.
    """

    rotation: Rotation = Rotation()

    def update(self, key: Tensor, value: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store [R, H, S, D] of one layer; return its whole pool, [H, pages x 64, D] each."""
        keys, values = self.pool[layer]
        if not key.shape[1::2] == value.shape[1::2] == keys.shape[::2]:
            raise InvalidInput("attention", "triton", "keys and values of the model differ in shape; give sdpa")
        rope = self.rotation.take_pending(key)
        rotated = store_columns(key, value, keys, values, self.page_table, self.write_at, rope)
        if rope is not None and rotated is not None:
            self.rotation.query = rope.query, rotated
        return keys, values
