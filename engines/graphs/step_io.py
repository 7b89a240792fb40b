"""Parts of steps and of caches, for engines that run elsewhere than on the CPU's memory."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from engines.base import EngineSpec, Step
from engines.graphs.runner import StepShape

INPUTS = ("tokens", "positions", "mask", "write_at", "keep")
"""Inputs of a graph beside the caches: parts of a step, by their names."""


def named(when: str, cache: Tensor) -> dict[str, Tensor]:
    """A graph's names of a cache's parts [layers, 2, ...], such as `past_key.0`."""
    return {
        f"{when}_{name}.{layer}": cache[layer, kind]
        for layer in range(cache.shape[0])
        for kind, name in enumerate(("key", "value"))
    }


def input_shapes(spec: EngineSpec, shape: StepShape) -> dict[str, tuple[int, ...]]:
    """Shapes of all inputs of a graph, by name, in a step of a shape."""
    cache = (shape.rows, spec.kv_heads, spec.capacity, spec.head_dim)
    return {
        "tokens": (shape.rows, shape.steps),
        "positions": (shape.rows, shape.steps),
        "mask": (shape.rows, 1, shape.steps, shape.length),
        "write_at": (shape.rows,),
        "keep": (shape.kept,),
        **{f"past_{name}.{layer}": cache for layer in range(spec.layers) for name in ("key", "value")},
    }


def pieces(step: Step, tokens: int) -> Iterator[tuple[Step, int, Tensor]]:
    """A step as steps of one row and at most `tokens` tokens, in an order in which each finds what it attends to.

    Yields:
        the piece, its row in the step, and which of the step's kept positions it has, int64 [n].
    """
    for row in range(step.tokens.shape[0]):
        for start in range(0, step.tokens.shape[1], tokens):
            part = slice(start, start + tokens)
            kept = ((step.keep >= start) & (step.keep < start + tokens)).nonzero()[:, 0]
            piece = Step(
                tokens=step.tokens[row : row + 1, part],
                positions=step.positions[row : row + 1, part],
                write_at=step.write_at[row : row + 1] + start,
                mask=step.mask[row : row + 1, :, part],
                keep=step.keep[kept] - start,
                first_row=step.first_row + row,
            )
            yield piece, row, kept


def handed_over(logits: Tensor, step: Step) -> Tensor:
    """Logits that lie in an engine's own memory, as the caller of `step` is to have them.

    Those of a step with an `out` stay where they are if the step's tokens are on the same device: valid until the next
    step. All others are copied, to where the tokens are.
    """
    if step.out is None:
        return logits.to(step.tokens.device, copy=True)
    return logits if step.tokens.device == logits.device else step.out.copy_(logits)
