"""A generated database: two or three short tables, foreign keys, and rows that tell right queries from wrong ones."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from scripts.demo.lexicon import LABELS, NAMES, NUMBERS, RELATIONS, TABLES


@dataclass(frozen=True)
class Table:
    """One table. `columns` excludes the key and the foreign keys; `parent` maps a foreign key column to its table."""

    name: str
    columns: tuple[str, ...]
    parent: tuple[str, str] | None = None
    rows: list[list[Any]] = field(default_factory=list, compare=False)

    @property
    def key(self) -> str:
        """Name of the primary key column."""
        return f"{self.name}_id"

    @property
    def all_columns(self) -> tuple[str, ...]:
        """Key, plain columns, then the foreign key where there is one: the order of `rows`."""
        return (self.key, *self.columns, *((self.parent[0],) if self.parent else ()))

    @property
    def plural(self) -> tuple[str, ...]:
        """Words a question may use for the rows of this table."""
        return TABLES[self.name]

    def values(self, column: str) -> list[Any]:
        """All values of one column, in row order."""
        at = self.all_columns.index(column)
        return [row[at] for row in self.rows]

    def numbers(self) -> list[str]:
        """Numeric plain columns, as listed in the prompt."""
        return [c for c in self.columns if c in NUMBERS]

    def labels(self) -> list[str]:
        """Text plain columns other than the name, as listed in the prompt."""
        return [c for c in self.columns if c in LABELS]


@dataclass(frozen=True)
class Schema:
    """Tables in prompt order. Tables with a parent name it among `tables`."""

    tables: tuple[Table, ...]

    def get(self, name: str) -> Table:
        """The table called `name`."""
        return next(t for t in self.tables if t.name == name)

    def prompt(self) -> str:
        """The schema part of the prompt, in Spider's usual layout, ending in a newline."""
        keys = [(f"{t.name}.{t.parent[0]}", f"{t.parent[1]}.{t.parent[0]}") for t in self.tables if t.parent]
        return schema_prompt([(t.name, t.all_columns) for t in self.tables], keys)

    def database(self) -> dict[str, Any]:
        """What `execute` needs: `{"schema": CREATE statements, "rows": {table: rows}}`."""
        creates = []
        for t in self.tables:
            columns = [f"{c} {'TEXT' if c == 'name' or c in LABELS else 'INTEGER'}" for c in t.all_columns]
            creates.append(f"CREATE TABLE {t.name} ({', '.join(columns)});")
        return {"schema": "\n".join(creates), "rows": {t.name: t.rows for t in self.tables}}


def schema_prompt(tables: Iterable[tuple[str, Iterable[str]]], keys: Iterable[tuple[str, str]]) -> str:
    """Tables with their columns, and foreign keys as (column, column it refers to), in Spider's usual layout."""
    lines = [f"Table {name}, columns = [*, {', '.join(columns)}]" for name, columns in tables]
    links = ", ".join(f"{column} = {referred}" for column, referred in keys)
    return "\n".join([*lines, f"Foreign_keys = [{links}]"]) + "\n"


def split_of(table: str, columns: tuple[str, ...]) -> str:
    """The one split a table with this set of columns may appear in: "train", "development" or "test".

    Decided by a hash, so no list of held-out schemas has to be kept, and generators of different splits can never
    produce the same table.
    """
    digest = hashlib.sha256(f"{table}:{','.join(sorted(columns))}".encode()).digest()[0]
    return "development" if digest < 26 else "test" if digest < 52 else "train"


def columns_of(rng: random.Random, table: str, split: str) -> tuple[str, ...]:
    """Columns of a table in any order, the name first, that put it into `split`."""
    while True:
        numbers = rng.sample(sorted(NUMBERS), rng.choice((1, 2, 2)))
        if len(numbers) == 2 and rng.random() < 0.85:  # two columns one vague word fits: see lexicon.VAGUE
            same = [n for n in NUMBERS if n != numbers[0] and NUMBERS[n][2] == NUMBERS[numbers[0]][2]]
            numbers[1] = rng.choice(same)
        labels = rng.sample(sorted(LABELS), rng.choice((1, 1, 2)))
        if len(labels) == 2 and rng.random() < 0.8:
            labels[1] = rng.choice([c for c in LABELS if c != labels[0] and LABELS[c][1] == LABELS[labels[0]][1]])
        plain = numbers + labels
        rng.shuffle(plain)
        columns = ("name", *plain)
        if split_of(table, columns) == split:
            return columns


def _fill(rng: random.Random, table: Table, parents: dict[str, Table]) -> None:
    count = rng.randint(6, 7) if table.parent is None else rng.randint(10, 14)
    data: dict[str, list[Any]] = {table.key: list(range(1, count + 1)), "name": rng.sample(NAMES, count)}
    for column in table.columns:
        if column in NUMBERS:  # distinct, so "the largest" is one row, and > differs from >= at every value used
            low, high = NUMBERS[column][:2]
            data[column] = rng.sample(range(low, high + 1), count)
        elif column in LABELS:  # few distinct values, so that DISTINCT, COUNT and GROUP BY matter
            pool = rng.sample(LABELS[column][0], 3)
            data[column] = [rng.choice((pool[0], *pool)) for _ in range(count)]
    if table.parent:  # some parents stay childless, and one is the most frequent
        keys = parents[table.parent[1]].values(table.parent[0])
        used = rng.sample(keys, len(keys) - 2)
        data[table.parent[0]] = [rng.choice((used[0], *used)) for _ in range(count)]
    table.rows.extend([data[c][i] for c in table.all_columns] for i in range(count))


def make_schema(rng: random.Random, split: str) -> Schema:
    """A random schema with rows whose every table belongs to `split` (see `split_of`)."""
    child, parent = rng.choice(RELATIONS)
    links = {child: parent}
    if rng.random() < 0.3:  # a third table: a second child, or a grandparent
        extra = [r for r in RELATIONS if (r[1] == parent and r[0] != child) or r[0] == parent]
        if extra:
            third = rng.choice(extra)
            links[third[0]] = third[1]
    order: list[str] = []
    for a, b in links.items():
        order += [n for n in (a, b) if n not in order]
    rng.shuffle(order)
    made: dict[str, Table] = {}
    for name in order:
        up = links.get(name)
        made[name] = Table(name, columns_of(rng, name, split), (f"{up}_id", up) if up else None)
    pending = list(order)
    while pending:
        name = pending.pop(0)
        up = links.get(name)
        if up and up in pending:
            pending.append(name)
        else:
            _fill(rng, made[name], made)
    return Schema(tuple(made[n] for n in order))
