"""Sentences about things of the generated databases, and the JSON objects that hold the same facts."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

from scripts.demo.lexicon import LABELS, NAMES, NUMBERS, TABLES
from scripts.demo.schemas import columns_of

MISSING = 0.15  # share of the fields that the sentence does not mention: null in the object


@dataclass(frozen=True)
class Record:
    """A text, and its facts in the order of the fields that were asked for."""

    text: str
    facts: dict[str, Any]


def fields_prompt(fields: tuple[str, ...]) -> str:
    """The part of a prompt that all texts with these fields share."""
    return f"Fields = [{', '.join(fields)}]\n"


def text_prompt(text: str) -> str:
    """The part of the prompt that follows the fields; the answer goes right behind it."""
    return f"Text: {text}\nJSON:"


def make_fields(rng: random.Random, split: str) -> tuple[str, tuple[str, ...]]:
    """A kind of thing and its fields, such as ("hotel", ("name", "price", "city")), that belong to a split."""
    table = rng.choice(sorted(TABLES))
    return table, columns_of(rng, table, split)


def make_record(rng: random.Random, table: str, fields: tuple[str, ...]) -> Record:
    """A text about one thing; its facts come in any order, and some are not told."""
    facts: dict[str, Any] = {}
    told = []
    for field in fields:
        if field == "name":
            facts[field] = rng.choice(NAMES)
            continue
        values: Any = range(NUMBERS[field][0], NUMBERS[field][1] + 1) if field in NUMBERS else LABELS[field][0]
        word = rng.choice((field, *(NUMBERS[field][3] if field in NUMBERS else LABELS[field][2])))
        facts[field] = rng.choice(values) if rng.random() >= MISSING else None
        if facts[field] is not None:
            told.append(rng.choice((f"its {word} is {facts[field]}", f"the {word} is {facts[field]}")))
    rng.shuffle(told)
    name = facts["name"]
    start = rng.choice((f"{name} is a {table}", f"This is about the {table} {name}", f"The {table} is called {name}"))
    return Record(", and ".join([start, *told]) + ".", facts)


def as_json(record: Record) -> str:
    """The answer."""
    return json.dumps(record.facts)
