"""Sentences about things of the generated databases, and the JSON objects that hold the same facts."""

from __future__ import annotations

import json
import random
from typing import Any

from scripts.demo.lexicon import COLUMNS, NAMES, TABLES
from scripts.demo.schemas import columns_of

MISSING = 0.15  # share of the fields that the sentence does not mention: null in the object


def fields_prompt(fields: tuple[str, ...]) -> str:
    """The part of a prompt that all texts with these fields share."""
    return f"Fields = [{', '.join(fields)}]\n"


def text_prompt(text: str) -> str:
    """The part of a prompt that follows the fields; the answer goes right behind it."""
    return f"Text: {text}\nJSON:"


def make_fields(rng: random.Random, split: str) -> tuple[str, tuple[str, ...]]:
    """A kind of thing and its fields, such as ("hotel", ("name", "price", "city")), that belong to a split."""
    table = rng.choice(sorted(TABLES))
    return table, columns_of(rng, table, split)


def make_record(rng: random.Random, table: str, fields: tuple[str, ...]) -> tuple[str, str]:
    """A text about one thing, its facts in any order and some not told, and the object with all fields."""
    facts: dict[str, Any] = {}
    told = []
    for field in fields:
        if field == "name":
            facts[field] = rng.choice(NAMES)
            continue
        word = rng.choice((field, *COLUMNS[field].words))
        facts[field] = rng.choice(COLUMNS[field].values) if rng.random() >= MISSING else None
        if facts[field] is not None:
            told.append(rng.choice((f"its {word} is {facts[field]}", f"the {word} is {facts[field]}")))
    rng.shuffle(told)
    name = facts["name"]
    start = rng.choice((f"{name} is a {table}", f"This is about the {table} {name}", f"The {table} is called {name}"))
    return ", and ".join([start, *told]) + ".", json.dumps(facts)
