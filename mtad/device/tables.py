"""Filtered distributions and drafts on a device, and the launches of the kernels that make them.

A distribution is its logits and a few numbers. An example with 8 tokens in 2 blocks of 4, at temperature 1 with `top_p`
0.8: the probabilities before the filter are 0.4, 0, 0.1, 0.1 | 0, 0.3, 0.1, 0. Most likely first, 0.4 + 0.3 + 0.1 reach
0.8, so tokens 0, 5 and 2 are kept: `lowest` is the logit of token 2, and `last` is 2, because tokens 3 and 6 have the
same logit but larger ids. The masses of the blocks are (0.4 + 0.1) / 0.8 and 0.3 / 0.8.
"""

from __future__ import annotations

import importlib
import math
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 256
"""Tokens of a block, whose mass is known."""
CHUNK, TILE = 4096, 4096
"""`CHUNK`: logits per program of the scan kernel; a distribution has many. `TILE`: logits that the one settling
program of a distribution reads at a time."""
CELLS, COLUMNS = 8192, 4096
"""Entries of a mask that a program writes at a time, and columns of it at most."""


class Given(NamedTuple):
    """What a block of R rows is given: the rows' parameters as `mtad.rows.ROW` has them, and what changes every block.

    Attributes:
        inverse_temperature, top_p, min_p: float32 [R].
        top_k, draft_len, width, rule: int64 [R].
        greedy, tree, reads_draft, stops_at_eos: bool [R].
        threshold, log_confidence: float64 [R].
        last_two: int64 [R, 2], the last two committed tokens; the last is the root.
        committed: int64 [R].
        real: bool [R]; other rows are padding, and write behind the capacity.
        draft, accept: float32 [R, D, W]; bonus: float32 [R]. See `mtad.random.Noise`.
    """

    inverse_temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    greedy: Tensor
    rule: Tensor
    threshold: Tensor
    draft_len: Tensor
    width: Tensor
    tree: Tensor
    reads_draft: Tensor
    log_confidence: Tensor
    stops_at_eos: Tensor
    last_two: Tensor
    committed: Tensor
    real: Tensor
    draft: Tensor
    accept: Tensor
    bonus: Tensor


class Step(NamedTuple):
    """Inputs of a model's step: see `engines.base.Step`."""

    tokens: Tensor
    positions: Tensor
    write_at: Tensor
    mask: Tensor


class Tree(NamedTuple):
    """The drafts of R rows, D levels of W slots; see `mtad.draft.Tree`.

    Attributes:
        tokens: int64 [R, D, W].
        log_q: float64 [R, D, W]; NaN where the level was to be drawn from what is no distribution.
        drafted, growing, ended: bool [R, D, W].
        ways: int64 [R, D, W, D], the slots of the path to each node, level by level; beyond its own, anything.
    """

    tokens: Tensor
    log_q: Tensor
    drafted: Tensor
    growing: Tensor
    ended: Tensor
    ways: Tensor

    @classmethod
    def empty(cls, rows: int, levels: int, width: int, device: torch.device) -> Tree:
        shape = rows, levels, width
        kinds = torch.int64, torch.float64, torch.bool, torch.bool, torch.bool
        own: list[Tensor] = [torch.empty(shape, dtype=kind, device=device) for kind in kinds]
        return cls._make([*own, torch.zeros((*shape, levels), dtype=torch.int64, device=device)])


class Tables(NamedTuple):
    """Distributions [R, S].

    Attributes:
        logits: float [R, S, V], the model's, last axis contiguous.
        inverse_temperature: float32 [R].
        numbers: float32 [4, R, S]: the largest logit; the smallest one that is kept, -inf for all; the logarithm of the
            sum of exp((logit - largest) / temperature) over what is kept, NaN if this is no distribution; that sum at
            temperature 1 over all tokens.
        last: int64 [R, S], of the tokens with the smallest kept logit, the largest id that is kept.
        blocks: float32 [R, S, ceil(V / BLOCK)], the mass of each block; of greedy rows, that of its likeliest token.
    """

    logits: Tensor
    inverse_temperature: Tensor
    numbers: Tensor
    last: Tensor
    blocks: Tensor

    @property
    def bad(self) -> Tensor:
        """Which logits are no distribution, bool [R, S]."""
        return self.numbers[2].isnan()

    def log_prob(self, at: Tensor, tokens: Tensor) -> Tensor:
        """Log-probability of tokens [R, M] at positions `at` [R, M], float64; -inf where the filter removed them."""
        return self._values(self._picked(at, tokens)[..., None], at, tokens[..., None])[..., 0].double()

    def log_likelihood(self, at: Tensor, tokens: Tensor) -> Tensor:
        """Log-probability of tokens [R, M] at positions `at` [R, M] without a filter, at temperature 1; float32."""
        numbers = self.numbers.gather(2, at.expand(4, -1, -1))
        return self._picked(at, tokens) - numbers[0] - numbers[3]

    def probabilities(self, at: Tensor) -> Tensor:
        """All probabilities at position `at` [R], float32 [R, V]."""
        logits = self.logits[torch.arange(len(at), device=at.device), at].float()
        ids = torch.arange(logits.shape[1], device=at.device)
        return self._values(logits[:, None], at[:, None], ids[None, None])[:, 0].exp()

    def _picked(self, at: Tensor, tokens: Tensor) -> Tensor:
        return self.logits[torch.arange(len(at), device=at.device)[:, None], at, tokens].float()

    def _values(self, logits: Tensor, at: Tensor, ids: Tensor) -> Tensor:
        """Log-probabilities of logits [R, M, N], of tokens `ids`, at positions `at` [R, M]."""
        largest, lowest, log_total, _ = self.numbers.gather(2, at.expand(4, -1, -1))[..., None].unbind()
        kept = (logits > lowest) | ((logits == lowest) & (ids <= self.last.gather(1, at)[..., None]))
        values = (logits - largest) * self.inverse_temperature[:, None, None] - log_total
        return values.masked_fill(~kept, -math.inf)


