"""Launches the kernels that filter logits, draw levels and end blocks. Triton is imported where it is first needed."""

from __future__ import annotations

import importlib
import os
import shutil
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from mtad.device.tables import BLOCK, Found, Given, Results, Scored, Step, Tables, Tree

CHUNK, CANDIDATES = 4096, 4096
"""`CHUNK`: logits per program; a distribution has many. `CANDIDATES`: keys that the one settling program of a
distribution holds."""
CELLS, COLUMNS = 8192, 4096
"""Entries of a mask that a program writes at a time, and columns of it at most."""


@cache
def _kernels(name: str) -> ModuleType:
    return importlib.import_module(f"mtad.device.{name}_kernels")


def problem() -> str | None:
    """Why there are no kernels; None if there are."""
    try:
        _kernels("filter")
    except ImportError:
        return "Triton is not installed: mtad[gpu] brings it"
    return missing_compiler()


def missing_compiler() -> str | None:
    """What Triton lacks to compile its own launcher, at the first launch on a GPU (`triton/runtime/build.py`)."""
    if not torch.cuda.is_available() or os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"):
        return None
    return "Triton needs a C compiler at its first launch: install gcc, or set CC"


def launch(kernel: str, grid: tuple[int, ...], arguments: tuple[Any, ...], **constants: Any) -> None:
    """Launch a kernel, by module and name; nothing else does. The first argument is a tuple of tensors."""
    module, name = kernel.split(".")
    with torch.cuda.device_of(arguments[0][0]):  # type: ignore[no-untyped-call] # Triton launches on the current one
        getattr(_kernels(module), name)[grid](*arguments, **constants)


def filtered(logits: Tensor, given: Given) -> Tables:
    """The distributions of logits [R, S, V], last axis contiguous: `filter_logits` of the host, in four launches."""
    rows, positions, size = logits.shape
    chunks, bins = -(-size // CHUNK), int(_kernels("filter").BINS)

    def like(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty((rows, positions, *sizes), dtype=dtype, device=logits.device)

    last, blocks = like(dtype=torch.int64), like(-(-size // BLOCK))
    tables = Tables(logits, given.inverse_temperature, like(4), last, blocks)
    found = Found(
        largest=like(chunks),
        totals=like(chunks),
        plains=like(chunks),
        counts=like(chunks, bins),
        masses=like(chunks, bins),
        candidates=like(dtype=torch.int32),
        keys=like(CANDIDATES, dtype=torch.int64),
        lows=like(chunks, dtype=torch.int64),
        highs=like(chunks, dtype=torch.int64),
    )
    shape = positions, *logits.stride()[:2], size
    every, wide = (rows * positions, chunks), {"CHUNK": CHUNK, "num_warps": 8}
    candidates: dict[str, int] = {"CHUNKS": _power(chunks), "TILE": CANDIDATES}
    launch("filter.scan_tables", every, (tables, found, given, *shape), **wide)
    launch("filter.gather_candidates", every, (tables, found, given, *shape), **candidates, **wide)
    launch("cut.settle_tables", every[:1], (tables, found, given, *shape, chunks), **candidates, num_warps=8)
    launch("filter.weigh_blocks", every, (tables, given, *shape), BLOCK=BLOCK, **wide)
    return tables


def draw_level(level: int, tree: Tree, above: Tables, given: Given, is_end: Tensor, length: int, capacity: int) -> Step:
    """Draw a level of the drafts, in one launch: `mtad.draft.draft_level`.

    Args:
        tree: written to.
        above: [R, 1] after the root, or [R, W] after the level above.
        is_end: bool [V], tokens that end a text.
        length: L, columns of the mask. capacity: where padded rows write.

    Returns:
        the auxiliary's step over the level.
    """
    (rows, levels, width), device = tree.tokens.shape, tree.tokens.device
    step = (
        torch.empty((rows, width), dtype=torch.int64, device=device),
        torch.empty((rows, width), dtype=torch.int64, device=device),
        torch.empty(rows, dtype=torch.int64, device=device),
        torch.empty((rows, 1, width, length), dtype=torch.bool, device=device),
    )
    beams, size = above.logits.shape[1:]
    launch(
        "level.draw_level",
        (rows,),
        (tree, step, above, given, is_end, level, size, *above.logits.stride()[:2], length, capacity),
        LEVELS=levels,
        WIDTH=width,
        FIRST=level == 0,
        SLOTS=_power(width),
        BEAMS=_power(beams),
        BLOCK=BLOCK,
        BLOCKS=_power(above.blocks.shape[2]),
        COLUMNS=min(COLUMNS, CELLS // _power(width)),
        num_warps=8 if width <= 16 else 16,
    )
    return step


def probabilities(tables: Tables, at: Tensor) -> Tensor:
    """All probabilities at positions `at` [R, N], float32 [R, N, V], in one launch."""
    _, positions, size = tables.logits.shape
    out, at = torch.empty((*at.shape, size), device=at.device), at.contiguous()
    shape = at.shape[1], positions, *tables.logits.stride()[:2], size
    grid = at.numel(), -(-size // CHUNK)
    launch("decision.spread", grid, (tables, out, at, *shape), CHUNK=CHUNK, num_warps=8)
    return out


def emit(
    out: Results,
    node: Tensor,
    finite: Tensor,
    scored: Scored | None,
    p: Tables,
    weighed: tuple[Tensor, Tensor] | None,
    given: Given,
) -> None:
    """The accepted tokens and one more, in one launch.

    Args:
        out: written to, but for `longest` and `spent`.
        node: int64 [R], the last kept node, -1 for none. finite: bool [R], whether the draft's logits are.
        p: of the target.
        weighed: weights [R, V] that the one more is drawn by, and their sums by block; None for `p` after the node.
    """
    levels, (_, positions, size) = out.paths.shape[1], p.logits.shape
    nodes = positions - 1
    tree = scored or Scored._make([node] * len(Scored._fields))  # without nodes, nothing of it is read
    strided = tree.parents, tree.depths, tree.ancestors
    assert all(x.stride(-1) == 1 for x in (tree.tokens, tree.drafted, *strided))
    strides = *p.logits.stride()[:2], *(x.stride(0) for x in strided)
    launch(
        "decision.emit",
        (len(node),),
        (out, node, finite, tree, *(weighed or (p.blocks, p.blocks)), p, given, nodes, size, *strides),
        LEVELS=levels,
        DEPTHS=_power(levels + 1),
        NODES=_power(max(nodes, 1)),
        WEIGHED=weighed is not None,
        BLOCK=BLOCK,
        BLOCKS=_power(p.blocks.shape[2] if weighed is None else weighed[1].shape[1]),
        num_warps=4,
    )


def _power(count: int) -> int:
    return 1 << (count - 1).bit_length()
