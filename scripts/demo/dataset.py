"""The demo's examples: SQL questions made from a seed, code windows from the standard library, four splits.

    python -m scripts.demo.dataset        # rewrites data/*.jsonl

`prompt + answer` is a document; it ends where the tokenizer's end-of-text token follows. A SQL answer is one gold query
(with the leading space that follows "SQL:"); a code answer is the true continuation of the window.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from mtad.errors import InvalidInput
from scripts.demo import corpus
from scripts.demo.questions import Author, Question
from scripts.demo.schemas import Schema, make_schema
from scripts.paths import DEMO
from scripts.scoring.sql_result import run
from scripts.scoring.sqlite import QueryError, is_ordered, same_result

DATA = DEMO / "data"
SEED = 2024
CLEAR_SHARE = 0.3  # of the questions with only one reading are kept for the split "ambiguous": they decide little
UNFIT = "Penis"  # a name that the syllables of the lexicon give; nobody should read it
SIZES = {
    "development": {"sql": 300, "code": 80},
    "test": {"sql": 500, "code": 120},
    "ambiguous": {"sql": 500},  # questions that can be read in two ways, about databases of the test split
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
    """Endless SQL examples of a held-out split, one question per schema, each checked by `is_decisive`.

    Those of "ambiguous" are mostly vague, all others are plain.
    """
    plain = split != "ambiguous"
    rng = random.Random(f"{seed}:{split}:plain" if plain else f"{seed}:test:sql")
    seen: set[str] = set()
    while True:
        schema = make_schema(rng, split if plain else "test")
        question = Author(rng, schema, plain).write()
        prompt = schema.prompt() + question_prompt(question.text)
        if not plain and question.readings == 0 and rng.random() >= CLEAR_SHARE:
            continue
        if prompt in seen or (plain and UNFIT in prompt) or not is_decisive(schema, question):
            continue
        seen.add(prompt)
        yield Example(f"{split}-sql-{len(seen):04d}", "sql", prompt, " " + question.gold, schema.database())


def training_groups(seed: int = SEED) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Endless training material: a schema's prompt and 14 (question prompt, answer) pairs about it.

    The trainer lets the pairs share the schema's tokens, which are then computed once. Results are not checked here:
    a question whose rows decide nothing still teaches the language.
    """
    rng = random.Random(f"{seed}:train:sql")
    while True:
        schema = make_schema(rng, "train")
        author = Author(rng, schema)
        written = [author.write() for _ in range(14)]
        yield schema.prompt(), [(question_prompt(q.text), " " + q.gold) for q in written]


def load(split: str, kind: str) -> list[Example]:
    """The committed examples of one split and kind, see `SIZES`.

    Raises:
        InvalidInput: the split has no such examples.
    """
    if kind not in SIZES.get(split, {}):
        known = "; ".join(f"{name} has {' and '.join(kinds)}" for name, kinds in SIZES.items())
        raise InvalidInput("split", split, f"it has no examples of kind {kind}; {known}")
    with (DATA / f"{split}.jsonl").open(encoding="utf-8") as lines:
        examples = [Example(**json.loads(line)) for line in lines]
    return [e for e in examples if e.kind == kind]


def main() -> None:
    """Write the held-out splits."""
    DATA.mkdir(exist_ok=True)
    for split, sizes in SIZES.items():
        generator = sql_examples(split)
        examples = [next(generator) for _ in range(sizes["sql"])]
        texts = [text for _, text in corpus.files(split)]
        cut = corpus.windows(texts, sizes.get("code", 0), random.Random(f"{SEED}:{split}:code"))
        for n, (prompt, answer) in enumerate(cut, 1):
            examples.append(Example(f"{split}-code-{n:04d}", "code", prompt, answer))
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
