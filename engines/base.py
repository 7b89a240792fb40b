"""The contract of engines: what one says of itself, what a step is given, what it returns."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from engines.tensorrt_plan import TensorRtPlan

if TYPE_CHECKING:
    from engines.prefix_cache import PrefixCache

KV_PAGE = 64
"""Mask lengths are rounded up to this many columns: reductions over the cache then take the same order of additions
whatever the other rows' lengths are, so a row's logits do not depend on them. Capacities are multiples of it."""

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
"""Of cache and logits, by name."""

INPUTS = ("tokens", "positions", "mask", "write_at", "keep")
"""Inputs of a graph beside the caches: parts of a step, by their names."""

PRECISIONS = {
    "float32": "float32",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "int8": "float32",
    "int4": "float32",
    "int8-dynamic": "float32",
    "int8-static": "float16",
    "fp8": "float16",
}
"""Dtype of cache and logits, by what the weights are. `int8` and `int4` are weight-only, in blocks; with `int8-dynamic`
activations are int8 as well, in a range found in each step; with `int8-static` and `fp8` (E4M3) activations are what
the weights are, in a range found on text beforehand (W8A8)."""


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
        format: `onnx` (ONNX Runtime), `torch`, `tensorrt` or `tensorrt-rtx`.
        checkpoint_hash: sha256 over the source checkpoint's configuration and weights.
        versions: package versions the exporter ran with.
        source: where that checkpoint was: a folder, or a hub id; empty if unknown.
        build_hash: sha256 over all that decides what is in the folder, see `export.build_hash`; empty if not exported.
        attention: `operator`, or `decomposed`: the graph has operators of opset 18 only, and returns new columns of the
            cache instead of writing them.
        plan: what the plan of a TensorRT format was built for; None for other formats.
        precision: one of `PRECISIONS`; what the weights are.
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
    def kv_bytes(self) -> int:
        """Size of the whole KV cache in bytes."""
        return self.layers * 2 * self.rows * self.kv_heads * self.capacity * self.head_dim * self.torch_dtype.itemsize


@dataclass(frozen=True)
class Step:
    """One forward pass over consecutive rows of the cache.

    Attributes:
        tokens: int64 [R, S], tokens to run.
        positions: int64 [R, S], position ids. A committed token lies in the column of its position, a tree node in
            that column or a later one.
        write_at: int64 [R], first KV column written; S columns are written, padding counted.
        mask: bool [R, 1, S, L], the columns each token attends to, explicit always; L <= capacity, multiple of 64.
        keep: int64 [N], which of the S positions need logits; may be empty.
        first_row: cache row of the step's row 0; the step runs over rows first_row .. first_row + R - 1.
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
    """A compiled model with its KV cache.

    Engines differ in `step` alone; one whose cache is not an array of columns overrides all that uses `kv`.

    Args:
        spec: what the engine's folder says of it.
        device: torch's name of where its cache lies.

    Attributes:
        capturable: whether `launch` may be recorded inside a larger CUDA graph: it takes tensors on the cache's device
            and launches the same work for the same shapes, without waiting for the device.
        reads_mask: whether a step reads all columns of its mask; else those that its rows hold, however long the mask.
        reproducible: whether a row's logits are the same bits whatever the other rows are.
        page_columns, page_bytes: columns and bytes of a page, where rows share a pool of pages; else 0.
        pages: of the pool, those for kept prefixes not counted.
        kv: [layers, 2, rows, kv_heads, capacity, head_dim], keys at index 0 of the second axis; zeroed at allocation (a
            NaN in a masked column would poison its row). Per-layer views of it are bound in place. An engine may give
            it as many columns as its rows need, in place of the capacity.
    """

    capturable: ClassVar[bool] = False
    reads_mask: bool = True
    reproducible: ClassVar[bool] = True
    page_columns: int = 0
    page_bytes: int = 0
    pages: int = 0
    spec: EngineSpec
    kv: Tensor

    def __init__(self, spec: EngineSpec, device: str = "cpu") -> None:
        self.spec = spec
        shape = (spec.layers, 2, spec.rows, spec.kv_heads, spec.capacity, spec.head_dim)
        self.kv = torch.zeros(shape, dtype=spec.torch_dtype, device=device)

    @property
    def name(self) -> str:
        """What computes its steps."""
        return type(self).__name__

    @property
    def device(self) -> torch.device:
        """Where its cache lies."""
        return self.kv.device

    def prefix_cache(self, tokens: int) -> PrefixCache:
        """Memory for the keys and values of `tokens` tokens of earlier prompts at most."""
        from engines.prefix_cache import PrefixCache

        return PrefixCache(self, tokens)

    @abstractmethod
    def step(self, step: Step) -> Tensor:
        """Run `step`, write its keys and values into `kv`, and return logits [R, N, V] of the kept positions.

        `write_at + S <= capacity` must hold for every row; admission sees to it. A step that keeps no logits may be
        computed later, at the latest when something needs what it writes.
        """

    def reserve(self, spans: Sequence[tuple[int, int]], first_row: int = 0) -> None:  # noqa: B027 - see `free_row`
        """Make sure that consecutive rows can be written at columns start .. end - 1, (start, end) of each.

        Where rows share a pool of pages, `fits` must say so.
        """

    def launch(self, step: Step) -> Tensor:
        """`step` without a look at its tensors: what it writes must have been reserved.

        Of a capturable engine, a row may also write behind the capacity: nobody reads that.
        """
        return self.step(step)

    @property
    def postponed(self) -> int:
        """Rows with steps without logits that a later step is to compute beside its own tokens."""
        return 0

    def finish(self) -> None:  # noqa: B027 - nothing is to be done where every step is computed at once
        """Compute the steps that were postponed."""

    def move_columns(self, source: Tensor, to: Tensor) -> None:
        """Move cache columns [R, D] within each row 0 .. R-1; all are read before any is written."""
        move_columns(self.kv, source, to)

    def copy_row(self, source: int, to: int, columns: int) -> None:
        """Copy the first `columns` columns of one row over another's."""
        self.kv[:, :, to, :, :columns] = self.kv[:, :, source, :, :columns]

    def clear_row(self, row: int, start: int = 0) -> None:
        """Zero the columns of one row from `start` on."""
        self.kv[:, :, row, :, start:] = 0

    def clear(self) -> None:
        for row in range(self.spec.rows):
            self.clear_row(row)

    def limit(self, pages: int) -> None:
        """Have a pool of so many pages, before anything is stored; for engines whose rows share one."""
        raise NotImplementedError

    def beam_pages(self, draft_len: int) -> int:
        """Pages that each beam of a draft of so many tokens has of its own, besides those of its row."""
        return 0

    def fits(self, spans: Sequence[tuple[int, int]]) -> bool:
        """Whether the first rows can be written at columns start .. end - 1 all together, (start, end) of each.

        Rows that have memory of their own always can; rows that share a pool of pages can while pages last.
        """
        return True

    def free_row(self, row: int) -> None:  # noqa: B027 - nothing is to be done where rows have memory of their own
        """Nobody needs what a row holds: others may have its memory."""

    @contextlib.contextmanager
    def kept(self, *columns: slice) -> Iterator[None]:
        """Whatever is launched inside, these columns of all rows are afterwards what they were."""
        kept = [(part, self.kv[..., part, :].clone()) for part in columns]
        try:
            yield
        finally:
            for part, values in kept:
                self.kv[..., part, :] = values


