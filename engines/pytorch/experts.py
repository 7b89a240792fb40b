"""A mixture of experts for a graph: each expert that some token chose runs once, on the tokens that chose it.

A loop of standard operators, whose count the router decides. An expert's weights are read once per step, as in
transformers' own loop; its `batched_mm` gathers them for every token.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

GROUPED, ON_GPU = "mtad", "mtad_gpu"
"""Under these names `grouped` and `on_gpu` are registered with transformers."""


def grouped(module: Any, hidden: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
    """What the experts of `module` make of [T, D], in float sums by ascending expert.

    Args:
        chosen: int64 [T, K], the experts of each token.
        shares: [T, K], what each counts.
    """
    if not module.has_gate or getattr(module, "has_post_expert_norm", False):
        raise NotImplementedError("experts without a gate, or with a norm behind them")
    count = module.num_experts
    active = (chosen.reshape(-1, 1) == torch.arange(count)).any(0)
    order = torch.topk(active * torch.arange(count, 0, -1), count).indices  # active ones first, each by its number

    def weights(name: str, expert: Tensor) -> tuple[Tensor, Tensor | None]:
        matrix = getattr(module, name).index_select(0, expert)[0]
        bias = getattr(module, f"{name}_bias").index_select(0, expert)[0] if module.has_bias else None
        return matrix.T if module.is_transposed else matrix, bias

    def one(number: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
        expert = order.index_select(0, number.reshape(1))
        mine = chosen == expert
        rows, nobody = torch.nonzero(mine.any(-1)).squeeze(1), torch.zeros(1, dtype=torch.int64)
        # and token 0 for nothing: a single token would be a vector, which is added up in another order
        counted, rows = torch.cat([torch.ones_like(rows), nobody]), torch.cat([rows, nobody])
        found = hidden.index_select(0, rows)
        gated = module._apply_gate(linear(found, *weights("gate_up_proj", expert)))
        found = linear(gated, *weights("down_proj", expert))
        share = (shares * mine).sum(-1).index_select(0, rows) * counted
        return number + 1, out.index_add(0, rows, (found * share[:, None]).to(out.dtype))

    total, first = active.sum(), torch.zeros((), dtype=torch.int64)
    loop: Any = torch.while_loop
    made: Tensor = loop(lambda number, out: number < total, one, (first, torch.zeros_like(hidden).float()))[1]
    return made.to(hidden.dtype)


with contextlib.suppress(ImportError):  # transformers 4 has loops of its own
    from transformers.integrations.moe import ExpertsInterface, batched_mm_experts_forward, grouped_mm_experts_forward

    def on_gpu(module: Any, hidden: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """The same for a GPU. The weights of each token's experts are gathered, unless that would copy more than all.

        Mixtral 8x7B would gather 120 GB per layer for 256 tokens. `grouped_mm` gathers none; where torch has no kernel
        for it, it asks the device for a number, which no capture allows.
        """
        few = chosen.numel() <= module.num_experts
        compute: Any = batched_mm_experts_forward if few else grouped_mm_experts_forward
        return compute(module, hidden, chosen, shares)  # type: ignore[no-any-return]

    ExpertsInterface.register(GROUPED, grouped)
    ExpertsInterface.register(ON_GPU, on_gpu)
