"""Run a predicted query against a question's database and compare its result with the gold query's."""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING, Any

from scripts.scoring.sqlite import TIME_LIMIT, Rows, fetch

if TYPE_CHECKING:
    pass


def run(database: dict[str, Any], sql: str, time_limit: float = TIME_LIMIT) -> Rows:
    """Rows of one query on a fresh in-memory database (`{"schema": ..., "rows": {table: [row, ...]}}`).

    Raises `QueryError` for anything that is not one bounded, read-only query; see `fetch`. Gold results have a few
    dozen rows at most and take well under a millisecond.
    """
    connection = sqlite3.connect(":memory:", isolation_level=None)
    try:
        connection.executescript(database["schema"])
        for table, rows in database["rows"].items():
            if rows:
                marks = ",".join("?" * len(rows[0]))
                connection.executemany(f"INSERT INTO {table} VALUES ({marks})", rows)
        return fetch(connection, sql, time_limit)
    finally:
        connection.close()
