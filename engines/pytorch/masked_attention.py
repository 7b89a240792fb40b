"""Attention over columns of a cache with an explicit mask, computed, or exported as ONNX's `Attention` or its parts."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from engines.pytorch.attention import attend_cached
from mtad.errors import InvalidInput

NAME = "mtad"
"""Under this name the attention is registered with transformers."""
KERNEL = f"{NAME}-triton"
"""Under this name the one of `engines.pytorch.attention`."""
UNCAPPED, DECOMPOSED = f"{NAME}-uncapped", f"{NAME}-decomposed"
"""The same, exported as its parts: only where the model caps its scores, which TensorRT's operator cannot; always."""


def attend_masked(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    position_ids: Tensor | None = None,
    write_at: Tensor | None = None,
    page_table: Tensor | None = None,
    s_aux: Tensor | None = None,
    *,
    name: str = NAME,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of [R, H, S, D] queries over [R, KV, L, D]; `attention_mask` bool [R, 1, S, L]. Returns [R, S, H, D].

    Values may have another D than keys. `s_aux` [H] are attention sinks: scores of a column more, which has no value.
    `name` is the one it is registered under; models pass on what `StepModel` gives them for `KERNEL`: `write_at` and
    `page_table`. There, `key` and `value` are a layer's pool.
    """
    scale, mask = float(scaling if scaling is not None else query.shape[-1] ** -0.5), attention_mask
    if name == KERNEL:
        if s_aux is not None:
            raise InvalidInput("attention", "triton", "the model has attention sinks; give sdpa")
        if write_at is None or page_table is None or (sliding_window and position_ids is None):
            problem = "the model does not pass write_at, page_table or position_ids on to its attention; give sdpa"
            raise InvalidInput("attention", "triton", problem)
        if rotation := getattr(module, "rotation", None):
            query = rotation.rotated_query(query)
        more = scale, softcap, sliding_window or None, position_ids
        return attend_cached(query, key, value, page_table, mask, write_at, *more), None
    if sliding_window:  # which some families have as 0 where they have none
        if position_ids is None:
            raise TypeError("the model has a sliding window, but does not tell its attention the positions")
        mask = mask & _window(position_ids, mask.shape[3], sliding_window)
    rows, heads, steps, dim = query.shape
    group = heads // key.shape[1]
    # A single query a KV head is a vector, and the CPU kernels for vectors add in another order than those for
    # matrices: a row's bits would depend on how many tokens the rest of the batch runs. So it never is one.
    if group > 1:
        # query heads that share a KV head become more queries of that head, which also reads K and V once per group
        query = query.reshape(rows, key.shape[1], group * steps, dim)
        mask = mask.expand(rows, group, steps, mask.shape[3]).reshape(rows, 1, group * steps, mask.shape[3])
    else:
        query, mask = torch.cat([query, query[:, :, :1]], 2), torch.cat([mask, mask[:, :, :1]], 2)
    exporting = torch.onnx.is_in_onnx_export()
    if exporting and s_aux is None and (name == NAME or (name == UNCAPPED and softcap is None)):
        out = torch.onnx.ops.symbolic(
            "Attention",
            (query, key, value, mask),
            attrs={"scale": scale} if softcap is None else {"scale": scale, "softcap": softcap},
            dtype=query.dtype,
            shape=(*query.shape[:3], value.shape[3]),
            version=24,
        )
    elif exporting or softcap is not None or s_aux is not None:
        scores = (query * scale) @ key.transpose(2, 3)
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)  # finite: a row may attend to nothing
        if s_aux is not None:
            sinks = s_aux.to(scores.dtype).reshape(1, key.shape[1], group, 1)
            sinks = sinks.expand(rows, -1, -1, scores.shape[2] // group).reshape(*scores.shape[:3], 1)
            scores = torch.cat([scores, sinks], -1)
        shares = torch.softmax(scores, -1, dtype=torch.float32)[..., : key.shape[2]]
        out = shares.to(value.dtype) @ value
    else:
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    out = out.reshape(rows, heads, steps, value.shape[3]) if group > 1 else out[:, :, :steps]
    return out.transpose(1, 2).contiguous(), None


def _window(positions: Tensor, length: int, window: int) -> Tensor:
    """Bool [R, 1, S, length]: which columns hold one of the `window` tokens up to each of `positions` [R, S].

    A committed token lies in the column of its position. A drafted one may lie behind that, never before: it counts as
    in the window, which is right as long as drafts are no deeper than the window (`export.checkpoint` sees to it).
    """
    columns = torch.arange(length, device=positions.device)
    return (positions[:, None, :, None] - columns) < window


def attend_as_method(
    name: str, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor
) -> tuple[Tensor, None]:
    """The attention called `name` for models that have theirs as a method `_attn`, which returns [R, H, S, D]."""
    attend = AttentionInterface()[name]
    return attend(module, query.to(key.dtype), key, value, mask, 1 / module.scale_attn)[0].transpose(1, 2), None


for _name in (NAME, UNCAPPED, DECOMPOSED, KERNEL):
    AttentionInterface.register(_name, functools.partial(attend_masked, name=_name))
    AttentionMaskInterface.register(_name, lambda *args, **kwargs: None)
