"""The demo's material: gold queries run and decide, splits are disjoint, texts end, execution survives any text."""

from __future__ import annotations

import ast
import itertools
import json
import random
import re
from pathlib import Path

import jinja2
import pytest

from mtad.errors import InvalidInput
from scripts.demo import chat, corpus
from scripts.demo.dataset import DATA, SIZES, Example, conversations, load, matches, sql_examples, training_groups
from scripts.demo.lexicon import LABELS, NUMBERS, VAGUE
from scripts.demo.questions import Author
from scripts.demo.schemas import make_schema
from scripts.scoring.sql_result import run
from scripts.scoring.sqlite import QueryError, is_ordered, same_result

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def sql() -> list[Example]:
    return [example for split in SIZES for example in load(split, "sql")]


def tables_of(prompt: str) -> set[tuple[str, frozenset[str]]]:
    found = re.findall(r"Table (\w+), columns = \[\*, (.*?)\]", prompt)
    # foreign keys are not part of the combination: they say how tables are linked, not what they hold
    return {(name, frozenset(c for c in columns.split(", ") if not c.endswith("_id"))) for name, columns in found}


def wrong_versions(query: str) -> list[str]:
    """Queries one mistake away from `query`."""
    swaps = [
        (" > ", " < "), (" < ", " > "), (" >= ", " < "), (" <= ", " > "), (" DESC", " ASC"), (" ASC", " DESC"),
        ("AVG(", "SUM("), ("MAX(", "MIN("), ("MIN(", "MAX("), ("SUM(", "AVG("), (" AND ", " OR "), (" OR ", " AND "),
        ("<>", "="), ("!=", "="), (" = '", " <> '"), ("COUNT(DISTINCT ", "COUNT("), ("NOT IN", "IN"),
    ]  # fmt: skip
    return [query.replace(a, b) for a, b in swaps if a in query]


def test_enough_examples_of_each_kind() -> None:
    for split, sizes in SIZES.items():
        assert {kind: len(load(split, kind)) for kind in sizes} == sizes
    assert sum(p.stat().st_size for p in DATA.glob("*.jsonl")) < 4e6


def test_gold_runs_and_matches_itself(sql: list[Example]) -> None:
    for e in sql:
        assert e.database is not None
        assert run(e.database, e.answer), e.answer
        assert matches(e, e.answer), e.answer


def test_wrong_queries_give_wrong_results(sql: list[Example]) -> None:
    outcomes = [matches(e, wrong) for e in sql for wrong in wrong_versions(e.answer)]
    assert len(outcomes) > 500
    assert sum(outcomes) / len(outcomes) < 0.06


def test_equivalent_styles_have_equal_results() -> None:
    checked = 0
    for _, e in zip(range(60), sql_examples("test", seed=7), strict=False):
        assert matches(e, e.answer)
        checked += 1
    rng = random.Random(3)
    equal = total = 0
    for _ in range(150):
        schema = make_schema(rng, "train")
        q = Author(rng, schema, plain=rng.random() < 0.5).write()
        gold = run(schema.database(), q.gold)
        for other in q.variants:
            equal += same_result(gold, run(schema.database(), other), is_ordered(q.gold))
            total += 1
    assert checked == 60
    assert equal / total > 0.95  # only a tie for the most children makes two styles differ; held-out data has none


def test_held_out_schemas_share_no_table_with_training() -> None:
    held_out = {s: set().union(*(tables_of(e.prompt) for e in load(s, "sql"))) for s in SIZES}
    trained: set[tuple[str, frozenset[str]]] = set()
    for schema, _ in itertools.islice(training_groups(), 2000):
        trained |= tables_of(schema)
    assert len(trained) > 2000
    assert not trained & (held_out["development"] | held_out["test"])
    assert not held_out["development"] & (held_out["test"] | held_out["ambiguous"])
    assert not trained & held_out["ambiguous"]


def test_prompts_are_unique_across_splits() -> None:
    for kind in ("sql", "code", "json"):
        prompts = [e.prompt for s, sizes in SIZES.items() if kind in sizes for e in load(s, kind)]
        assert len(set(prompts)) == len(prompts)


def test_standard_library_files_are_in_one_split() -> None:
    names = {s: {name for name, _ in corpus.files(s)} for s in ("train", "development", "test")}
    assert all(names.values())
    assert not names["train"] & names["development"]
    assert not names["train"] & names["test"]
    assert not names["development"] & names["test"]


def test_a_plain_question_has_one_reading_and_an_ambiguous_one_has_more() -> None:
    rng = random.Random(1)
    schemas = [make_schema(rng, "train") for _ in range(200)]
    plain, vague = ([Author(rng, s, p).write() for s in schemas] for p in (True, False))
    assert not any(question.readings for question in plain)
    assert sum(question.readings > 0 for question in vague) > 100
    words = {word for group in VAGUE.values() for word in group} - {w for c in NUMBERS.values() for w in c[3]}
    words -= {word for column in LABELS.values() for word in column[2]}
    mentioned = re.compile(rf" ({'|'.join(words)}) (is|of|values)\b")
    assert not [question.text for question in plain if mentioned.search(question.text)]


