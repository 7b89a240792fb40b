"""Tensor parallelism: a model's linear layers divided over ranks, as the plan for its family says.

The plan is transformers' (`base_model_tp_plan` of the configuration and `_tp_plan` of the class), or ours where it has
none: which layers are divided by their outputs (`colwise`), which by their inputs (`rowwise`), which results are put
together again. What it says is done here in plain tensors; docs/tensor-parallel.md says why not by DTensors, nor by
`from_pretrained(tp_plan=...)`.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import linear, pad
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from engines.base import EngineSpec
from engines.pytorch.engine import TorchEngine
from engines.pytorch.hook import cache_shape
from mtad.errors import InvalidInput, refused_as

GATHERED = ("colwise_gather_output", "colwise_rep")
"""Divided by outputs, which are put together again; the two names are of different releases."""
SPLIT = ("rowwise_split_input", "rowwise_rep")
"""Divided by inputs, which are whole where they come from."""
REPLICATED = ("replicate", "replicated_with_grad_allreduce")
"""The same on every rank."""
HEADS = "heads"
"""An attention that reshapes by its own `num_heads`, which become a rank's; a style of ours."""

OWN: dict[str, dict[str, str]] = {
    "OPTForCausalLM": {
        "model.decoder.layers.*.self_attn": HEADS,
        "model.decoder.layers.*.self_attn.q_proj": "colwise",
        "model.decoder.layers.*.self_attn.k_proj": "colwise",
        "model.decoder.layers.*.self_attn.v_proj": "colwise",
        "model.decoder.layers.*.self_attn.out_proj": "rowwise",
        "model.decoder.layers.*.fc1": "colwise",
        "model.decoder.layers.*.fc2": "rowwise",
        "lm_head": GATHERED[0],
    },
}
"""Plans of ours, by architecture; used only where transformers has none."""


class Ranks:
    """The processes a model is divided over, as one of them sees them.

    Of these themselves, which never meet, shapes are right and numbers are not.
    """

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world

    def sum(self, part: Tensor) -> Tensor:
        """The sum of all ranks' `part`, the same on each; may be written over `part`."""
        return part

    def gather(self, part: Tensor) -> Tensor:
        """All ranks' `part` along the last axis, in the order of the ranks; each is of the same shape."""
        return torch.cat([part] * self.world, -1)


