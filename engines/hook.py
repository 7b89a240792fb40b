"""The one hook into Hugging Face models: attention over a fixed cache with an explicit mask.

Any causal LM whose attention goes through `transformers.AttentionInterface` runs with it, unchanged. The same two
objects serve the torch engine (the cache is written in place) and the exporter (`TensorScatter` and `Attention`
operators of ONNX opset 24).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface
from transformers.utils import logging

NAME = "mtad"
"""Under this name the attention is registered with transformers."""

Scatter = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(buffer [R, H, C, D], new [R, H, S, D], write_at [R]) -> buffer with S columns of each row replaced."""


def scatter_in_place(buffer: Tensor, new: Tensor, write_at: Tensor) -> Tensor:
    """Write `new` at columns write_at[r] .. + S of each row of `buffer`, in place."""
    columns = write_at[:, None] + torch.arange(new.shape[2], device=new.device)
    index = columns[:, None, :, None].expand(-1, new.shape[1], -1, new.shape[3])
    return buffer.scatter_(2, index, new)


def scatter_operator(buffer: Tensor, new: Tensor, write_at: Tensor) -> Tensor:
    """The same as an ONNX `TensorScatter` node."""
    return torch.onnx.ops.symbolic(
        "TensorScatter",
        (buffer, new, write_at),
        attrs={"axis": 2, "mode": "linear"},
        dtype=buffer.dtype,
        shape=buffer.shape,
        version=24,
    )


class FixedCache:
    """A transformers cache by duck typing: new keys and values are written where `write_at` says.

    `update` returns the first `length` columns of the buffers, those the mask speaks of; `keys` and `values` hold the
    whole buffers.
    """

    is_compileable = False

    def __init__(
        self, keys: Sequence[Tensor], values: Sequence[Tensor], write_at: Tensor, length: int, scatter: Scatter
    ) -> None:
        self.keys, self.values = list(keys), list(values)
        self.write_at, self.length, self.scatter = write_at, length, scatter

    def update(self, key: Tensor, value: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store [R, H, S, D] of one layer; return what attention reads, [R, H, length, D] each."""
        self.keys[layer] = self.scatter(self.keys[layer], key, self.write_at)
        self.values[layer] = self.scatter(self.values[layer], value, self.write_at)
        return self.keys[layer][:, :, : self.length], self.values[layer][:, :, : self.length]

    def get_seq_length(self, layer: int = 0) -> int:
        """Positions are explicit, so the model never needs this."""
        return 0

    def get_mask_sizes(self, query: Any, layer: int = 0) -> tuple[int, int]:
        """The mask is explicit, so these sizes are never used to build one."""
        return self.length, 0

    def get_max_cache_shape(self, layer: int = 0) -> int:
        """Columns of the buffer."""
        return self.keys[0].shape[2]

    @property
    def is_sliding(self) -> list[bool]:
        """No layer has a sliding window of its own: windows, if any, must come in the mask."""
        return [False] * len(self.keys)

    def __len__(self) -> int:
        return len(self.keys)


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of [R, H, S, D] queries over [R, KV, L, D]; `mask` bool [R, 1, S, L]. Returns [R, S, H, D]."""
    scale = float(scaling if scaling is not None else query.shape[-1] ** -0.5)
    rows, heads, steps, dim = query.shape
    group = heads // key.shape[1]
    if group > 1:
        # Query heads that share a KV head become more queries of that head. Reads K and V once per group, and even a
        # single token a row is then a matrix: the CPU kernels for vectors add in another order, so a row's bits would
        # depend on how many tokens the rest of the batch runs.
        query = query.reshape(rows, key.shape[1], group * steps, dim)
        mask = mask.expand(rows, group, steps, mask.shape[3]).reshape(rows, 1, group * steps, mask.shape[3])
    if torch.onnx.is_in_onnx_export():
        out = torch.onnx.ops.symbolic(
            "Attention",
            (query, key, value, mask),
            attrs={"scale": scale},
            dtype=query.dtype,
            shape=query.shape,
            version=24,
        )
    else:
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    out = out.reshape(rows, heads, steps, dim)
    return out.transpose(1, 2), None


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)


def quiet_transformers() -> None:
    """Keep transformers' progress bars and warnings off stderr, where commands report; errors are still raised."""
    logging.disable_progress_bar()
    logging.set_verbosity_error()


class StepModel(torch.nn.Module):
    """A Hugging Face causal LM as the engine contract's step; `scatter` decides how the cache is written."""

    def __init__(self, model: PreTrainedModel, scatter: Scatter) -> None:
        super().__init__()
        model.set_attn_implementation(NAME)
        self.model, self.scatter = model.eval(), scatter

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        mask: Tensor,
        write_at: Tensor,
        keep: Tensor,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Logits [R, N, V] of the kept positions and the caches after the step; shapes as in `engines.base.Step`."""
        cache = FixedCache(keys, values, write_at, mask.shape[-1], self.scatter)
        out = self.model(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=keep,
        )
        return out.logits, cache.keys, cache.values
