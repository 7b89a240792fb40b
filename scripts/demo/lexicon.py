"""The words of `lexicon.toml`: tables, columns, their everyday synonyms, and the values that columns hold."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_WORDS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Column:
    """What a column holds and is called; `extremes` are its rows with the largest and the smallest number."""

    group: str
    words: list[str]
    values: Sequence[Any]
    extremes: tuple[str, str] = ("", "")


TABLES: dict[str, list[str]] = _WORDS["tables"]
RELATIONS: list[tuple[str, str]] = [(child, parent) for child, parent in _WORDS["relations"]]
NAMES: list[str] = [start + end for start in _WORDS["starts"] for end in _WORDS["ends"]]
VAGUE: dict[str, list[str]] = _WORDS["vague"]
VAGUE_EXTREMES: dict[str, tuple[str, str]] = _WORDS["vague_extremes"]
NUMBERS = {
    name: Column(group, one["words"], range(one["range"][0], one["range"][1] + 1), one["extremes"])
    for group, columns in _WORDS["numbers"].items()
    for name, one in columns.items()
}
LABELS = {
    name: Column(group, one["words"], one["values"])
    for group, columns in _WORDS["labels"].items()
    for name, one in columns.items()
}
COLUMNS = NUMBERS | LABELS
