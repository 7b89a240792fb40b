"""Parts of a decoder layer that launch few kernels: what `engines.pytorch.fusion` replaces a model's own by."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import linear
from transformers import PreTrainedModel

from engines.pytorch.hook import run_once
from engines.pytorch.layer_ops import Norm, gate, narrow_product, product_tile, rms_norm
from mtad.errors import InvalidInput

ACTIVATIONS: dict[str, torch.nn.Module] = {
    "silu": torch.nn.SiLU(),
    "gelu": torch.nn.GELU(),
    "gelu_tanh": torch.nn.GELU(approximate="tanh"),
    "relu": torch.nn.ReLU(),
}
"""Those that the kernel of `engines.pytorch.layer_ops.gate` knows."""


class JoinedLinear(torch.nn.Module):
    """Linear layers that are given the same tensor, as one product; stands where the first of them stood."""

    def __init__(self, layers: Sequence[torch.nn.Linear]) -> None:
        super().__init__()
        self.sizes = [layer.out_features for layer in layers]
        self.weight = _frozen(torch.cat([layer.weight.detach() for layer in layers]))
        biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
        self.bias = _frozen(torch.cat(biases)) if biases else None
        self._given: Tensor | None = None
        self._rest: list[Tensor] = []

    def whole(self, x: Tensor) -> Tensor:
        """What all of them give, one behind the other."""
        return linear(x, self.weight, self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """What the first gives; the others take theirs."""
        first, *self._rest = torch.split(self.whole(x), self.sizes, -1)
        self._given = x
        return first

    def take(self, x: Tensor, left: int) -> Tensor:
        """What the next of them gives of the same `x`, if `left` are left with it."""
        if self._given is not x or len(self._rest) != left:
            raise InvalidInput("attention", "triton", "the model runs its layers in another order; give sdpa")
        if left == 1:
            self._given = None
        return self._rest.pop(0)


class JoinedPart(torch.nn.Module):
    """Stands where another of them stood."""

    def __init__(self, joined: JoinedLinear, left: int) -> None:
        super().__init__()
        self._take, self._left = joined.take, left

    def forward(self, x: Tensor) -> Tensor:
        return self._take(x, self._left)


class RmsNorm(torch.nn.Module):
    """A root mean square norm; `offset` is added to its weight."""

    def __init__(self, weight: torch.nn.Parameter, eps: float, offset: float) -> None:
        super().__init__()
        self.weight, self.eps, self.offset = weight, eps, offset

    @staticmethod
    @torch.no_grad()
    def of(module: torch.nn.Module) -> RmsNorm | None:
        """What computes the same as `module`, with its weight, if that is a root mean square norm.

        Compared with a random weight, since the module's own may be a shape alone, on vectors whose mean is not 0 and
        on small ones.
        """
        weight = getattr(module, "weight", None)
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if not isinstance(weight, torch.nn.Parameter) or weight.dim() != 1:
            return None
        if not isinstance(eps, float) or len(module._parameters) > 1:
            return None
        random = torch.randn(3, weight.shape[0], generator=torch.Generator().manual_seed(0))
        random = random.to(weight.device, weight.dtype)
        x, own = torch.cat([random[:2] + 1.0, random[:2] * 1e-3]), random[2]
        probe = copy.copy(module)
        probe._parameters = {"weight": _frozen(own)}
        with contextlib.suppress(TypeError, ValueError, RuntimeError):  # it is given something else than one tensor
            theirs = probe(x)
            for offset in (0.0, 1.0):  # Gemma keeps the weight's distance from one
                ours = functional.rms_norm(x.float(), own.shape, own.float() + offset, eps).to(x.dtype)
                if all(map(alike, ours, theirs)):
                    return RmsNorm(weight, eps, offset)
        return None

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, self.offset)


class DeferredNorm(RmsNorm):
    """A norm that does nothing itself: what is given its input applies it, a gated block, or what rotates positions."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class Gated(torch.nn.Module):
    """A gated feed-forward block. `norm` is what its input goes through before, if that waits for it."""

    def __init__(self, up: JoinedLinear | torch.nn.Linear, activation: str, down: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.activation, self.down = up, activation, down
        self.norm: Norm | None = None

    def forward(self, x: Tensor) -> Tensor:
        weight = self.up.weight
        if self.up.bias is None and (tile := product_tile(x, weight, gated=True)):
            out = x.new_empty(*x.shape[:-1], len(weight) // 2)
            return self.down(narrow_product(x.contiguous(), weight, out, tile, self.activation, self.norm))
        x = rms_norm(x, *self.norm) if self.norm else x
        return self.down(gate(linear(x, weight, self.up.bias), self.activation))


@torch.no_grad()
def defer_norms(model: PreTrainedModel, attention: str) -> int:
    """Let gated blocks apply the norms that they are given the results of, and count those that nothing else needs.

    Blocks of one name are tried together: norms that wait give no numbers, and the block is given what they were given,
    so that another reader shows. `attention` is the one that the model then runs with.
    """
    ran: list[tuple[str, Tensor, Tensor]] = []  # of each norm: its name, what it was given, and its result
    groups = dict[tuple[str, str], dict[str, Gated]]()

    def note(name: str, norm: torch.nn.Module, inputs: tuple[Tensor, ...], result: Tensor) -> Tensor:
        result = torch.full_like(result, torch.nan) if isinstance(norm, DeferredNorm) else result
        ran.append((name, inputs[0], result))
        return result

    def look(block: str, gated: Gated, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        for name, before, result in ran:
            if result is inputs[0]:
                groups.setdefault((_kind(name), _kind(block)), {})[name] = gated
                return (before if gated.norm else result,)
        return inputs

    def logits() -> Tensor:
        ran.clear()
        with contextlib.ExitStack() as hooks:
            for name, module in model.named_modules():
                if isinstance(module, RmsNorm):
                    hooks.enter_context(module.register_forward_hook(partial(note, name)))
                if isinstance(module, Gated):
                    hooks.enter_context(module.register_forward_pre_hook(partial(look, name)))
            return run_once(model, attention)[1].float()

    plain, count = logits(), 0
    for users in list(groups.values()):
        norms: dict[str, Any] = {name: model.get_submodule(name) for name in users}
        for name, norm in norms.items():
            users[name].norm = Norm(norm.weight, norm.eps, norm.offset)
            model.set_submodule(name, DeferredNorm(norm.weight, norm.eps, norm.offset))
        if len(set(users.values())) == len(users) and _same(logits, plain):
            count += len(norms)
            continue
        for name, norm in norms.items():
            users[name].norm = None
            model.set_submodule(name, norm)
    return count


def _kind(name: str) -> str:
    """A module's name without the number of its layer."""
    return re.sub(r"\.\d+\.", ".", name)


def _same(logits: Callable[[], Tensor], plain: Tensor) -> bool:
    """Whether a model that was changed gives the logits that it gave, up to rounding: it may break, or give NaN."""
    try:
        return bool((logits() - plain).norm() <= 0.1 * plain.norm())
    except (AttributeError, RuntimeError, TypeError):
        return False


class Unadded:
    """What a linear layer gives, not computed yet: the product adds itself, in place, to what it is added to.

    Nothing else can be done with it. `tried`: what it was added to becomes no number, so that who reads it later shows.
    """

    def __init__(self, x: Tensor, weight: Tensor, tried: bool) -> None:
        self._x, self._weight, self._tried = x, weight, tried

    def __radd__(self, residual: Tensor) -> Tensor:
        if residual.shape != (*self._x.shape[:-1], len(self._weight)):
            raise TypeError("is added to a tensor of another shape")
        if self._tried or not residual.is_contiguous() or residual.dtype != self._weight.dtype:
            added = residual + linear(self._x, self._weight)
            if self._tried:
                residual.fill_(torch.nan)
            return added
        if tile := product_tile(self._x, self._weight, gated=False):
            return narrow_product(self._x.contiguous(), self._weight, residual, tile)
        flat = residual.view(-1, residual.shape[-1])
        return flat.addmm_(self._x.reshape(-1, self._x.shape[-1]), self._weight.t()).view(residual.shape)

    __add__ = __radd__


class AddedLinear(torch.nn.Module):
    """A linear layer without a bias whose output is only ever added to another tensor, which is then not used again."""

    def __init__(self, layer: torch.nn.Linear) -> None:
        super().__init__()
        self.weight, self.tried = layer.weight, True

    def forward(self, x: Tensor) -> Unadded:
        return Unadded(x, self.weight, self.tried)


def add_in_place(model: PreTrainedModel, attention: str) -> int:
    """Replace linear layers whose output is only added to the residual stream, and count them.

    Layers of one name are tried together: another use of their output raises, and who still reads what they were added
    to gets no numbers. `attention` is the one that the model then runs with.
    """
    groups: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        if is_plain(module) and module.bias is None and module is not model.get_output_embeddings():
            groups.setdefault(_kind(name), []).append(name)

    def logits() -> Tensor:
        return run_once(model, attention)[1].float()

    plain, count = logits(), 0
    for names in groups.values():
        layers: list[Any] = [model.get_submodule(name) for name in names]
        added = [AddedLinear(layer) for layer in layers]
        for name, layer in zip(names, added, strict=True):
            model.set_submodule(name, layer)
        good = _same(logits, plain)
        count += len(names) if good else 0
        for name, layer, own in zip(names, layers, added, strict=True):
            own.tried = False
            model.set_submodule(name, own if good else layer)
    return count


def is_plain(module: torch.nn.Module) -> bool:
    """Whether it is a linear layer and nothing more."""
    return type(module) is torch.nn.Linear and not module._forward_hooks and not module._forward_pre_hooks


def alike(ours: Tensor, theirs: Tensor) -> bool:
    """Whether two results differ by rounding only."""
    bound = {torch.float32: 1e-4, torch.float16: 1e-2}.get(theirs.dtype, 3e-2)
    return ours.shape == theirs.shape and bool((ours - theirs).abs().max() <= bound * theirs.abs().max())


def _frozen(values: Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(values, requires_grad=False)