def test_code_is_functions_that_are_complete() -> None:
    for split in ("development", "test"):
        for e in load(split, "code"):
            assert len(ast.parse(e.prompt + e.answer).body) == 1
    method = "x = 1\nclass A:\n    @property\n    def f(self):\n        " + "y = 1; " * 40 + "\n"
    assert corpus.functions(method)[0].startswith("def f(self):\n    y = 1")


def test_an_object_holds_the_facts_of_its_text_and_null_for_what_is_not_told() -> None:
    told = []
    for e in load("test", "json"):
        fields = re.findall(r"\w+", e.prompt.splitlines()[0])[1:]
        facts = json.loads(e.answer)
        assert list(facts) == fields
        told += [value for value in facts.values() if value is not None]
        assert all(str(value) in e.prompt for value in facts.values() if value is not None)
    assert len(told) < sum(len(json.loads(e.answer)) for e in load("test", "json"))


def test_conversations_are_trained_as_the_template_writes_them() -> None:
    template = jinja2.Environment().from_string(chat.TEMPLATE)

    def rendered(messages: list[dict[str, str]]) -> str:
        return template.render(messages=messages, eos_token=chat.END, add_generation_prompt=True)

    turns = list(itertools.islice(conversations(1), 3))
    shared, said = turns[0][0].removeprefix("<|system|>").removesuffix(chat.ASSISTANT).split(chat.USER)
    messages = [{"role": "system", "content": shared}, {"role": "user", "content": said}]
    written = ""
    for (prompt, answer), following in itertools.pairwise([*turns, ("", "")]):
        written += prompt
        assert rendered(messages) == written
        written += answer + chat.END
        content = following[0].removeprefix(chat.USER).removesuffix(chat.ASSISTANT)
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": content}]
    starts = [shared for shared, _ in itertools.islice(training_groups(), 200) if shared.startswith("<|")]
    assert {start.startswith(chat.USER) for start in starts} == {True, False}
    assert all(start.endswith(chat.USER) for start in starts if start.startswith("<|system|>"))


def test_examples_that_a_split_does_not_have_are_refused() -> None:
    with pytest.raises(InvalidInput, match="no examples of kind code; development has sql, code, json"):
        load("ambiguous", "code")
    with pytest.raises(InvalidInput, match="split"):
        load("train", "sql")


def test_the_same_seed_gives_the_same_data() -> None:
    for split in SIZES:
        assert list(itertools.islice(sql_examples(split), 25)) == load(split, "sql")[:25]
    assert next(training_groups(5)) == next(training_groups(5))
    assert next(training_groups(5)) != next(training_groups(6))


@pytest.mark.parametrize(
    "text",
    [
        "", ";", "SELECT", "DROP TABLE club", "\x00", "SELECT 1; SELECT 2", "é" * 3000, "(" * 5000,
        "SELECT zeroblob(999999999)", "ATTACH 'x.db' AS x", "SELECT '\ud800'",
    ],
)  # fmt: skip
def test_garbage_is_wrong_not_an_error_and_writes_nothing(
    sql: list[Example], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert matches(sql[0], text) is False
    assert not list(tmp_path.iterdir())


def test_runaway_queries_stop(sql: list[Example]) -> None:
    table = re.findall(r"Table (\w+)", sql[0].prompt)[0]
    endless = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT "
    crossed = f"SELECT COUNT(*) FROM {', '.join(f'{table} AS t{i}' for i in range(12))}"
    for query in (endless + "COUNT(*) FROM n", endless + "x FROM n", crossed):
        assert matches(sql[0], query) is False


def test_execution_cannot_change_the_database(sql: list[Example]) -> None:
    database = sql[0].database
    assert database is not None
    table = next(iter(database["rows"]))
    with pytest.raises(QueryError):
        run(database, f"DELETE FROM {table}")


def test_order_counts_only_where_gold_asks_for_it() -> None:
    assert is_ordered("SELECT name FROM club ORDER BY age")
    assert not is_ordered("SELECT name FROM club WHERE age = (SELECT age FROM club ORDER BY age LIMIT 1)")
    assert same_result([(1,), (2,)], [(2,), (1,)], ordered=False)
    assert not same_result([(1,), (2,)], [(2,), (1,)], ordered=True)
    assert not same_result([(1,), (1,)], [(1,)], ordered=False)


def test_code_has_no_database() -> None:
    with pytest.raises(ValueError, match="kind 'sql'"):
        matches(load("test", "code")[0], "SELECT 1")
