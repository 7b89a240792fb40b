"""Fewer kernels per decoder layer: parts of a Hugging Face model replaced by ones that launch fewer, in place.

A part is found by what it is given and by what it computes on probe inputs, so one description serves all families; the
few names that it relies on are transformers' own (`apply_rotary_pos_emb`, `weight`, `variance_epsilon`). What is not
recognised stays as it is. Replaced are

* linear layers of one module that are given the same tensor (queries, keys and values; gate and up): one product;
* root mean square norms, and activations that a model spells out;
* a gated feed-forward block: two products, and one kernel for its activation and the multiplication; of few tokens on
  a large GPU, one kernel for the norm before it, the first product and the activation;
* linear layers whose output is added to the residual stream: the product adds to it in place;
* rotary positions: queries and keys are rotated, and norms of theirs applied before, by the kernel that stores the
  keys and values.

Outputs are those of the checkpoint up to rounding: a fused kernel rounds once.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import permutations
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel, activations
from transformers.masking_utils import AttentionMaskInterface

from engines.pytorch.fused_layers import (
    ACTIVATIONS,
    DeferredNorm,
    Gated,
    JoinedLinear,
    JoinedPart,
    RmsNorm,
    add_in_place,
    alike,
    defer_norms,
    is_plain,
)
from engines.pytorch.hook import run_once
from engines.pytorch.layer_ops import Norm
from engines.pytorch.paged_cache import Rotation

log = logging.getLogger(__name__)

PROBE = "mtad-probe"
"""Under this name the attention that only looks at what it is given."""
ROPE = "apply_rotary_pos_emb"
"""transformers' name of what rotates queries and keys; it is looked up by an attention's `forward`."""


class _RopeProbe:
    """Stands for what rotates queries and keys while the model runs once, and sees where they go.

    Attributes:
        found: whether the model's own function is rotary positions as `layer_kernels` has them, and both go to
            attention untouched.
        norms: names of the norms that queries and keys come from, head by head; none if they also go elsewhere.
    """

    def __init__(self, theirs: Callable[..., tuple[Tensor, Tensor]]) -> None:
        self.found, self._theirs = False, theirs
        self.norms: list[str] = []
        self._given: tuple[Tensor, ...] = ()
        self._normed: dict[int, tuple[str, Tensor]] = {}
        self._known = False

    def mark(self, name: str, norm: torch.nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """A norm's output, such that what is made of it wants gradients."""
        marked = output.detach().requires_grad_()
        self._normed[marked.data_ptr()] = name, marked
        return marked

    def __call__(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *more: Any, **named: Any) -> Any:
        theirs = self._theirs(query, key, cos, sin, *more, **named)
        ours = _rotate(query, cos, sin), _rotate(key, cos, sin)
        self._known = all(map(alike, ours, theirs)) and not more and not named
        self._given = query, key
        known = ((*self._normed.get(x.data_ptr(), ("", x[:0])), x) for x in (query, key))
        self.norms = [
            name for name, normed, x in known if (normed.numel(), normed.shape[-1]) == (x.numel(), x.shape[-1])
        ]
        return query, key

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        self.found = self._known and query is self._given[0] and key is self._given[1]
        self.leave(self, (), (value,))

    def leave(self, attention: object, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> None:
        """Forget the norms if another output also depends on them."""
        if outputs[0].requires_grad:
            self.norms = []


def _attend_probe(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, *more: Any, **named: Any
) -> tuple[Tensor, None]:
    if isinstance(rotation := getattr(module, "rotation", None), _RopeProbe):
        rotation.attend(query, key, value)
    return query.detach().transpose(1, 2), None


AttentionInterface.register(PROBE, _attend_probe)
AttentionMaskInterface.register(PROBE, lambda *args, **kwargs: None)


@torch.no_grad()
def fuse(model: PreTrainedModel) -> None:
    """Replace what is recognised, in place; the model runs once, on two tokens.

    Weights of joined layers are copied, one group at a time, and the separate ones are freed. A model with rotary
    positions gets an attribute `rotation`, and so does each of its attentions; outside an engine it runs no more.
    """
    if hasattr(model, "rotation"):
        return  # it is fused
    probes = {m: _RopeProbe(type(m).forward.__globals__[ROPE]) for m in model.modules() if _calls_rope(m)}
    model.requires_grad_(False)
    with ExitStack() as hooks:
        for module, probe in probes.items():
            _call_instead(module, probe, probe)
            for name, child in module.named_children():
                if RmsNorm.of(child):
                    hooks.enter_context(child.register_forward_hook(partial(probe.mark, name)))
            hooks.enter_context(module.register_forward_hook(probe.leave))
        joinable = _joinable(model)
    for module in probes:
        del module.forward, module.rotation
    fused = Counter[str]()
    for names in joinable:
        layers = [model.get_submodule(name) for name in names]
        joined = JoinedLinear(layers)  # type: ignore[arg-type]
        for left, name in enumerate(reversed(names[1:]), 1):
            model.set_submodule(name, JoinedPart(joined, left))
        model.set_submodule(names[0], joined)
        fused["joined layers"] += 1
    for kind, make in (("norms", RmsNorm.of), ("gated blocks", _gated), ("activations", _activation)):
        for name, module in list(model.named_modules()):
            if (found := make(module)) is not None:
                model.set_submodule(name, found)
                fused[kind] += 1
    fused["norms of gated blocks"] = defer_norms(model, PROBE)
    fused["added products"] = add_in_place(model, PROBE)
    if probes and all(probe.found for probe in probes.values()):
        model.rotation = Rotation()
        for module, probe in probes.items():
            _call_instead(module, _with_norms(module, probe.norms, model.rotation), model.rotation)
            fused["rotary positions"] += 1
    if model.device.type == "cuda":
        torch.cuda.empty_cache()  # no later tensor has the size of a separate weight
    log.info("fused: %s", ", ".join(f"{count} {what}" for what, count in sorted(fused.items())) or "nothing")


def _joinable(model: PreTrainedModel) -> list[list[str]]:
    """Plain linear layers of one module that are given the same tensor, in the order they run."""
    weights = Counter(parameter.data_ptr() for _, parameter in model.named_parameters(remove_duplicate=False))
    groups: dict[tuple[str, int, bool], list[str]] = {}
    seen: list[Tensor] = []  # kept, so that no two of them have one id

    def note(name: str, layer: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen.append(inputs[0])
        groups.setdefault((name.rpartition(".")[0], id(inputs[0]), layer.bias is None), []).append(name)

    with ExitStack() as hooks, torch.enable_grad():  # for the marks of `_RopeProbe`
        for name, module in model.named_modules():
            if is_plain(module) and weights[module.weight.data_ptr()] == 1:
                hooks.enter_context(module.register_forward_pre_hook(partial(note, name)))
        run_once(model, PROBE)
    return [names for names in groups.values() if len(names) == len(set(names)) > 1]


def _calls_rope(module: torch.nn.Module) -> bool:
    forward = type(module).forward
    plain = isinstance(forward, FunctionType) and not hasattr(forward, "__wrapped__") and "forward" not in vars(module)
    return plain and ROPE in forward.__code__.co_names and ROPE in forward.__globals__


def _with_norms(module: torch.nn.Module, names: Sequence[str], rotation: Rotation) -> Callable[..., Any]:
    """What an attention is to call: `rotation`, after the norms of queries and keys if it has both of one kind."""
    found = [norm for name in names if (norm := RmsNorm.of(module.get_submodule(name)))]
    if len(found) < 2 or len({(norm.eps, norm.offset) for norm in found}) > 1:
        return rotation
    for name, norm in zip(names, found, strict=True):
        module.set_submodule(name, DeferredNorm(norm.weight, norm.eps, norm.offset))
    query, key = (Norm(norm.weight, norm.eps, norm.offset) for norm in found)
    return partial(rotation, norms=(query, key))


def _call_instead(module: torch.nn.Module, called: Callable[..., Any], rotation: Rotation | _RopeProbe) -> None:
    """Let this module, and no other of its class, call `called` where it would call the function named `ROPE`."""
    theirs = type(module).forward
    names = {**theirs.__globals__, ROPE: called}
    own = FunctionType(theirs.__code__, names, theirs.__name__, theirs.__defaults__, theirs.__closure__)
    own.__kwdefaults__ = theirs.__kwdefaults__
    module.forward, module.rotation = MethodType(own, module), rotation  # type: ignore[assignment]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[R, H, S, D] by rotary positions `cos`, `sin` [R, S, T]: entries i and i + T / 2 against each other."""
    size = cos.shape[-1]
    first, second = x[..., : size // 2], x[..., size // 2 : size]
    rotated = x[..., :size] * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]
    return torch.cat([rotated, x[..., size:]], -1)


def _gated(module: torch.nn.Module) -> Gated | None:
    children = [child for child in module.children() if not isinstance(child, JoinedPart | torch.nn.Dropout)]
    names = [name for name in map(_activation_name, children) if name]
    joined: list[Any] = [child for child in children if isinstance(child, JoinedLinear)]
    plain: list[Any] = [child for child in children if is_plain(child)]
    if len(children) != 3 or len(names) != 1 or len(joined) + len(plain) != 2:
        return None
    for up, down in permutations([*joined, *plain]):
        if up.weight.shape[0] == 2 * down.weight.shape[1] and is_plain(down):
            x = torch.randn(1, 2, up.weight.shape[1], generator=torch.Generator().manual_seed(0)).to(up.weight)
            values, factor = (up.whole(x) if joined else up(x)).chunk(2, -1)
            if alike(down(ACTIVATIONS[names[0]](values) * factor), module(x)):
                return Gated(up, names[0], down)
    return None


def _activation(module: torch.nn.Module) -> torch.nn.Module | None:
    return ACTIVATIONS[name] if (name := _activation_name(module)) else None


def _activation_name(module: torch.nn.Module) -> str | None:
    if type(module).__module__ not in (activations.__name__, torch.nn.modules.activation.__name__):
        return None
    x = torch.linspace(-6, 6, 256)  # on the CPU, in float32: it has no weights
    same = (name for name, known in ACTIVATIONS.items() if torch.allclose(known(x), module(x), atol=1e-6))
    return next(same, None) if not list(module.parameters()) else None
