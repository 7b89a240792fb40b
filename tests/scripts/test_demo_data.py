"""The demo's data: what the generator makes, what tells right queries from wrong ones, and what is held out."""

from __future__ import annotations

import ast
import re
import sys
from itertools import islice
from pathlib import Path

import pytest

from scripts.demo import dataset
from scripts.demo.dataset import SIZES, Example, load, matches, training_groups

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def sql() -> list[Example]:
    return [example for split in SIZES for example in load(split, "sql")]


def test_the_generator_makes_the_committed_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["dataset", str(tmp_path)])
    dataset.main()
    for split, sizes in SIZES.items():
        made, committed = (
            [line for line in (folder / f"{split}.jsonl").read_text().splitlines() if '"kind": "code"' not in line]
            for folder in (tmp_path, dataset.DATA)
        )
        assert made == committed
        assert {kind: len(load(split, kind)) for kind in sizes} == sizes
        for example in load(split, "code") if "code" in sizes else ():  # Python versions differ in their library
            assert len(ast.parse(example.prompt + example.answer).body) == 1, "a function, and all of it"


def test_a_gold_query_is_right_and_most_queries_with_one_mistake_are_wrong(sql: list[Example]) -> None:
    assert all(matches(e, e.answer) for e in sql)
    mistakes = [
        (" > ", " < "), (" < ", " > "), (" >= ", " < "), (" <= ", " > "), (" DESC", " ASC"), (" ASC", " DESC"),
        ("AVG(", "SUM("), ("MAX(", "MIN("), ("MIN(", "MAX("), ("SUM(", "AVG("), (" AND ", " OR "), (" OR ", " AND "),
        ("<>", "="), ("!=", "="), (" = '", " <> '"), ("COUNT(DISTINCT ", "COUNT("), ("NOT IN", "IN"),
    ]  # fmt: skip
    outcomes = [matches(e, e.answer.replace(a, b)) for e in sql for a, b in mistakes if a in e.answer]
    assert len(outcomes) > 500
    assert sum(outcomes) / len(outcomes) < 0.06
    assert not any(matches(sql[0], text) for text in ("", "SELECT", "ATTACH 'x.db' AS x"))


def tables_of(prompts: list[str]) -> set[tuple[str, frozenset[str]]]:
    found = (one for prompt in prompts for one in re.findall(r"Table (\w+), columns = \[\*, (.*?)\]", prompt))
    # foreign keys are not part of the combination: they say how tables are linked, not what they hold
    return {(name, frozenset(c for c in columns.split(", ") if not c.endswith("_id"))) for name, columns in found}


def test_no_table_is_in_two_splits() -> None:
    trained = tables_of([schema for schema, _ in islice(training_groups(), 1000)])
    development, test, ambiguous = (tables_of([e.prompt for e in load(split, "sql")]) for split in SIZES)
    assert len(trained) > 1000
    assert not trained & (development | test | ambiguous)
    assert not development & (test | ambiguous)
