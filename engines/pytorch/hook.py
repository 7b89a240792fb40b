"""The one hook into Hugging Face models: their attention is `engines.pytorch.masked_attention`, over our caches.

Any causal LM whose attention goes through `transformers.AttentionInterface` runs with it, unchanged.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from engines.base import Step
from engines.pytorch.fixed_cache import ColumnsCache, FixedCache, ShapeCache
from engines.pytorch.masked_attention import DECOMPOSED, KERNEL, NAME, attend_as_method
from engines.pytorch.paged_cache import KernelCache, PagedCache


def set_arithmetic(model: PreTrainedModel, attention: str, experts: str = "batched_mm") -> None:
    """Choose how a model computes attention and mixtures of experts.

    Of experts, `batched_mm` gathers each token's, which a capture needs; `eager` is transformers' loop;
    `engines.pytorch.experts` has one for graphs and one for GPUs. Before transformers 5.7, `set_experts_implementation`
    refuses names that it does not know, of any model (modeling_utils.py of 5.5.4). So the name is written to where that
    method would leave it.
    """
    model.set_attn_implementation(attention)
    for module in model.modules():
        if hasattr(module, "scale_attn"):  # GPT-J and CodeGen
            vars(module).pop("_attn", None)
            if attention.startswith(NAME):
                module._attn = functools.partial(attend_as_method, attention, module)
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "_experts_implementation"):  # not in transformers 4
            config._experts_implementation = experts


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
    model: PreTrainedModel, tokens: Tensor, positions: Tensor, mask: Tensor, keep: Tensor, cache: Cache, **others: Any
) -> Tensor:
    """Logits [R, N, V] of the kept positions. Selected before the head, which not all models can be asked to do.

    `others` is what the model is to pass on to its attention.
    """

    def select(head: torch.nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (inputs[0].index_select(1, keep),)

    head = model.get_output_embeddings()
    if head is None:
        raise TypeError("it has no separate output embeddings")
    with head.register_forward_pre_hook(select):
        logits: Tensor = model(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
            **others,
        ).logits
    return logits


def run_once(model: PreTrainedModel, attention: str) -> tuple[ShapeCache, Tensor]:
    """Run a model on two tokens, for what can be seen on the way; the shapes of its cache, and its logits.

    Its attention is replaced by `attention`.
    """
    cache = ShapeCache()
    set_arithmetic(model, attention)
    positions = torch.arange(2, device=model.device)[None]
    mask = torch.ones(1, 1, 2, 2, dtype=torch.bool, device=model.device)
    freeze_rope(model.eval())
    return cache, _logits(model, positions, positions, mask, positions[0], cache)


@torch.no_grad()
def cache_shape(model: PreTrainedModel) -> tuple[int, int, int, int]:
    """(layers, KV heads, head dimension, width of the logits) of a model, found by running it through the hook once.

    Args:
        model: on any device; on "meta" it takes no memory and no time. Its attention is replaced. The largest of its
            heads and dimensions count, if layers or keys and values differ.

    Raises:
        TypeError: the model does not run through the hook, or its first layers do not all keep keys and values.
    """
    if not model._can_set_attn_implementation() and not any(hasattr(m, "scale_attn") for m in model.modules()):
        raise TypeError("its attention is its own, not one that transformers lets us replace")
    cache, logits = run_once(model, NAME)
    found = [shape for pair in cache.shapes.values() for shape in pair]
    if not found or sorted(cache.shapes) != list(range(len(cache.shapes))):
        raise TypeError("not every layer keeps keys and values")
    return len(cache.shapes), max(shape[1] for shape in found), max(shape[3] for shape in found), logits.shape[-1]


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
