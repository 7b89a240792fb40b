"""The demo's examples: SQL questions and records made from a seed, functions of the standard library, three splits.

    python -m scripts.demo.dataset        # rewrites data/*.jsonl

`prompt + answer` is a document, and the tokenizer's end-of-text token follows it. A SQL answer is one gold query (with
the leading space that follows "SQL:"), a JSON answer is an object, and a code answer is the rest of a function.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from mtad.errors import InvalidInput
from scripts.demo import chat, corpus
from scripts.demo.questions import Author, Question
from scripts.demo.records import as_json, fields_prompt, make_fields, make_record, text_prompt
from scripts.demo.schemas import Schema, make_schema
from scripts.paths import DEMO
from scripts.scoring.sql_result import run
from scripts.scoring.sqlite import QueryError, is_ordered, same_result

DATA = DEMO / "data"
SEED = 2024
VAGUE_SHARE = 0.4  # of the questions trained on; the rest is plain
RECORD_SHARE, CHAT_SHARE = 0.12, 0.2  # of the groups trained on: JSON instead of SQL; either of them as a conversation
UNFIT = "Penis"  # a name that the syllables of the lexicon give; nobody should read it
SIZES = {
    "development": {"sql": 300, "code": 80, "json": 60},
    "test": {"sql": 500, "code": 120, "json": 100},
    "ambiguous": {"sql": 300},  # questions that can be read in two ways, about databases of the test split
}


@dataclass(frozen=True)
class Example:
    """One line of data/*.jsonl. `database` is None for kind "code"; see `execute.run` for its layout."""

    id: str
    kind: str
    prompt: str
    answer: str
    database: dict[str, Any] | None = None


def question_prompt(text: str) -> str:
    """The part of the prompt that follows the schema; the answer goes right behind it."""
    return f"Question: {text}\nSQL:"


def is_decisive(schema: Schema, question: Question) -> bool:
    """Whether the rows can tell a right query from a wrong one.

    An empty or zero result proves nothing: too many wrong queries give it too. And all right queries must agree, which
    they do not where two rows tie for "the most".
    """
    database = schema.database()
    try:
        gold = run(database, question.gold)
        others = [run(database, sql) for sql in question.variants]
    except QueryError as error:
        raise AssertionError(f"the generator wrote a query that does not run: {question.gold}") from error
    if not gold or gold in ([(0,)], [(None,)]):
        return False
    return all(same_result(gold, other, is_ordered(question.gold)) for other in others)


def sql_examples(split: str, seed: int = SEED) -> Iterator[Example]:
    """Endless SQL examples of a held-out split, one question per schema, each checked by `is_decisive`."""
    rng = random.Random(f"{seed}:{split}:sql")
    plain, seen = split != "ambiguous", set[str]()
    while True:
        schema = make_schema(rng, split if plain else "test")
        question = Author(rng, schema, plain).write()
        prompt = schema.prompt() + question_prompt(question.text)
        if prompt in seen or UNFIT in prompt or (not plain and question.readings == 0):
            continue
        if not is_decisive(schema, question):
            continue
        seen.add(prompt)
        yield Example(f"{split}-sql-{len(seen):04d}", "sql", prompt, " " + question.gold, schema.database())


def json_examples(split: str, seed: int = SEED) -> Iterator[Example]:
    """Endless examples of a held-out split in which a sentence becomes a JSON object."""
    rng = random.Random(f"{seed}:{split}:json")
    number = 0
    while True:
        table, fields = make_fields(rng, split)
        record = make_record(rng, table, fields)
        prompt = fields_prompt(fields) + text_prompt(record.text)
        if UNFIT not in prompt:
            number += 1
            yield Example(f"{split}-json-{number:04d}", "json", prompt, " " + as_json(record))


def code_examples(split: str, count: int) -> list[Example]:
    """Functions of held-out files, each cut into a beginning and the rest."""
    cut = corpus.beginnings([text for _, text in corpus.files(split)])
    chosen = random.Random(f"{SEED}:{split}:code").sample(cut, count)
    return [Example(f"{split}-code-{n:04d}", "code", *pair) for n, pair in enumerate(chosen, 1)]


def training_groups(seed: int = SEED) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Endless training material: what several prompts share, and 14 (rest of the prompt, answer) pairs.

    Mostly a schema and questions about it. The trainer lets the pairs share the tokens, which are then computed once.
    Results are not checked here: a question whose rows decide nothing still teaches the language.
    """
    rng = random.Random(f"{seed}:train:sql")
    while True:
        shared, written = _records(rng) if rng.random() < RECORD_SHARE else _questions(rng)
        if rng.random() < CHAT_SHARE:
            shared = shared.rstrip("\n")
            if rng.random() < 0.5:  # a message that is typed in a terminal has one line
                shared = shared.replace("\n", " ")
            apart = rng.random() < 0.6
            start = chat.turn("system", shared) + chat.USER if apart else f"{chat.USER}{shared}\n"
            yield start, [(said + chat.ASSISTANT, answer) for said, _, answer in written]
        else:
            yield shared, [(prompt, " " + answer) for _, prompt, answer in written]


def conversations(seed: int) -> Iterator[tuple[str, str]]:
    """Endless (message of the user, answer) turns, in conversations of 14 turns that a schema or fields begin."""
    rng = random.Random(f"{seed}:train:chat")
    while True:
        shared, written = _records(rng) if rng.random() < RECORD_SHARE else _questions(rng)
        start = chat.turn("system", shared.rstrip("\n"))
        for said, _, answer in written:
            yield start + chat.USER + said + chat.ASSISTANT, answer
            start = ""


def _questions(rng: random.Random) -> tuple[str, list[tuple[str, str, str]]]:
    """(schema, [(question alone, question in a prompt, query)])."""
    schema = make_schema(rng, "train")
    authors = [Author(rng, schema, plain) for plain in (True, False)]
    written = [authors[rng.random() < VAGUE_SHARE].write() for _ in range(14)]
    return schema.prompt(), [(q.text, question_prompt(q.text), q.gold) for q in written]


def _records(rng: random.Random) -> tuple[str, list[tuple[str, str, str]]]:
    """(fields, [(text alone, text in a prompt, object)])."""
    table, fields = make_fields(rng, "train")
    written = [make_record(rng, table, fields) for _ in range(14)]
    return fields_prompt(fields), [(f"Text: {r.text}", text_prompt(r.text), as_json(r)) for r in written]


def load(split: str, kind: str) -> list[Example]:
    """The committed examples of one split and kind, see `SIZES`.

    Raises:
        InvalidInput: the split has no such examples.
    """
    if kind not in SIZES.get(split, {}):
        known = "; ".join(f"{name} has {', '.join(kinds)}" for name, kinds in SIZES.items())
        raise InvalidInput("split", split, f"it has no examples of kind {kind}; {known}")
    with (DATA / f"{split}.jsonl").open(encoding="utf-8") as lines:
        examples = [Example(**json.loads(line)) for line in lines]
    return [e for e in examples if e.kind == kind]


def main() -> None:
    """Write the held-out splits."""
    DATA.mkdir(exist_ok=True)
    for split, sizes in SIZES.items():
        examples = list(itertools.islice(sql_examples(split), sizes["sql"]))
        examples += code_examples(split, sizes["code"]) if "code" in sizes else []
        examples += list(itertools.islice(json_examples(split), sizes.get("json", 0)))
        path = DATA / f"{split}.jsonl"
        path.write_text("".join(json.dumps(asdict(e)) + "\n" for e in examples), encoding="utf-8")
        print(f"{path.name}: {len(examples)} examples, {path.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()


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