def stacked(tables: list[Tables]) -> Tables:
    """The first distribution of each, [R, len(tables)]; without blocks."""
    logits = torch.stack([table.logits[:, 0] for table in tables], 1)
    numbers = torch.stack([table.numbers[:, :, 0] for table in tables], 2)
    last = torch.stack([table.last[:, 0] for table in tables], 1)
    return Tables(logits, tables[0].inverse_temperature, numbers, last, tables[0].blocks)


def first_above(weights: Tensor, goal: Tensor) -> tuple[Tensor, Tensor]:
    """`mtad.distribution.draw` for rows [R, N] of float64 weights, by a goal [R] in place of a uniform number.

    Returns:
        the entry, int64 [R], and what is left of the goal before it, [R].
    """
    running, some = weights.cumsum(1), weights > 0
    reached = some & (running > goal[:, None])
    last = weights.shape[1] - 1 - some.flip(1).int().argmax(1)
    entry = torch.where(reached.any(1), reached.int().argmax(1), last)[:, None]
    return entry[:, 0], goal - (running - weights).gather(1, entry)[:, 0]


def draw(weights: Tensor, uniform: Tensor, greedy: Tensor | None = None) -> Tensor:
    """A token of each row by its weight, int64 [R]; of greedy rows, the likeliest.

    Args:
        weights: float32 [R, V], at least 0, of any scale.
        uniform: float32 [R], from [0, 1). greedy: bool [R].
    """
    rows, size = weights.shape
    blocks = pad(weights, (0, -size % BLOCK)).view(rows, -1, BLOCK)
    masses = blocks.sum(2, dtype=torch.float64)
    block, rest = first_above(masses, uniform * masses.sum(1))
    entry, _ = first_above(blocks[torch.arange(rows, device=block.device), block].double(), rest)
    token = (block * BLOCK + entry).clamp(max=size - 1)
    return token if greedy is None else torch.where(greedy, weights.argmax(1), token)


@cache
def _kernels(name: str) -> ModuleType:
    return importlib.import_module(f"mtad.device.{name}_kernels")


def problem() -> str | None:
    """Why there are no kernels; None if there are."""
    try:
        _kernels("filter")
    except ImportError:
        return "Triton is not installed: mtad[gpu] brings it"
    return None


def launch(kernel: str, grid: tuple[int, ...], arguments: tuple[Any, ...], **constants: Any) -> None:
    """Launch a kernel, by module and name: the only place where that happens."""
    module, name = kernel.split(".")
    with torch.cuda.device_of(arguments[0]):  # type: ignore[no-untyped-call] # Triton launches on the current one
        getattr(_kernels(module), name)[grid](*arguments, **constants)


def filtered(logits: Tensor, given: Given) -> Tables:
    """The distributions of logits [R, S, V], last axis contiguous: `filter_logits` of the host, in two launches."""
    (rows, positions, size), device = logits.shape, logits.device
    chunks, blocks = -(-size // CHUNK), -(-size // BLOCK)
    numbers = torch.empty((4, rows, positions), device=device)
    last = torch.empty((rows, positions), dtype=torch.int64, device=device)
    found = Tables(
        logits, given.inverse_temperature, numbers, last, torch.empty((rows, positions, blocks), device=device)
    )
    largest = torch.empty((rows, positions, chunks), device=device)
    counts, masses = torch.empty((2, rows, positions, chunks, 32), device=device)
    scratch = torch.empty((rows, positions, TILE), dtype=torch.int64, device=device)
    filters, strides = (given.inverse_temperature, given.top_k, given.top_p), logits.stride()[:2]
    launch(
        "filter.scan_tables",
        (rows * positions, chunks),
        (logits, largest, counts, masses, *filters, positions, *strides, size),
        CHUNK=CHUNK,
        num_warps=8,
    )
    most, lowest, log_total, log_plain = numbers
    launch(
        "filter.settle_tables",
        (rows * positions,),
        (
            *(logits, largest, counts, masses, scratch, most, lowest, last, log_total, log_plain, found.blocks),
            *(given.greedy, *filters, given.min_p, positions, *strides, size, chunks),
        ),
        CHUNKS=_power(chunks),
        TILE=TILE,
        BLOCK=BLOCK,
        BLOCKS=_power(blocks),
        num_warps=16,
    )
    return found


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
    step = Step(
        torch.empty((rows, width), dtype=torch.int64, device=device),
        torch.empty((rows, width), dtype=torch.int64, device=device),
        torch.empty(rows, dtype=torch.int64, device=device),
        torch.empty((rows, 1, width, length), dtype=torch.bool, device=device),
    )
    beams, size = above.logits.shape[1:]
    largest, lowest, log_total, _ = above.numbers
    launch(
        "level.draw_level",
        (rows,),
        (
            *(*tree, *step, above.logits, largest, lowest, log_total, above.last, above.blocks),
            *(given.draft, given.committed, given.real, is_end, given.inverse_temperature, given.greedy),
            *(given.draft_len, given.width, given.log_confidence, given.stops_at_eos),
            *(level, size, *above.logits.stride()[:2], length, capacity),
        ),
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


def _power(count: int) -> int:
    return 1 << (count - 1).bit_length()
