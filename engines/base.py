"""The contract of engines: what one says of itself, what a step is given, what it returns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from engines.cache.base import KvCache
from engines.tensorrt_plan import TensorRtPlan

KV_PAGE = 64
"""Mask lengths are rounded up to this many columns: reductions over the cache then take the same order of additions
whatever the other rows' lengths are, so a row's logits do not depend on them. Capacities are multiples of it."""

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
"""Of cache and logits, by name."""

INPUTS = ("tokens", "positions", "mask", "write_at", "keep")
"""Inputs of a graph beside the caches: parts of a step, by their names."""


@dataclass(frozen=True)
class EngineSpec:
    """What an engine folder says of itself (`engine.json`).

    Attributes:
        architecture: the checkpoint's `architectures[0]`.
        layers, kv_heads, head_dim: shape of the KV cache.
        vocab_size: V, width of the logits; may exceed the tokenizer's (padded embedding rows).
        dtype: one of `DTYPES`; of logits and cache.
        rows: requests at once at most.
        capacity: KV columns per row, a multiple of 64.
        eos_token_ids: tokens that end a text.
        format: one of `engines.kinds.FORMATS`.
        checkpoint_hash: sha256 over the source checkpoint's configuration and weights.
        versions: package versions the exporter ran with.
        source: where that checkpoint was: a folder, or a hub id; empty if unknown.
        build_hash: sha256 over all that decides what is in the folder, see `export.plan`; empty if not exported.
        attention: `operator`, or `decomposed`: operators of opset 18 only, and new columns are returned, not written.
        plan: what the plan of a TensorRT format was built for; None for other formats.
        precision: one of `engines.kinds.PRECISIONS`; what the weights are.
    """

    architecture: str
    layers: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    dtype: str
    rows: int
    capacity: int
    eos_token_ids: tuple[int, ...]
    format: str
    checkpoint_hash: str
    versions: dict[str, str]
    source: str = ""
    build_hash: str = ""
    attention: str = "operator"
    plan: TensorRtPlan | None = None
    precision: str = "float32"

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def without_layers(self) -> EngineSpec:
        """Of an engine beside it that holds nothing."""
        return replace(self, layers=0)

    @property
    def kv_bytes(self) -> int:
        """Size of the whole KV cache in bytes."""
        return self.layers * 2 * self.rows * self.kv_heads * self.capacity * self.head_dim * self.torch_dtype.itemsize


@dataclass(frozen=True)
class Step:
    """One forward pass over consecutive rows of the cache.

    Attributes:
        tokens: int64 [R, S], tokens to run.
        positions: int64 [R, S]. A committed token lies in the column of its position, a tree node there or behind it.
        write_at: int64 [R], first KV column written; S columns are written, padding counted.
        mask: bool [R, 1, S, L], the columns each token attends to, explicit always; L <= capacity, multiple of 64.
        keep: int64 [N], which of the S positions need logits; may be empty.
        drafted: for engines with `max_tokens`: columns right before `write_at` that hold nodes of the same draft, which
            `mask` may hide from some tokens, of the row with most of them. Every token sees all columns before those.
        first_row: cache row of the step's row 0; the step runs over rows first_row .. first_row + R - 1.
        is_prompt: every token sees all before it, whatever the mask says. Such steps have many shapes.
        out: float [R, N, V] of the engine's dtype, where the engine may write the logits (callers go by what `step`
            returns); None for new memory. A step with an `out` is expected to come again in the same memory, so an
            engine may keep what it prepared for those addresses.
    """

    tokens: Tensor
    positions: Tensor
    write_at: Tensor
    mask: Tensor
    keep: Tensor
    first_row: int = 0
    out: Tensor | None = None
    drafted: int = 0
    is_prompt: bool = False

    @property
    def spans(self) -> list[tuple[int, int]]:
        """The columns that each row writes, from and to; reads `write_at`, and so waits for a device."""
        return [(start, start + self.tokens.shape[1]) for start in self.write_at.tolist()]

    @classmethod
    def causal(cls, tokens: Tensor, start: int, capacity: int, keep: Tensor) -> Step:
        """The step of tokens [R, S] that continue columns 0 .. start - 1 of their rows; `keep` as of a step."""
        positions = torch.arange(start, start + tokens.shape[1]).repeat(len(tokens), 1)
        mask = torch.arange(mask_length(start + tokens.shape[1], capacity)) <= positions[:, :, None]
        return cls(tokens, positions, positions[:, 0], mask[:, None], keep)


class Engine(ABC):
    """A compiled model with its KV cache: engines differ in how they run a step.

    Args:
        spec: what the engine's folder says of it.
        cache: all about the memory of its rows.

    Attributes:
        capturable: whether `enqueue` may be recorded inside a larger CUDA graph: it takes tensors on the cache's device
            and launches the same work for the same shapes, without waiting for the device.
        reads_mask: whether a step reads all columns of its mask; else those that its rows hold, however long the mask.
        max_tokens: of each row of a step with a tree, at most: of a level with those before it, or of the root and all
            nodes that are scored; None for any number.
    """

    capturable: ClassVar[bool] = False
    reads_mask: bool = True
    max_tokens: int | None = None

    def __init__(self, spec: EngineSpec, cache: KvCache) -> None:
        self.spec, self.cache = spec, cache

    @property
    def name(self) -> str:
        """What computes its steps."""
        return type(self).__name__

    @property
    def device(self) -> torch.device:
        """Where its cache lies."""
        return self.cache.device

    @property
    def captured_on(self) -> object:
        """What graphs of its steps stand on beside its weights: when it is another object, they are void."""
        return self.cache.kv

    @abstractmethod
    def step(self, step: Step) -> Tensor:
        """Run `step`, write its keys and values into the cache, and return logits [R, N, V] of the kept positions.

        `write_at + S <= capacity` must hold for every row; admission sees to it. A step that keeps no logits may be
        computed later, at the latest when something needs what it writes.
        """

    def enqueue(self, step: Step) -> Tensor:
        """`step` without a look at its tensors: what it writes must have been reserved.

        Of a capturable engine, a row may also write behind the capacity: nobody reads that.
        """
        return self.step(step)

    @property
    def deferred_rows(self) -> int:
        """Rows with steps without logits that a later step is to compute beside its own tokens."""
        return 0

    def run_deferred(self) -> None:  # noqa: B027 - nothing is to be done where every step is computed at once
        """Compute the steps that were deferred."""


def mask_length(longest: int, capacity: int) -> int:
    """Columns a mask must have to reach `longest` columns: rounded up to `KV_PAGE`."""
    return min(-(-longest // KV_PAGE) * KV_PAGE, capacity)


def cache_tensors(when: str, cache: Tensor) -> dict[str, Tensor]:
    """A graph's names of a cache's parts [layers, 2, ...], such as `past_key.0`."""
    return {
        f"{when}_{name}.{layer}": cache[layer, kind]
        for layer in range(cache.shape[0])
        for kind, name in enumerate(("key", "value"))
    }


def input_shapes(spec: EngineSpec, rows: Any, steps: Any, length: Any, kept: Any) -> dict[str, tuple[Any, ...]]:
    """Shapes of all inputs of a graph, by name, in a step of these sizes, or of dimensions of these names."""
    cache = (rows, spec.kv_heads, spec.capacity, spec.head_dim)
    return {
        "tokens": (rows, steps),
        "positions": (rows, steps),
        "mask": (rows, 1, steps, length),
        "write_at": (rows,),
        "keep": (kept,),
        **{f"past_{name}.{layer}": cache for layer in range(spec.layers) for name in ("key", "value")},
    }
