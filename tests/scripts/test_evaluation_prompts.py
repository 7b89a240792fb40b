"""Sets of prompts in their published formats: right answers pass, wrong ones do not, damaged files are refused."""

from __future__ import annotations

import gzip
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from mtad.errors import InvalidInput
from scripts.evaluation.humaneval import HumanEval, cut, pass_at_k
from scripts.evaluation.prompts import Demo, JsonLines, open_sets
from scripts.evaluation.spider import Spider
from scripts.scoring.sandbox import Sandbox, _problem
from scripts.scoring.sqlite import same_in_some_column_order, same_result

TABLES: list[dict[str, Any]] = [
    {
        "db_id": "concert",
        "table_names_original": ["stadium", "singer"],
        "column_names_original": [[-1, "*"], [0, "Stadium_ID"], [0, "Name"], [1, "Singer_ID"], [1, "Age"], [1, "Home"]],
        "column_types": ["text", "number", "text", "number", "number", "number"],
        "primary_keys": [1, 3],
        "foreign_keys": [[5, 1]],
    }
]
QUESTIONS: list[dict[str, Any]] = [
    {"db_id": "concert", "question": "Ages, youngest first?", "query": "SELECT Age FROM singer ORDER BY Age"},
    {"db_id": "concert", "question": "Ages and ids?", "query": "SELECT Age, Singer_ID FROM singer"},
    {"db_id": "concert", "question": "Places?", "query": "SELECT Name FROM stadium"},
]  # fmt: skip


@pytest.fixture
def spider(tmp_path: Path) -> Path:
    folder = tmp_path / "spider"
    (folder / "database" / "concert").mkdir(parents=True)
    (folder / "tables.json").write_text(json.dumps(TABLES))
    (folder / "dev.json").write_text(json.dumps(QUESTIONS))
    with sqlite3.connect(folder / "database" / "concert" / "concert.sqlite") as connection:
        connection.executescript(
            "CREATE TABLE stadium (Stadium_ID INTEGER, Name TEXT);"
            "CREATE TABLE singer (Singer_ID INTEGER, Age INTEGER, Home INTEGER);"
            "INSERT INTO singer VALUES (1, 30, 1), (2, 25, 1), (3, 30, 2);"
            "INSERT INTO stadium VALUES (1, CAST(X'FF41' AS TEXT));"
        )
    connection.close()
    return folder


def test_spiders_prompt_is_the_schema_the_question_and_sql(spider: Path) -> None:
    assert Spider(spider).prompts[0].text == (
        "Table stadium, columns = [*, Stadium_ID, Name]\n"
        "Table singer, columns = [*, Singer_ID, Age, Home]\n"
        "Foreign_keys = [singer.Home = stadium.Stadium_ID]\n"
        "Question: Ages, youngest first?\nSQL:"
    )


def test_spiders_gold_queries_pass_and_order_counts_with_order_by_only(spider: Path) -> None:
    own = Spider(spider)
    assert all(own.right(n, f" {question['query']};\n\nmore text") for n, question in enumerate(QUESTIONS))
    assert not own.right(0, "SELECT Age FROM singer ORDER BY Age DESC")
    assert own.right(1, "SELECT Age, Singer_ID FROM singer ORDER BY Age DESC")
    assert own.right(1, "SELECT Singer_ID, Age FROM singer"), "the order of columns is not part of a question"
    assert not own.right(1, "SELECT Age, Age FROM singer")
    assert not own.right(1, "SELECT DISTINCT Age, Home FROM singer")
    assert not own.right(0, "SELECT DISTINCT Age FROM singer ORDER BY Age")
    assert not own.right(0, "SELEC Age")
    assert not own.right(0, "")
    assert own.right(2, "SELECT Name FROM stadium"), "text that is not UTF-8 is read all the same"


