"""Deciding of tables row by row, on the host, as if there were no other tokens than those that a filter keeps.

So what rules compute with grows with the candidates that are kept, rather than with the vocabulary; and what fits into
a core's cache is worked on several times as fast.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mtad.distributions.table import Distributions, Table
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
        mine = mine._replace(rule=mine.rule.clamp(max=0))
        ids = possible(part)
        if ids is None:
            found.append(judge(part, mine, (rules[max(number, 0)],)))
        else:
            few = judge(_among(ids, part), mine._replace(ends=mine.ends[ids]), (rules[max(number, 0)],))
            live = None if few.live is None else few.live._replace(tokens=ids[few.live.tokens])
            found.append(few._replace(bonus=torch.where(few.bonus < 0, few.bonus, ids[few.bonus]), live=live))
    joined: Decided = _joined(found, own, len(rows.rule))
    return joined


def possible(scored: Scored) -> Tensor | None:
    """The tokens of one row's tree, and those that one of its tables may keep: int64 [K], ascending; None for all."""
    kept = np.zeros(scored.vocab, dtype=bool)
    kept[scored.tree.tokens.numpy()] = True
    for table in _tables(scored):
        assert isinstance(table, Table), "lists are judged all at once"
        numbers = (x.flatten().tolist() for x in (table.lowest, table.log_total))
        for logits, lowest, log_total in zip(table.logits[0].numpy(), *numbers, strict=True):
            if log_total == math.inf:  # nobody asked for it
                continue
            if lowest == -math.inf:
                return None
            kept |= logits >= lowest
    return torch.from_numpy(np.flatnonzero(kept))


def _tables(scored: Scored) -> list[Distributions]:
    return [scored.after, *([] if scored.q is None else [scored.q]), *scored.above]


def _among(ids: Tensor, scored: Scored) -> Scored:
    """One row's tree, with the place of its tokens among `ids` in place of themselves."""
    at = ids.numpy()

    def few(table: Distributions) -> Table:
        assert isinstance(table, Table), "lists are judged all at once"
        last = torch.searchsorted(ids, table.last.contiguous(), right=True) - 1
        logits = np.stack([each[at] for each in table.logits[0].numpy()])[None]  # index_select takes six times as long
        return table._replace(logits=torch.from_numpy(logits), last=last)

    return scored._replace(
        tree=scored.tree._replace(tokens=torch.searchsorted(ids, scored.tree.tokens.contiguous())),
        after=few(scored.after),
        q=None if scored.q is None else few(scored.q),
        above=tuple(map(few, scored.above)),
        vocab=len(ids),
    )


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
