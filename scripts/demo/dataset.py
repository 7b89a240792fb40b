"""The demo's examples: SQL questions and records made from a seed, functions of the standard library, three splits.

    python -m scripts.demo.dataset build/data       # the committed files once more

`prompt + answer` is a document, and the tokenizer's end-of-text token follows it. A SQL answer is one gold query (with
the leading space that follows "SQL:"), a JSON answer is an object, and a code answer is the rest of a function.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from mtad.errors import InvalidInput
from runtime.commands.entry import Parser, command
from scripts.demo import corpus
from scripts.demo.questions import Author, Question
from scripts.demo.records import fields_prompt, make_fields, make_record, text_prompt
from scripts.demo.schemas import Schema, make_schema
from scripts.paths import DEMO
from scripts.scoring.sqlite import QueryError, is_ordered, run, same_result

DATA = DEMO / "data"
SEED = 2024
VAGUE_SHARE = 0.4  # of the questions trained on; the rest is plain
RECORD_SHARE, CHAT_SHARE = 0.12, 0.2  # of the groups trained on: JSON instead of SQL; either of them as a conversation
PAIRS = 14  # of a group
END = "<|endoftext|>"
SYSTEM, USER, ASSISTANT = "<|system|>", "<|user|>", "<|assistant|>"
"""Special tokens, in front of the messages of a conversation."""
UNFIT = "Penis"  # a name that the syllables of the lexicon give; nobody should read it
SIZES = {
    "development": {"sql": 300, "code": 80, "json": 60},
    "test": {"sql": 500, "code": 120, "json": 100},
    "ambiguous": {"sql": 300},  # questions that can be read in two ways, about databases of the test split
}


@dataclass(frozen=True)
class Example:
    """One line of data/*.jsonl. `database` is None unless the kind is "sql"; see `scripts.scoring` for its layout."""

    id: str
    kind: str
    prompt: str
    answer: str
    database: dict[str, Any] | None = None


def question_prompt(text: str) -> str:
    """The part of a prompt that follows the schema; the answer goes right behind it."""
    return f"Question: {text}\nSQL:"


def is_decisive(schema: Schema, question: Question) -> bool:
    """Whether the rows can tell a right query from a wrong one.

    An empty or zero result proves nothing: too many wrong queries give it too. And all right queries must agree, which
    they do not where two rows tie for "the most".
    """
    database = schema.database()
    gold, *others = [run(database, sql) for sql in (question.gold, *question.variants)]
    if not gold or gold in ([(0,)], [(None,)]):
        return False
    return all(same_result(gold, other, is_ordered(question.gold)) for other in others)


def sql_examples(split: str) -> Iterator[Example]:
    """Endless SQL examples of a held-out split, one question per schema, each checked by `is_decisive`."""
    rng = random.Random(f"{SEED}:{split}:sql")
    plain, seen = split != "ambiguous", set[str]()
    while True:
        schema = make_schema(rng, split if plain else "test")
        question = Author(rng, schema, plain).write()
        prompt = schema.prompt() + question_prompt(question.text)
        if prompt in seen or UNFIT in prompt or (not plain and question.readings == 0):
            continue
        if is_decisive(schema, question):
            seen.add(prompt)
            yield Example(f"{split}-sql-{len(seen):04d}", "sql", prompt, " " + question.gold, schema.database())


def json_examples(split: str) -> Iterator[Example]:
    """Endless examples of a held-out split in which a sentence becomes a JSON object."""
    rng = random.Random(f"{SEED}:{split}:json")
    number = 0
    while True:
        table, fields = make_fields(rng, split)
        text, answer = make_record(rng, table, fields)
        prompt = fields_prompt(fields) + text_prompt(text)
        if UNFIT not in prompt:
            number += 1
            yield Example(f"{split}-json-{number:04d}", "json", prompt, " " + answer)


def code_examples(split: str) -> Iterator[Example]:
    """The functions of held-out files in random order, each cut into a beginning and the rest."""
    cut = corpus.beginnings(corpus.files(split))
    chosen = random.Random(f"{SEED}:{split}:code").sample(cut, SIZES[split]["code"])
    for number, (prompt, answer) in enumerate(chosen, 1):
        yield Example(f"{split}-code-{number:04d}", "code", prompt, answer)


def held_out_code() -> list[str]:
    """The beginnings of all functions of held-out files, whether or not the data files have them."""
    return [prompt for split in ("test", "development") for prompt, _ in corpus.beginnings(corpus.files(split))]


def training_groups(seed: int = SEED) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Endless training material: what several prompts share, and (rest of the prompt, answer) pairs.

    Mostly a schema and questions about it. Results are not checked here: a question whose rows decide nothing still
    teaches the language.
    """
    rng = random.Random(f"{seed}:train:sql")
    while True:
        shared, written = _group(rng)
        if rng.random() < CHAT_SHARE:
            shared = shared.rstrip("\n")
            if rng.random() < 0.5:  # a message that is typed in a terminal has one line
                shared = shared.replace("\n", " ")
            start = f"{SYSTEM}{shared}{USER}" if rng.random() < 0.6 else f"{USER}{shared}\n"
            yield start, [(said + ASSISTANT, answer) for said, _, answer in written]
        else:
            yield shared, [(prompt, " " + answer) for _, prompt, answer in written]


def conversations(seed: int) -> Iterator[tuple[str, str]]:
    """Endless (message of the user, answer) turns, in conversations that a schema or fields begin."""
    rng = random.Random(f"{seed}:train:chat")
    while True:
        shared, written = _group(rng)
        start = SYSTEM + shared.rstrip("\n")
        for said, _, answer in written:
            yield start + USER + said + ASSISTANT, answer
            start = ""


def _group(rng: random.Random) -> tuple[str, list[tuple[str, str, str]]]:
    """(schema or fields, [(question or text as a message, the same in a prompt, answer)])."""
    if rng.random() < RECORD_SHARE:
        table, fields = make_fields(rng, "train")
        records = [make_record(rng, table, fields) for _ in range(PAIRS)]
        return fields_prompt(fields), [(f"Text: {text}", text_prompt(text), answer) for text, answer in records]
    schema = make_schema(rng, "train")
    authors = [Author(rng, schema, plain) for plain in (True, False)]
    questions = [authors[rng.random() < VAGUE_SHARE].write() for _ in range(PAIRS)]
    return schema.prompt(), [(q.text, question_prompt(q.text), q.gold) for q in questions]


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


@command
def main() -> None:
    parser = Parser(prog="scripts.demo.dataset", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="for development.jsonl, test.jsonl and ambiguous.jsonl")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    makers = {"sql": sql_examples, "code": code_examples, "json": json_examples}
    for split, sizes in SIZES.items():
        lines = [json.dumps(asdict(e)) + "\n" for kind in sizes for e in islice(makers[kind](split), sizes[kind])]
        (folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
