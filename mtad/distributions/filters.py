"""Where filtered distributions come from: the functions here, or a device's own that give the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from mtad.distributions.candidates import Candidates, process
from mtad.distributions.table import Table, tabulate
from mtad.rows import Rows


class Filters(NamedTuple):
    """What filters logits [R, S, V].

    Attributes:
        lists: gives lists, as `process` does.
        tables: gives tables, as `tabulate` does, of the positions that its third argument wants.
    """

    lists: Callable[[Tensor, Rows], Candidates] = process
    tables: Callable[[Tensor, Rows, Tensor | None], Table] = tabulate


FILTERS = Filters()
"""The functions of `mtad` themselves."""
