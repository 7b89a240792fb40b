"""Run a predicted query against a question's database and compare its result with the gold query's."""

from __future__ import annotations

import re
import sqlite3
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scripts.demo.dataset import Example

ROW_LIMIT = 2000  # rows read of a result; gold results have a few dozen at most
TIME_LIMIT = 0.5  # seconds one query may run; gold queries take well under a millisecond


Rows = list[tuple[Any, ...]]


class QueryError(ValueError):
    """A query that SQLite refuses, that runs too long, or that returns too much."""


def run(database: dict[str, Any], sql: str, time_limit: float = TIME_LIMIT) -> Rows:
    """Rows of one query on a fresh in-memory database (`{"schema": ..., "rows": {table: [row, ...]}}`).

    Raises `QueryError` for anything that is not one bounded, read-only query: bad SQL, several statements, a write,
    more than `ROW_LIMIT` rows, or more than `time_limit` seconds.
    """
    connection = sqlite3.connect(":memory:", isolation_level=None)
    try:
        connection.executescript(database["schema"])
        for table, rows in database["rows"].items():
            if rows:
                marks = ",".join("?" * len(rows[0]))
                connection.executemany(f"INSERT INTO {table} VALUES ({marks})", rows)
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 1_000_000)  # one huge string would escape the row limit
        connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)  # ATTACH would create a file
        connection.execute("PRAGMA query_only = ON")
        stop = time.monotonic() + time_limit
        connection.set_progress_handler(lambda: int(time.monotonic() > stop), 1000)
        rows = connection.execute(sql).fetchmany(ROW_LIMIT + 1)
    except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError, MemoryError) as error:
        raise QueryError(f"{type(error).__name__}: {error}") from error
    finally:
        connection.close()
    if len(rows) > ROW_LIMIT:
        raise QueryError(f"more than {ROW_LIMIT} rows")
    return rows


def is_ordered(sql: str) -> bool:
    """Whether the order of a query's rows is part of its meaning: an ORDER BY outside every parenthesis."""
    depth, outer = 0, []
    for part in re.split(r"([()])", sql):
        depth += {"(": 1, ")": -1}.get(part, 0)
        outer.append(part if depth == 0 else " ")
    return re.search(r"\border\s+by\b", "".join(outer), re.IGNORECASE) is not None


def _rounded(rows: Rows) -> Rows:
    # floats of the same aggregate may differ in the last bits with the order of summation
    return [tuple(round(v, 6) if isinstance(v, float) else v for v in row) for row in rows]


def same_result(gold: Rows, predicted: Rows, ordered: bool) -> bool:
    """Equal as lists when `ordered`, else as multisets of rows. Column order and multiplicity always count."""
    gold, predicted = _rounded(gold), _rounded(predicted)
    if ordered:
        return gold == predicted
    return sorted(map(repr, gold)) == sorted(map(repr, predicted))


def matches(example: Example, predicted_sql: str) -> bool:
    """Whether `predicted_sql` gives the gold query's result on the example's database. Never raises on bad SQL."""
    if example.database is None:
        raise ValueError(f"example {example.id!r} has no database: only kind 'sql' can be executed")
    try:
        predicted = run(example.database, predicted_sql.strip())
    except QueryError:
        return False
    gold = run(example.database, example.answer.strip())
    return same_result(gold, predicted, is_ordered(example.answer))
