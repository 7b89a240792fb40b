"""One predicted query on a database, within limits, and whether two results are the same."""

from __future__ import annotations

import re
import sqlite3
import time
from collections import Counter
from typing import Any

ROW_LIMIT = 2000
"""Rows read of a result."""
TIME_LIMIT = 0.5
"""Seconds of CPU time a query may take: what else the machine does decides nothing."""

Rows = list[tuple[Any, ...]]


class QueryError(ValueError):
    """A query that SQLite refuses, that runs too long, or that returns too much."""


def fetch(connection: sqlite3.Connection, sql: str, time_limit: float = TIME_LIMIT, row_limit: int = ROW_LIMIT) -> Rows:
    """Rows of one query; the connection is good for nothing else afterwards.

    Raises:
        QueryError: anything that is not one bounded, read-only query: bad SQL, several statements, a write, more than
            `row_limit` rows, or more than `time_limit` seconds of CPU time.
    """
    try:
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 1_000_000)  # one huge string would escape the row limit
        connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)  # ATTACH would create a file
        connection.execute("PRAGMA query_only = ON")
        stop = time.thread_time() + time_limit
        connection.set_progress_handler(lambda: int(time.thread_time() > stop), 1000)
        rows: Rows = connection.execute(sql).fetchmany(row_limit + 1)
    except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError, MemoryError) as error:
        raise QueryError(f"{type(error).__name__}: {error}") from error
    if len(rows) > row_limit:
        raise QueryError(f"more than {row_limit} rows")
    return rows


def is_ordered(sql: str) -> bool:
    """Whether the order of a query's rows is part of its meaning: an ORDER BY outside every parenthesis."""
    depth, outer = 0, []
    for part in re.split(r"([()])", sql):
        depth += {"(": 1, ")": -1}.get(part, 0)
        outer.append(part if depth == 0 else " ")
    return re.search(r"\border\s+by\b", "".join(outer), re.IGNORECASE) is not None


def same_result(gold: Rows, predicted: Rows, ordered: bool) -> bool:
    """Equal as lists when `ordered`, else as multisets of rows. Column order and multiplicity always count."""
    gold, predicted = _rounded(gold), _rounded(predicted)
    if ordered:
        return gold == predicted
    return sorted(map(repr, gold)) == sorted(map(repr, predicted))


def same_in_some_column_order(gold: Rows, predicted: Rows, ordered: bool) -> bool:
    """Whether some order of the predicted columns makes the results the same; multiplicity of rows counts.

    Two empty results are the same whatever their columns.
    """
    gold, predicted = _rounded(gold), _rounded(predicted)
    if len(gold) != len(predicted) or (gold and len(gold[0]) != len(predicted[0])):
        return False
    width = len(gold[0]) if gold else 0
    chosen: list[int] = []

    def fits(columns: list[int]) -> bool:
        ours = [row[: len(columns)] for row in gold]
        theirs = [tuple(row[at] for at in columns) for row in predicted]
        return ours == theirs if ordered else Counter(ours) == Counter(theirs)

    def search() -> bool:  # column by column: few orders survive the first ones
        if len(chosen) == width:
            return True
        for at in range(width):
            if at not in chosen:
                chosen.append(at)
                if fits(chosen) and search():
                    return True
                chosen.pop()
        return False

    return search()


def _rounded(rows: Rows) -> Rows:
    # floats of the same aggregate may differ in the last bits with the order of summation
    return [tuple(round(v, 6) if isinstance(v, float) else v for v in row) for row in rows]
