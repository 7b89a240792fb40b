"""Fewer kernels per decoder layer: parts of a Hugging Face model replaced by ones that launch fewer, in place.

A part is found by what it is given and by what it computes on probe inputs, so one description serves all families; the
few names that it relies on are transformers' own (`apply_rotary_pos_emb`, `weight`, `variance_epsilon`). What is not
recognised stays as it is. Replaced are

* linear layers of one module that are given the same tensor (queries, keys and values; gate and up): one product;
* root mean square norms, and activations that a model spells out;
* a gated feed-forward block: two products, and one kernel for its activation and the multiplication;
* rotary positions: queries and keys are turned by the kernel that stores the keys and values.

Outputs are those of the checkpoint up to rounding: a fused kernel rounds once.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import permutations
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface, PreTrainedModel, activations
from transformers.masking_utils import AttentionMaskInterface

from engines.pytorch.fused_layers import ACTIVATIONS, Activation, Gated, JoinedLinear, JoinedPart, RmsNorm
from engines.pytorch.hook import run_once
from engines.pytorch.paged_cache import Rotation

log = logging.getLogger(__name__)

PROBE = "mtad-probe"
"""Under this name the attention that only looks at what it is given."""
ROPE = "apply_rotary_pos_emb"
"""transformers' name of what turns queries and keys; it is looked up by an attention's `forward`."""


class _Look:
    """Stands for what turns queries and keys during the probe, and looks where they go.

    Attributes:
        found: whether the model's own function is rotary positions as `layer_kernels` has them, and both go to
            attention untouched.
    """

    def __init__(self, theirs: Callable[..., tuple[Tensor, Tensor]]) -> None:
        self.found, self._theirs = False, theirs
        self._given: tuple[Tensor, ...] = ()
        self._known = False

    def __call__(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *more: Any, **named: Any) -> Any:
        theirs = self._theirs(query, key, cos, sin, *more, **named)
        ours = _turned(query, cos, sin), _turned(key, cos, sin)
        self._known = all(map(_alike, ours, theirs)) and not more and not named
        self._given = query, key
        return query, key

    def look(self, query: Tensor, key: Tensor) -> None:
        """Attention is given these."""
        self.found = self._known and query is self._given[0] and key is self._given[1]


def _look(module: torch.nn.Module, query: Tensor, key: Tensor, *more: Any, **named: Any) -> tuple[Tensor, None]:
    if isinstance(rotation := getattr(module, "rotation", None), _Look):
        rotation.look(query, key)
    return torch.zeros_like(query.transpose(1, 2)), None


AttentionInterface.register(PROBE, _look)
AttentionMaskInterface.register(PROBE, lambda *args, **kwargs: None)


@torch.no_grad()
def fuse(model: PreTrainedModel) -> None:
    """Replace what is recognised, in place; the model runs once, on two tokens.

    Weights of joined layers are copied, one group at a time, and the separate ones are freed. A model with rotary
    positions gets an attribute `rotation`, and so does each of its attentions; outside an engine it runs no more.
    """
    if hasattr(model, "rotation"):
        return  # it is fused
    attentions = {name: module for name, module in model.named_modules() if _calls_rope(module)}
    looks = {name: _Look(_globals(module)[ROPE]) for name, module in attentions.items()}
    for name, module in attentions.items():
        _call_instead(module, looks[name])
    together = _together(model)
    for module in attentions.values():
        del module.forward, module.rotation
    if attentions and all(look.found for look in looks.values()):
        model.rotation = Rotation()
        for module in attentions.values():
            _call_instead(module, model.rotation)
    fused = Counter({"rotary positions": len(attentions) if hasattr(model, "rotation") else 0})
    for names in together:
        layers = [model.get_submodule(name) for name in names]
        joined = JoinedLinear(layers)  # type: ignore[arg-type]
        for left, name in enumerate(reversed(names[1:]), 1):
            model.set_submodule(name, JoinedPart(joined, left))
        model.set_submodule(names[0], joined)
        fused["joined layers"] += 1
    for kind, make in (("norms", _norm), ("gated blocks", _gated), ("activations", _activation)):
        for name, module in list(model.named_modules()):
            if (found := make(module)) is not None:
                model.set_submodule(name, found)
                fused[kind] += 1
    if model.device.type == "cuda":
        torch.cuda.empty_cache()  # of the separate weights' sizes nothing is asked for any more
    log.info("fused: %s", ", ".join(f"{count} {what}" for what, count in sorted(fused.items()) if count) or "nothing")


def _together(model: PreTrainedModel) -> list[list[str]]:
    """Plain linear layers of one module that are given the same tensor, in the order they run."""
    weights = Counter(parameter.data_ptr() for _, parameter in model.named_parameters(remove_duplicate=False))
    groups: dict[tuple[str, int, bool], list[str]] = {}
    seen: list[Tensor] = []  # kept, so that no two of them have one id

    def note(name: str, layer: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen.append(inputs[0])
        groups.setdefault((name.rpartition(".")[0], id(inputs[0]), layer.bias is None), []).append(name)

    hooks = [
        module.register_forward_pre_hook(partial(note, name))
        for name, module in model.named_modules()
        if _is_plain(module) and weights[module.weight.data_ptr()] == 1
    ]
    try:
        run_once(model, PROBE)
    finally:
        for hook in hooks:
            hook.remove()
    return [names for names in groups.values() if len(names) == len(set(names)) > 1]


def _is_plain(module: torch.nn.Module) -> bool:
    return type(module) is torch.nn.Linear and not module._forward_hooks and not module._forward_pre_hooks


def _globals(module: torch.nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = type(module).forward.__globals__
    return found


def _calls_rope(module: torch.nn.Module) -> bool:
    forward = type(module).forward
    plain = isinstance(forward, FunctionType) and not hasattr(forward, "__wrapped__") and "forward" not in vars(module)
    return plain and ROPE in forward.__code__.co_names and ROPE in forward.__globals__


def _call_instead(module: torch.nn.Module, rotation: Rotation | _Look) -> None:
    """Let this module, and no other of its class, call `rotation` where it would call the function named `ROPE`."""
    theirs = type(module).forward
    names = {**_globals(module), ROPE: rotation}
    own = FunctionType(theirs.__code__, names, theirs.__name__, theirs.__defaults__, theirs.__closure__)
    own.__kwdefaults__ = theirs.__kwdefaults__
    module.forward, module.rotation = MethodType(own, module), rotation  # type: ignore[assignment]


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[R, H, S, D] by rotary positions `cos`, `sin` [R, S, T]: entries i and i + T / 2 against each other."""
    size = cos.shape[-1]
    first, second = x[..., : size // 2], x[..., size // 2 : size]
    turned = x[..., :size] * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]
    return torch.cat([turned, x[..., size:]], -1)


