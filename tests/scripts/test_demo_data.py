"""The demo's data: what the generator makes, what tells right queries from wrong ones, and what is held out."""

from __future__ import annotations

import ast
import random
import re
import sys
from itertools import islice, pairwise
from pathlib import Path

import jinja2
import pytest

from mtad.errors import InvalidInput
from scripts.demo import dataset
from scripts.demo.dataset import ASSISTANT, END, SIZES, USER, Example, conversations, load, matches, training_groups
from scripts.demo.questions import Author
from scripts.demo.schemas import make_schema
from scripts.demo.tokenizer import TEMPLATE

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


def test_a_plain_question_has_one_reading_and_an_ambiguous_one_has_more() -> None:
    rng = random.Random(1)
    schemas = [make_schema(rng, "train") for _ in range(200)]
    plain, vague = ([Author(rng, s, p).write() for s in schemas] for p in (True, False))
    assert not any(question.readings for question in plain)
    assert sum(question.readings > 0 for question in vague) > 100


def test_conversations_are_trained_as_the_template_writes_them() -> None:
    template = jinja2.Environment().from_string(TEMPLATE)
    turns = list(islice(conversations(1), 3))
    shared, said = turns[0][0].removeprefix("<|system|>").removesuffix(ASSISTANT).split(USER)
    messages, written = [{"role": "system", "content": shared}, {"role": "user", "content": said}], ""
    for (prompt, answer), following in pairwise([*turns, ("", "")]):
        written += prompt
        assert template.render(messages=messages, eos_token=END, add_generation_prompt=True) == written
        written += answer + END
        content = following[0].removeprefix(USER).removesuffix(ASSISTANT)
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": content}]


def test_examples_that_a_split_does_not_have_are_refused() -> None:
    with pytest.raises(InvalidInput, match="no examples of kind code; development has sql, code, json"):
        load("ambiguous", "code")
