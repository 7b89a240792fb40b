"""One predicted query on a question's database, within limits, and whether two results are the same.

A query runs in this process: SQLite's authorizer lets it read and nothing else, and its progress handler ends it.
"""

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
READING = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE)

Rows = list[tuple[Any, ...]]


class QueryError(ValueError):
    """A query that SQLite refuses, that does not only read, that runs too long, or that returns too much."""


def run(database: dict[str, Any], sql: str) -> Rows:
    """Rows of one query on a fresh in-memory database (`{"schema": ..., "rows": {table: [row, ...]}}`).

    Raises:
        QueryError: anything that is not one bounded, read-only query: bad SQL, several statements, a write, a file,
            more than `ROW_LIMIT` rows, or more than `TIME_LIMIT` seconds of CPU time.
    """
    connection = sqlite3.connect(":memory:", isolation_level=None)
    try:
        connection.executescript(database["schema"])
        for table, rows in database["rows"].items():
            if rows:
                marks = ",".join("?" * len(rows[0]))
                connection.executemany(f"INSERT INTO {table} VALUES ({marks})", rows)
        return _fetch(connection, sql)
    finally:
        connection.close()


def _fetch(connection: sqlite3.Connection, sql: str) -> Rows:
    # one huge string would escape the row limit, and one comparison of long ones the time limit
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 10_000)
    connection.setlimit(sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, 100)
    connection.set_authorizer(lambda action, *_: sqlite3.SQLITE_OK if action in READING else sqlite3.SQLITE_DENY)
    stop = time.thread_time() + TIME_LIMIT
    connection.set_progress_handler(lambda: int(time.thread_time() > stop), 1000)
    try:
        rows: Rows = connection.execute(sql).fetchmany(ROW_LIMIT + 1)
    except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError, MemoryError) as error:
        raise QueryError(f"{type(error).__name__}: {error}") from error
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


def same_result(gold: Rows, predicted: Rows, ordered: bool) -> bool:
    """Equal as lists when `ordered`, else as multisets of rows. Column order and multiplicity always count."""
    gold, predicted = _rounded(gold), _rounded(predicted)
    if ordered:
        return gold == predicted
    return Counter(gold) == Counter(predicted)


def _rounded(rows: Rows) -> Rows:
    # floats of the same aggregate may differ in the last bits with the order of summation
    return [tuple(round(v, 6) if isinstance(v, float) else v for v in row) for row in rows]