def mask_length(longest: int, capacity: int) -> int:
    """Columns a mask must have to reach `longest` columns: rounded up to `KV_PAGE`."""
    return min(-(-longest // KV_PAGE) * KV_PAGE, capacity)


def move_columns(kv: Tensor, source: Tensor, to: Tensor) -> None:
    """Move cache columns within each row 0 .. R-1; all sources are read before anything is written.

    Args:
        kv: [layers, 2, rows, kv_heads, capacity, head_dim], changed in place.
        source: int64 [R, D], columns to read.
        to: int64 [R, D], columns to write; distinct within a row.
    """
    if kv.device.type == "cpu":  # numpy moves columns several times faster than torch's indexing
        cache = (kv.view(torch.int16) if kv.element_size() == 2 else kv).numpy()  # numpy has no bfloat16
        rows = np.arange(source.shape[0])[:, None]
        cache[:, :, rows, :, to.numpy()] = cache[:, :, rows, :, source.numpy()]
    else:
        index_columns(kv, source, to)


def index_columns(kv: Tensor, source: Tensor, to: Tensor) -> None:
    """`move_columns` by torch's indexing, which a CUDA graph can hold."""
    at = torch.arange(source.shape[0], device=kv.device)[:, None]
    kv[:, :, at, :, to] = kv[:, :, at, :, source]


def write_columns(kv: Tensor, new: Tensor, write_at: Tensor) -> None:
    """Write the columns of a step, for models that return them instead of writing them.

    Args:
        kv: [layers, 2, R, kv_heads, capacity, head_dim], the step's rows of the cache, changed in place.
        new: [layers, 2, R, kv_heads, S, head_dim].
        write_at: int64 [R], first column of each row.
    """
    rows, steps = new.shape[2], new.shape[4]
    columns = write_at[:, None] + torch.arange(steps, device=write_at.device)
    at = torch.arange(rows, device=write_at.device)[:, None]
    kv[:, :, at, :, columns] = new.permute(2, 4, 0, 1, 3, 5)


def named(when: str, cache: Tensor) -> dict[str, Tensor]:
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
