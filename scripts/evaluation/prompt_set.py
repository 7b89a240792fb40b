"""Prompt and PromptSet."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Prompt:
    """What a model is given, and a name for it."""

    id: str
    text: str


class PromptSet(ABC):
    """Prompts and how an answer to one of them is scored.

    Attributes:
        name: what tables and files call it.
        prompts: in order; a prompt's place is its number.
        stop: strings that end a text.
        max_tokens: new tokens an answer may have.
        scored: whether answers are right or wrong at all.
        how: how they are scored, for the report.
        workers: answers scored at once.
    """

    name: str
    prompts: Sequence[Prompt]
    stop: tuple[str, ...] = ()
    max_tokens: int = 128
    scored: bool = True
    how: str = ""
    workers: int = 1

    @abstractmethod
    def right(self, number: int, text: str) -> bool | None:
        """Whether `text` answers prompt `number`; None in sets that are not scored. Never raises on a bad text."""