def test_a_predicted_query_cannot_write_or_run_on(spider: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scripts.evaluation.spider.TIME_LIMIT", 0.05)
    own, file = Spider(spider), spider / "database" / "concert" / "concert.sqlite"
    before = file.read_bytes()
    forever = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT COUNT(*) FROM n"
    for text in ("DELETE FROM singer", "DROP TABLE singer", "PRAGMA query_only = OFF", forever):
        assert not own.right(0, text)
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    ("file", "text", "field"),
    [
        ("dev.json", "[", "spider"),
        ("dev.json", "{}", "spider"),
        ("dev.json", json.dumps([{**QUESTIONS[0], "db_id": "other"}]), "db_id"),
        ("dev.json", json.dumps([{"db_id": "concert", "query": "SELECT 1"}]), "question"),
        ("tables.json", json.dumps([{"db_id": "concert"}]), "tables.json"),
        ("tables.json", json.dumps([{**TABLES[0], "foreign_keys": [[99, 1]]}]), "tables.json"),
    ],
)
def test_a_damaged_spider_is_refused(spider: Path, file: str, text: str, field: str) -> None:
    (spider / file).write_text(text)
    with pytest.raises(InvalidInput) as caught:
        Spider(spider)
    assert field in caught.value.field


def test_a_spider_without_its_databases_or_with_a_broken_gold_query_is_refused(spider: Path) -> None:
    (spider / "dev.json").write_text(json.dumps([{**QUESTIONS[0], "query": "SELECT nothing FROM nowhere"}]))
    with pytest.raises(InvalidInput, match="does not run"):
        Spider(spider).right(0, "SELECT 1")
    (spider / "database" / "concert" / "concert.sqlite").unlink()
    with pytest.raises(InvalidInput, match="no such database"):
        Spider(spider)


def test_columns_are_matched_as_whole_rows() -> None:
    rows: list[tuple[Any, ...]] = [(1, 2), (2, 1), (1, 1)]
    assert same_in_some_column_order(rows, [(1, 1), (2, 1), (1, 2)], ordered=False)
    assert not same_in_some_column_order(rows, [(1, 1), (2, 1), (1, 2)], ordered=True)
    assert same_in_some_column_order(rows, [(2, 1), (1, 2), (1, 1)], ordered=True), "columns exchanged"
    assert not same_in_some_column_order([(1, 2), (2, 1)], [(1, 1), (2, 2)], ordered=False), "same columns, other rows"
    assert not same_in_some_column_order([(1,)], [(1,), (1,)], ordered=False)
    assert not same_in_some_column_order([(1, 2)], [(1,)], ordered=False)
    assert same_in_some_column_order([], [], ordered=True)
    assert not same_result([(1, 2)], [(2, 1)], ordered=False), "in the demo the order of columns counts"


PROBLEM = {
    "task_id": "HumanEval/0",
    "prompt": 'def largest(values):\n    """The largest value.\n    >>> largest([1, 3, 2])\n    3\n    """\n',
    "entry_point": "largest",
    "canonical_solution": "    return max(values)\n",
    "test": "METADATA = {}\n\ndef check(candidate):\n    assert candidate([1, 3]) == 3\n    assert candidate([-1]) < 0",
}