def _alike(ours: Tensor, theirs: Tensor) -> bool:
    """Whether two results differ by rounding only."""
    bound = {torch.float32: 1e-4, torch.float16: 1e-2}.get(theirs.dtype, 3e-2)
    return ours.shape == theirs.shape and bool((ours - theirs).abs().max() <= bound * theirs.abs().max())


def _norm(module: torch.nn.Module) -> RmsNorm | None:
    """The same, if it is a root mean square norm: compared on vectors whose mean is not 0, and on small ones."""
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if (
        not isinstance(weight, torch.nn.Parameter)
        or weight.dim() != 1
        or not isinstance(eps, float)
        or len(vars(module)["_parameters"]) > 1
    ):
        return None
    x = _some(weight, weight.shape[0]) + 1.0
    x = torch.cat([x, x * 1e-3], 1)
    for offset in (0.0, 1.0):
        ours = functional.rms_norm(x.float(), weight.shape, weight.float() + offset, eps).to(x.dtype)
        if all(map(_alike, ours[0], module(x)[0])):
            return RmsNorm(weight, eps, offset)
    return None


def _gated(module: torch.nn.Module) -> Gated | None:
    """The same, if it is a gated feed-forward block: products that are wide, an activation, a product that is not."""
    children = [child for child in module.children() if not isinstance(child, JoinedPart | torch.nn.Dropout)]
    names = [name for name in map(_activation_name, children) if name]
    joined: list[Any] = [child for child in children if isinstance(child, JoinedLinear)]
    plain: list[Any] = [child for child in children if _is_plain(child)]
    if len(children) != 3 or len(names) != 1 or len(joined) + len(plain) != 2:
        return None
    for up, down in permutations([*joined, *plain]):
        if up.weight.shape[0] == 2 * down.weight.shape[1] and _is_plain(down):
            x = _some(up.weight, up.weight.shape[1])
            values, factor = (up.whole(x) if joined else up(x)).chunk(2, -1)
            if _alike(down(ACTIVATIONS[names[0]](values) * factor), module(x)):
                return Gated(up, names[0], down)
    return None


def _activation(module: torch.nn.Module) -> Activation | None:
    name = _activation_name(module)
    return Activation(name) if name else None


def _activation_name(module: torch.nn.Module) -> str | None:
    """Which of `ACTIVATIONS` it is, if any."""
    if type(module).__module__ not in (activations.__name__, torch.nn.modules.activation.__name__):
        return None
    x = torch.linspace(-6, 6, 256)  # on the CPU, in float32: it has no weights
    same = (name for name, known in ACTIVATIONS.items() if torch.allclose(known(x), module(x), atol=1e-6))
    return next(same, None) if not list(module.parameters()) else None


def _some(like: Tensor, size: int) -> Tensor:
    """Random vectors [1, 2, size], without touching anybody's random numbers."""
    values = torch.randn(1, 2, size, generator=torch.Generator().manual_seed(0))
    return values.to(like.device, like.dtype)
