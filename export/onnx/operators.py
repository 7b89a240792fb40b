"""What of a Hugging Face model becomes one ONNX operator: its norms, and the rotations of its queries and keys."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm
from transformers import PreTrainedModel

from engines.pytorch.fused_layers import RmsNorm, alike


class _RMSNormalization(RmsNorm):
    """Stands in for a model's RMSNorm and becomes the operator (ONNX RMSNormalization-23) instead of its parts.

    A weight that is kept as its distance from one multiplies in float32, as transformers' Gemma norms do: the sum has
    too many bits for 16. Any other multiplies in the model's dtype, as in the standard and in Llama.
    """

    def forward(self, x: Tensor) -> Tensor:
        if self.offset:
            weight = self.offset + self.weight.float()
            return rms_norm(x.float(), weight.shape, weight, self.eps).to(x.dtype)
        return rms_norm(x, self.weight.shape, self.weight, self.eps)


def _halves(module: object, given: object, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """A rotary embedding's cosines and sines without their second half, which repeats the first."""
    return tuple(x[..., : x.shape[-1] // 2] for x in angles)


def _parts(module: object, given: object, turns: Tensor) -> Tensor:
    """A rotary embedding's complex numbers as their two parts."""
    return torch.view_as_real(turns)


def _rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Stands in for `apply_rotary_pos_emb`, by the operator RotaryEmbedding: query and key [R, H, S, D], cos [R, S, P].

    The first 2 P dimensions of a head are rotated; the rest stays as it is.
    """

    def rotated(x: Tensor) -> Tensor:
        part = 2 * cos.shape[-1]
        return torch.onnx.ops.rotary_embedding(x, cos, sin, rotary_embedding_dim=part if part < x.shape[-1] else 0)

    return rotated(query), rotated(key)


def _neighbours(query: Tensor, key: Tensor, turns: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """Stands in for an `apply_rotary_emb` by complex numbers, which ONNX has not: `turns` [R, S, P, 2] are their parts.

    Neighbours are rotated, of query and key [R, H, S, D] with `axis` 1, or [R, S, H, D] with 2.
    """
    cos, sin = turns.unsqueeze(axis).unbind(-1)

    def rotated(x: Tensor) -> Tensor:
        left, right = x.float().reshape(*x.shape[:-1], -1, 2).unbind(-1)
        return torch.stack([left * cos - right * sin, left * sin + right * cos], -1).flatten(3).type_as(x)

    return rotated(query), rotated(key)


def _rotation(code: Any) -> tuple[str, Callable[..., Any], Callable[..., Any]] | None:
    """What code of models calls to rotate, what stands in for it, and how its angles are handed on; None if unknown."""
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 2, 3, 3, 8, generator=generator)
    turns = torch.polar(torch.ones(2, 3, 4), torch.randn(2, 3, 4, generator=generator))
    whole = torch.cat([turns, turns], -1)
    expected = torch.stack(_rotary(query, key, turns.real, turns.imag))
    if _same(lambda: torch.stack(code.apply_rotary_pos_emb(query, key, whole.real, whole.imag)), expected):
        return "apply_rotary_pos_emb", _rotary, _halves
    for form in (partial(_neighbours, axis=1), partial(_neighbours, axis=2)):
        expected = torch.stack(form(query, key, torch.view_as_real(turns)))
        if _same(lambda: torch.stack(code.apply_rotary_emb(query, key, turns)), expected):
            return "apply_rotary_emb", form, _parts
    return None


def _same(compute: Callable[[], Tensor], expected: Tensor) -> bool:
    """Whether `compute` gives `expected` up to rounding; a model's own function may also raise."""
    with contextlib.suppress(AttributeError, TypeError, ValueError, RuntimeError):
        return alike(expected, compute())
    return False


@contextlib.contextmanager
def operators(model: PreTrainedModel) -> Iterator[None]:
    """The model with its norms and rotary embeddings replaced by operators, for the duration of the export.

    What is not recognised is exported as its parts; whether all of it is right, `export.verification.verify` finds out.
    """
    code = {sys.modules[type(module).__module__] for module in model.modules()}
    code = {m for m in code if not hasattr(m, "apply_rotary_pos_emb_interleave")}  # it takes the same angles, whole
    rotations = {m: found for m in code if (found := _rotation(m))}
    with contextlib.ExitStack() as undone:

        def replace(owner: Any, name: str, new: object) -> None:
            undone.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, new)

        for owner, (name, operator, _) in rotations.items():
            replace(owner, name, operator)
        for parent in list(model.modules()):
            rotation = rotations.get(sys.modules[type(parent).__module__])
            if rotation and type(parent).__name__.endswith("RotaryEmbedding"):
                undone.callback(parent.register_forward_hook(rotation[2]).remove)
            for name, child in list(parent.named_children()):
                if (norm := RmsNorm.of(child)) is not None:
                    replace(parent, name, _RMSNormalization(norm.weight, norm.eps, norm.offset))
        yield
