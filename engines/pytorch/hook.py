"""The one hook into Hugging Face models: attention over a cache of columns with an explicit mask.

Any causal LM whose attention goes through `transformers.AttentionInterface` runs with it, unchanged. The same attention
serves the torch engine (whose cache is a pool of pages, written in place) and the exporter (`TensorScatter` and
`Attention` operators of ONNX opset 24).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, Cache, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from engines.base import Step
from engines.pytorch.attention import attend_cached
from engines.pytorch.fixed_cache import ColumnsCache, FixedCache, ShapeCache
from engines.pytorch.paged_cache import KernelCache, PagedCache
from mtad.errors import InvalidInput

NAME = "mtad"
"""Under this name the attention is registered with transformers."""
KERNEL = f"{NAME}-triton"
"""Under this name the one of `engines.pytorch.attention`."""
UNCAPPED, DECOMPOSED = f"{NAME}-uncapped", f"{NAME}-decomposed"
"""The same, exported as its parts: only where the model caps its scores, which TensorRT's operator cannot; always."""


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    dropout: float = 0.0,
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


for _name in (NAME, UNCAPPED, DECOMPOSED, KERNEL):
    AttentionInterface.register(_name, functools.partial(_attention, name=_name))
    AttentionMaskInterface.register(_name, lambda *args, **kwargs: None)


def set_arithmetic(model: PreTrainedModel, attention: str, experts: str = "batched_mm") -> None:
    """Choose how a model computes attention and mixtures of experts.

    Of experts, `batched_mm` gathers each token's, which a capture needs; `eager` is transformers' loop;
    `engines.pytorch.experts.GROUPED` is for graphs.
    """
    model.set_attn_implementation(attention)
    if hasattr(model, "set_experts_implementation"):  # not in transformers 4
        model.set_experts_implementation(experts)


def freeze_rope(model: torch.nn.Module) -> None:
    """Keep rotary frequencies from following the longest text of a batch; in place.

    Some kinds change them behind a limit, which a fixed cache cannot follow; capacities are kept below it, so that the
    check of every forward pass, which a graph cannot hold, is never needed.
    """
    for module in model.modules():
        if isinstance(kind := getattr(module, "rope_type", None), (str, dict)):
            frozen: Any = dict.fromkeys(kind, "default") if isinstance(kind, dict) else "default"
            module.rope_type = frozen


def _logits(
    model: PreTrainedModel,
    tokens: Tensor,
    positions: Tensor,
    mask: Tensor,
    keep: Tensor,
    cache: Cache,
    **attention: Any,
) -> Tensor:
    """Logits [R, N, V] of the kept positions. Selected before the head, which not all models can be asked to do.

    `attention` is what the model is to pass on to its attention.
    """

    def select(head: torch.nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (inputs[0].index_select(1, keep),)

    head = model.get_output_embeddings()
    if head is None:
        raise TypeError("it has no separate output embeddings")
    selecting = head.register_forward_pre_hook(select)
    try:
        logits: Tensor = model(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
            **attention,
        ).logits
    finally:
        selecting.remove()
    return logits


def run_once(model: PreTrainedModel, attention: str) -> tuple[ShapeCache, int]:
    """Run a model on two tokens, for what can be seen on the way; the shapes of its cache, and its logits' width.

    Its attention is replaced by `attention`.
    """
    cache = ShapeCache()
    set_arithmetic(model, attention)
    positions = torch.arange(2, device=model.device)[None]
    mask = torch.ones(1, 1, 2, 2, dtype=torch.bool, device=model.device)
    freeze_rope(model.eval())
    return cache, _logits(model, torch.zeros_like(positions), positions, mask, positions[0], cache).shape[-1]


@torch.no_grad()
def cache_shape(model: PreTrainedModel) -> tuple[int, int, int, int]:
    """(layers, KV heads, head dimension, width of the logits) of a model, found by running it through the hook once.

    Args:
        model: on any device; on "meta" it takes no memory and no time. Its attention is replaced. The largest of its
            heads and dimensions count, if layers or keys and values differ.

    Raises:
        TypeError: the model does not run through the hook, or its first layers do not all keep keys and values.
    """
    cache, width = run_once(model, NAME)
    found = [shape for pair in cache.shapes.values() for shape in pair]
    if not found or sorted(cache.shapes) != list(range(len(cache.shapes))):
        raise TypeError("not every layer keeps keys and values")
    return len(cache.shapes), max(shape[1] for shape in found), max(shape[3] for shape in found), width


class StepModel(torch.nn.Module):
    """A Hugging Face causal LM as the engine contract's step.

    Args:
        model: the model; its attention is replaced.
        attention: one of the registered names; with `DECOMPOSED`, `forward` returns new columns in place of caches.
        experts: as in `set_arithmetic`.
    """

    def __init__(self, model: PreTrainedModel, attention: str = NAME, experts: str = "batched_mm") -> None:
        super().__init__()
        set_arithmetic(model, attention, experts)
        self.model, self.attention = model.eval(), attention

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
        kind = ColumnsCache if self.attention == DECOMPOSED else FixedCache
        cache = kind(keys, values, write_at, mask.shape[-1])
        return _logits(self.model, tokens, positions, mask, keep, cache), cache.keys, cache.values

    def paged(self, step: Step, pool: Tensor, page_table: Tensor) -> Tensor:
        """Logits [R, N, V] of the kept positions, over a cache as `PagedCache` has it, which is written in place."""
        given = self.model, step.tokens, step.positions, step.mask, step.keep
        kind = KernelCache if self.attention == KERNEL else PagedCache
        cache = kind(pool, page_table, step.write_at, step.mask.shape[-1])
        if not isinstance(cache, KernelCache):
            return _logits(*given, cache)
        cache.rotation = getattr(self.model, "rotation", cache.rotation)
        cache.rotation.pending = None  # of a step that broke off
        return _logits(*given, cache, write_at=step.write_at, page_table=page_table)
