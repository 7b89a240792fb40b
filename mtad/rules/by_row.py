"""Deciding of tables row by row, on the host: what fits into a core's cache is worked on several times as fast."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mtad.draft.live import Live
from mtad.methods import Rule
from mtad.rows import Rows
from mtad.rules.scored import Scored

WHOLE = ("itself", "slots", "beam_of", "ends")
"""Fields of `Rows` that all rows share."""

LEVELS = ("level_at", "level_bias", "branch_at")
"""Those whose first axis are the levels."""


class Decided(NamedTuple):
    """A `Verdict` with its bonus token, int64 [R]."""

    node: Tensor
    length: Tensor
    bonus: Tensor
    live: Live | None


def by_row(
    judge: Callable[[Scored, Rows, Sequence[Rule]], Decided], scored: Scored, rows: Rows, rules: Sequence[Rule]
) -> Decided:
    """Each row's outcome under its own rule, of those whose distributions are tables; 0 for the others."""
    own = rows.tabulated.nonzero().flatten().tolist()
    found = []
    for row in own:
        mine, number = _row_of(rows, row), int(rows.rule[row])
        part = Scored(*(_part(x, row) if name not in ("noise", "vocab") else x for name, x in scored._asdict().items()))
        noise = scored.noise
        part = part._replace(
            noise=noise._replace(levels=(), **{n: getattr(noise, n)[row : row + 1] for n in noise._fields[1:]})
        )
        found.append(judge(part, mine._replace(rule=mine.rule.clamp(max=0)), (rules[max(number, 0)],)))
    joined: Decided = _joined(found, own, len(rows.rule))
    return joined


def _row_of(rows: Rows, row: int) -> Rows:
    cut = {
        name: value if name in WHOLE else value[:, row : row + 1] if name in LEVELS else _part(value, row)
        for name, value in rows._asdict().items()
    }
    return Rows(**cut)


def _part(value: Any, row: int) -> Any:
    """One row of nested tuples of tensors."""
    if value is None or isinstance(value, Tensor):
        return value if value is None else value[row : row + 1]
    parts = [_part(x, row) for x in value]
    return tuple(parts) if type(value) is tuple else type(value)(*parts)


def _joined(parts: Sequence[Any], own: Sequence[int], count: int) -> Any:
    if parts[0] is None:
        return None
    if isinstance(parts[0], Tensor):
        whole = parts[0].new_zeros(count, *parts[0].shape[1:])
        whole[own] = torch.cat(list(parts))
        return whole
    return type(parts[0])(*(_joined(column, own, count) for column in zip(*parts, strict=True)))
