"""A generated database: two or three short tables, foreign keys, and rows that tell right queries from wrong ones."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, field
from typing import Any

from scripts.demo.lexicon import COLUMNS, LABELS, NAMES, NUMBERS, RELATIONS


@dataclass(frozen=True)
class Table:
    """One table. `columns` excludes the key and the foreign key; `parent` is the table that the latter refers to."""

    name: str
    columns: tuple[str, ...]
    parent: str | None = None
    rows: list[list[Any]] = field(default_factory=list, compare=False)

    @property
    def key(self) -> str:
        return f"{self.name}_id"

    @property
    def all_columns(self) -> tuple[str, ...]:
        """Key, plain columns, then the foreign key where there is one: the order of `rows`."""
        return (self.key, *self.columns, *((f"{self.parent}_id",) if self.parent else ()))

    def values(self, column: str) -> list[Any]:
        at = self.all_columns.index(column)
        return [row[at] for row in self.rows]

    def numbers(self) -> list[str]:
        return [c for c in self.columns if c in NUMBERS]

    def labels(self) -> list[str]:
        return [c for c in self.columns if c in LABELS]


@dataclass(frozen=True)
class Schema:
    """Tables in prompt order. Tables with a parent name it among `tables`."""

    tables: tuple[Table, ...]

    def prompt(self) -> str:
        """The schema part of the prompt, in Spider's usual layout, ending in a newline."""
        lines = [f"Table {t.name}, columns = [*, {', '.join(t.all_columns)}]" for t in self.tables]
        links = [f"{t.name}.{t.parent}_id = {t.parent}.{t.parent}_id" for t in self.tables if t.parent]
        return "\n".join([*lines, f"Foreign_keys = [{', '.join(links)}]"]) + "\n"

    def database(self) -> dict[str, Any]:
        """What a query is run on: `{"schema": CREATE statements, "rows": {table: rows}}`."""
        creates = []
        for t in self.tables:
            columns = [f"{c} {'TEXT' if c == 'name' or c in LABELS else 'INTEGER'}" for c in t.all_columns]
            creates.append(f"CREATE TABLE {t.name} ({', '.join(columns)});")
        return {"schema": "\n".join(creates), "rows": {t.name: t.rows for t in self.tables}}


def split_of(table: str, columns: tuple[str, ...]) -> str:
    """The one split a table with this set of columns may appear in: "train", "development" or "test".

    Decided by a hash, so generators of different splits can never produce the same table.
    """
    digest = hashlib.sha256(f"{table}:{','.join(sorted(columns))}".encode()).digest()[0]
    return "development" if digest < 26 else "test" if digest < 52 else "train"


def columns_of(rng: random.Random, table: str, split: str) -> tuple[str, ...]:
    """Columns of a table in any order, the name first, that put it into `split`."""
    while True:
        numbers = rng.sample(sorted(NUMBERS), rng.choice((1, 2, 2)))
        if len(numbers) == 2 and rng.random() < 0.85:  # two columns that one vague word fits
            numbers[1] = rng.choice(_alike(numbers[0]))
        labels = rng.sample(sorted(LABELS), rng.choice((1, 1, 2)))
        if len(labels) == 2 and rng.random() < 0.8:
            labels[1] = rng.choice(_alike(labels[0]))
        plain = numbers + labels
        rng.shuffle(plain)
        columns = ("name", *plain)
        if split_of(table, columns) == split:
            return columns


def _alike(column: str) -> list[str]:
    return [other for other, one in COLUMNS.items() if other != column and one.group == COLUMNS[column].group]


def _fill(rng: random.Random, table: Table, parents: dict[str, Table]) -> None:
    count = rng.randint(6, 7) if table.parent is None else rng.randint(10, 14)
    data: dict[str, list[Any]] = {table.key: list(range(1, count + 1)), "name": rng.sample(NAMES, count)}
    for column in table.columns:
        if column in NUMBERS:  # distinct, so "the largest" is one row, and > differs from >= at every value used
            data[column] = rng.sample(NUMBERS[column].values, count)
        elif column in LABELS:  # few distinct values, so that DISTINCT, COUNT and GROUP BY matter
            pool = rng.sample(LABELS[column].values, 3)
            data[column] = [rng.choice((pool[0], *pool)) for _ in range(count)]
    if table.parent:  # some parents stay childless, and one is the most frequent
        parent = parents[table.parent]
        keys = parent.values(parent.key)
        used = rng.sample(keys, len(keys) - 2)
        data[f"{table.parent}_id"] = [rng.choice((used[0], *used)) for _ in range(count)]
    table.rows.extend([data[c][i] for c in table.all_columns] for i in range(count))


def make_schema(rng: random.Random, split: str) -> Schema:
    """A random schema with rows whose every table belongs to `split` (see `split_of`)."""
    child, parent = rng.choice(RELATIONS)
    parents = {child: parent}
    if rng.random() < 0.3:  # a third table: a second child, or a grandparent
        extra = [r for r in RELATIONS if (r[1] == parent and r[0] != child) or r[0] == parent]
        if extra:
            parents.update([rng.choice(extra)])
    order = list(dict.fromkeys(name for link in parents.items() for name in link))
    rng.shuffle(order)
    tables = {name: Table(name, columns_of(rng, name, split), parents.get(name)) for name in order}
    pending = list(order)
    while pending:
        name = pending.pop(0)
        if parents.get(name) in pending:
            pending.append(name)
        else:
            _fill(rng, tables[name], tables)
    return Schema(tuple(tables.values()))
