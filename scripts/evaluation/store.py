"""Answers kept in a file as they are given, so that a long run can be broken off and taken up again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mtad.errors import InvalidInput
from scripts.evaluation.decoders import Answer, Decoder


class Store:
    """The answers of one pair, as JSON lines; the first line says which pair that is.

    An answer is found again by its set, its prompt's name, its seed, and everything that describes its setting. A line
    that was not written to its end is dropped.

    Raises:
        InvalidInput: the file is not such a file, or holds answers of another pair.
    """

    def __init__(self, path: Path, pair: Mapping[str, str]) -> None:
        self._answers: dict[str, Answer] = {}
        first, *lines = path.read_bytes().split(b"\n") if path.exists() else [b""]
        if not path.exists():
            lines, first = [b""], json.dumps(dict(pair)).encode()
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(first + b"\n")
        try:
            if json.loads(first) != dict(pair):
                raise InvalidInput("answers", str(path), "holds answers of another pair; give another file")
            for line in lines[:-1]:
                key, values = json.loads(line)
                self._answers[key] = Answer(**{**values, "tokens": tuple(values["tokens"])})
        except (ValueError, TypeError, KeyError) as error:
            raise InvalidInput("answers", str(path), f"holds no answers ({error}); give another file") from None
        with path.open("rb+") as file:
            file.truncate(file.seek(0, 2) - len(lines[-1]))
        self._file = path.open("a", encoding="utf-8")

    def of(self, name: str, prompts: Sequence[str]) -> SetStore:
        """The part of one set, whose prompts are called so."""
        return SetStore(self, name, prompts)

    def get(self, key: str) -> Answer | None:
        """The answer that is kept under a key."""
        return self._answers.get(key)

    def add(self, key: str, answer: Answer) -> None:
        """Keep an answer."""
        self._answers[key] = answer
        self._file.write(json.dumps([key, asdict(answer)]) + "\n")
        self._file.flush()


class SetStore:
    """The answers of one set."""

    def __init__(self, store: Store, name: str, prompts: Sequence[str]) -> None:
        self._store, self._name, self._prompts = store, name, prompts

    def get(self, decoder: Decoder, group: Sequence[int], seed: int) -> list[Answer] | None:
        """Answers to a group of prompts; None if one of them is missing."""
        found = [self._store.get(self._key(decoder, at, seed)) for at in group]
        return None if None in found else [answer for answer in found if answer]

    def add(self, decoder: Decoder, answers: Sequence[Answer]) -> None:
        """Keep answers."""
        for one in answers:
            self._store.add(self._key(decoder, one.prompt, one.seed), one)

    def _key(self, decoder: Decoder, prompt: int, seed: int) -> str:
        key: dict[str, Any] = {"set": self._name, "prompt": self._prompts[prompt], "seed": seed}
        return json.dumps(key | {"label": decoder.label, "setting": decoder.describe()}, sort_keys=True)
