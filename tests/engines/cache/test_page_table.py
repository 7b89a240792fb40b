"""Pages of a pool are never lost, and what a row is going to take from it is known beforehand."""

from __future__ import annotations

import random

import numpy as np
import pytest

from engines.cache.page_table import PageTable
from tests.support.integrity import check_pages

ROWS, SIZE, CAPACITY = 4, 16, 128


@pytest.mark.parametrize("seed", range(10))
def test_rows_that_write_share_and_leave_take_what_was_said_and_lose_no_page(seed: int) -> None:
    chance, table, written = random.Random(seed), PageTable(ROWS, CAPACITY, SIZE), [0] * ROWS
    for _ in range(60):
        row, other = chance.sample(range(ROWS), 2)
        start = chance.randint(0, written[row])
        end, free = chance.randint(start, CAPACITY), table.pages.free
        spans = [np.array(x) for x in ([other, row], [0, start], [CAPACITY, end])]
        said = int(table.missing(*spans)[1])
        assert said == table.missing(*(x[1:] for x in spans))
        if said <= free:
            copies = table.make_writable(row, start, end)
            assert table.pages.free >= free - said
            assert all(table.pages.users[to] == 1 for _, to in copies)
            assert not table.missing(*spans)[1]
            written[row] = max(written[row], end)
        if chance.random() < 0.5:
            table.adopt(other, 0, table.pages_of(row, 0, written[row]))
            written[other] = written[row]
        else:
            written[other] = start // SIZE * SIZE if start < written[other] else written[other]
            table.cut(other, written[other])
        check_pages(table)