class ColumnLinear(torch.nn.Module):
    """One rank's outputs of a linear layer.

    Args:
        ranks: who has the others.
        gathers: return all outputs instead. Only then may their number not be a multiple of the ranks'.
    """

    def __init__(self, whole: torch.nn.Linear, ranks: Ranks, gathers: bool = False) -> None:
        super().__init__()
        self.out_features, self._ranks, self._gathers = whole.out_features, ranks, gathers
        self._each = -(-whole.out_features // ranks.world)
        mine = slice(ranks.rank * self._each, (ranks.rank + 1) * self._each)
        self.weight = _parameter(whole.weight[mine])
        self.bias = None if whole.bias is None else _parameter(whole.bias[mine])

    def forward(self, inputs: Tensor) -> Tensor:
        """[.., inputs] to [.., outputs / world], or to [.., outputs]."""
        part = linear(inputs, self.weight, self.bias)
        if not self._gathers:
            return part
        short = self._each - part.shape[-1]
        return self._ranks.gather(pad(part, (0, short)) if short else part)[..., : self.out_features]


class RowLinear(torch.nn.Module):
    """One rank's part of a sum: a linear layer over some of its inputs.

    Args:
        ranks: who has the others.
        splits: the inputs come whole.
    """

    def __init__(self, whole: torch.nn.Linear, ranks: Ranks, splits: bool = False) -> None:
        super().__init__()
        each = whole.in_features // ranks.world
        self._mine, self._ranks, self._splits = slice(ranks.rank * each, (ranks.rank + 1) * each), ranks, splits
        self.weight = _parameter(whole.weight[:, self._mine])
        self.bias = None if whole.bias is None else _parameter(whole.bias)

    def forward(self, inputs: Tensor) -> Tensor:
        """[.., inputs / world], or [.., inputs], to [.., outputs]."""
        part = self._ranks.sum(linear(inputs[..., self._mine] if self._splits else inputs, self.weight))
        return part if self.bias is None else part + self.bias


def _parameter(part: Tensor) -> torch.nn.Parameter:
    """In memory of its own, so that the whole can go."""
    return torch.nn.Parameter(part.detach().clone(), requires_grad=False)


def plan_of(model: PreTrainedModel) -> dict[str, str]:
    """The plan of a model's family: style by name, with `*` for layer numbers; transformers' before `OWN`, or empty."""
    base = getattr(model.config, "base_model_tp_plan", None) or {}
    head = getattr(type(model), "_tp_plan", None) or {}
    theirs = {**{f"{model.base_model_prefix}.{name}": style for name, style in base.items()}, **head}
    return theirs or OWN.get(type(model).__name__, {})


def shard(model: PreTrainedModel, ranks: Ranks) -> None:
    """Keep of `model` what is `ranks.rank`'s, in place.

    Raises:
        InvalidInput: its family has no plan, or one with layers of a kind that is not divided here, or a layer does not
            divide by the number of ranks.
    """
    plan, family = plan_of(model), type(model).__name__
    known = {"colwise", "rowwise", HEADS, *GATHERED, *SPLIT, *REPLICATED}
    if not plan:
        problem = f"there is no tensor-parallel plan for {family}; leave it out"
        raise InvalidInput("tensor_parallel", ranks.world, problem)
    parts = {name: module for name, module in model.named_modules() if name}
    parameters = [name for name, _ in model.named_parameters()]
    for pattern, style in plan.items():
        wanted = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
        found = list(filter(wanted.fullmatch, parts))
        if plan is OWN.get(family) and not found:
            problem = f"{family} of the installed transformers has no {pattern}, which our plan shards"
            raise InvalidInput("tensor_parallel", ranks.world, problem)
        if style in known:
            for name in found:
                if style not in REPLICATED:
                    model.set_submodule(name, _divided(name, parts[name], style, ranks))
        elif found or any(map(wanted.fullmatch, parameters)):
            problem = f"the plan of {family} shards {pattern} by {style!r}, which is not supported"
            raise InvalidInput("tensor_parallel", ranks.world, problem)


def _divided(name: str, module: torch.nn.Module, style: str, ranks: Ranks) -> torch.nn.Module:
    if style == HEADS:
        attention: Any = module
        attention.num_heads = _even(attention.num_heads, f"num_heads of {name}", ranks)
        return module
    if not isinstance(module, torch.nn.Linear):
        problem = f"{name} is a {type(module).__name__}; only plain linear layers can be sharded"
        raise InvalidInput("tensor_parallel", ranks.world, problem)
    if style in GATHERED:
        return ColumnLinear(module, ranks, gathers=True)
    if style == "colwise":
        _even(module.out_features, f"outputs of {name}", ranks)
        return ColumnLinear(module, ranks)
    _even(module.in_features, f"inputs of {name}", ranks)
    return RowLinear(module, ranks, style in SPLIT)


def _even(count: int, what: str, ranks: Ranks) -> int:
    if count % ranks.world:
        raise InvalidInput("tensor_parallel", ranks.world, f"the {count} {what} are not divisible by it")
    return count // ranks.world


def share(folder: Path, spec: EngineSpec, world: int) -> tuple[EngineSpec, int]:
    """What each of `world` ranks would have of an engine folder of the format `torch`; reads no weights.

    Returns:
        the specification of its engine, whose `kv_heads` are those of its cache; and bytes of its weights, at most: the
        last rank's are fewer where the vocabulary does not divide.

    Raises:
        InvalidInput: it cannot be divided so.
    """
    if spec.format != "torch":
        problem = f"an engine of the format {spec.format} runs on one device; export the pair with --to torch"
        raise InvalidInput("tensor_parallel", world, problem)
    with refused_as("folder", str(folder), "its config.json cannot be read, export again"):
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    heads = config.get_text_config().num_attention_heads
    ranks = Ranks(0, world)
    for name, count in (("attention heads", heads), ("KV heads", spec.kv_heads)):
        _even(count, f"{name} of {spec.architecture}", ranks)
    with refused_as("tensor_parallel", world, f"{spec.architecture} cannot be sharded"), FakeTensorMode():
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        shard(model, ranks)
        _, kv_heads, _, _ = cache_shape(model)
        weights = sum(parameter.numel() for parameter in model.parameters()) * spec.torch_dtype.itemsize
    return replace(spec, kv_heads=kv_heads), weights


def load_share(
    folder: Path, spec: EngineSpec, ranks: Ranks, device: str = "cpu", attention: str | None = None
) -> TorchEngine:
    """This rank's engine. Not executed on a GPU.

    Files are mapped into memory, and what is not this rank's is not copied: all ranks of a machine together read the
    files once, and each takes memory for its own part.
    """
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=spec.torch_dtype, local_files_only=True, trust_remote_code=False
    )
    shard(model, ranks)
    return TorchEngine(model.to(device), spec, attention, device, fused=False)  # finding parts would run all ranks