@pytest.fixture(params=["plain", "gzip"])
def humaneval(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    data = (json.dumps(PROBLEM) + "\n").encode()
    if request.param == "gzip":
        path = tmp_path / "HumanEval.jsonl.gz"
        path.write_bytes(gzip.compress(data))
    else:
        path = tmp_path / "HumanEval.jsonl"
        path.write_bytes(data)
    return path


@pytest.mark.skipif(bool(_problem()), reason=f"no sandbox here: {_problem()}")
def test_humaneval_runs_the_problems_tests(humaneval: Path) -> None:
    own = HumanEval(humaneval, sandbox=Sandbox(seconds=120.0))
    assert [prompt.text for prompt in own.prompts] == [PROBLEM["prompt"]]
    assert own.right(0, PROBLEM["canonical_solution"])
    assert own.right(0, PROBLEM["canonical_solution"] + "\ndef next_one(:\n"), "what follows the function is cut away"
    assert not own.right(0, "    return min(values)\n")
    assert not own.right(0, "    return max(values\n")
    assert not own.right(0, "")


def test_a_completion_ends_where_the_function_does() -> None:
    stop = HumanEval.stop
    assert cut("    return 1\n\n\ndef other():", stop) == "    return 1\n\n"
    assert cut("    # not this\n    if x:\n        print(1)\n", stop) == "    # not this\n    if x:\n        print(1)\n"
    assert cut("    return 1\nprint(2)\nclass A:", stop) == "    return 1"


def test_pass_at_k_counts_every_choice_of_k() -> None:
    from itertools import combinations

    for samples in range(1, 7):
        for right in range(samples + 1):
            texts = [at < right for at in range(samples)]
            for k in range(1, samples + 1):
                chosen = [any(own) for own in combinations(texts, k)]
                assert pass_at_k(samples, right, k) == pytest.approx(sum(chosen) / len(chosen))
    with pytest.raises(ValueError, match="k = 3"):
        pass_at_k(2, 1, 3)


@pytest.mark.parametrize("text", ["", "not json", "{}", json.dumps({**PROBLEM, "test": 3}), json.dumps([PROBLEM])])
def test_a_damaged_humaneval_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "problems.jsonl"
    path.write_text(text)
    with pytest.raises(InvalidInput, match="humaneval"):
        HumanEval(path)


def test_a_gzip_cut_short_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "problems.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(PROBLEM).encode())[:-12])
    with pytest.raises(InvalidInput, match="cannot be read"):
        HumanEval(path)


def test_lines_with_answers_are_scored_and_others_are_not(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "2 + 2 =", "answer": " 4"}\n\n{"prompt": "3 + 3 =", "answer": "6", "note": 1}\n')
    own = JsonLines(path)
    assert (own.name, own.scored, len(own.prompts)) == ("mine", True, 2)
    assert own.right(0, "4 \n")
    assert not own.right(1, "4")
    path.write_text('{"prompt": "Once upon"}\n')
    assert JsonLines(path).right(0, "a time") is None
    assert not JsonLines(path).scored


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("", "prompts"),
        ("[1]", "line 1"),
        ('{"prompt": "a"}\n{"prompt": ""}', "line 2 prompt"),
        ('{"text": "a"}', "line 1 prompt"),
        ('{"prompt": "a", "answer": 3}', "line 1 answer"),
        ('{"prompt": "a", "answer": "b"}\n{"prompt": "c"}', "answer"),
    ],
)
def test_damaged_lines_are_refused_by_number_and_field(tmp_path: Path, text: str, field: str) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(text)
    with pytest.raises(InvalidInput) as caught:
        JsonLines(path)
    assert field in caught.value.field


def test_the_demos_answers_score_as_right_and_code_is_not_scored() -> None:
    sql, code = Demo("sql", "development", 20), Demo("code", "test", 3)
    gold = {example.prompt: example.answer for example in sql._examples}
    assert all(sql.right(n, gold[prompt.text]) for n, prompt in enumerate(sql.prompts))
    assert not sql.right(0, "SELECT 1")
    assert code.right(0, "anything") is None
    assert not code.scored


def test_sets_are_asked_for_by_name_and_path(spider: Path, humaneval: Path) -> None:
    found = open_sets(["sql", f"spider={spider}", f"humaneval={humaneval}"], "development", 1)
    assert [(one.name, len(one.prompts), one.scored) for one in found] == [
        ("sql", 1, True),
        ("spider", 1, True),
        ("humaneval", 1, True),
    ]
    for wrong in (["spider"], ["sql=x"], ["mbpp"], ["sql", "sql"], [f"spider={spider}/none"]):
        with pytest.raises(InvalidInput):
            open_sets(wrong, "development")
    with pytest.raises(InvalidInput, match="limit"):
        open_sets(["sql"], "development", 0)
