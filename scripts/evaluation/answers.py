"""Answers, and the file that keeps them, so that a run that was broken off goes on and tables are made again."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mtad.errors import InvalidInput
from scripts.evaluation.settings import Setting


@dataclass(frozen=True)
class Answer:
    """One text.

    Attributes:
        tokens: new ones, up to and including the end of the text.
        text: without stop strings and special tokens.
        passes: of the target.
        nll: mean negative log-likelihood per token under the target, temperature 1, unprocessed; nats. None where the
            target did not look at it.
        seconds: of decoding, where the answer was decoded alone; the prompt is not in it.
        joules: of the whole answer, where it was decoded alone and there is a meter.
        thinking_tokens, thinking_passes: of the blocks that began in a thought.
    """

    tokens: Sequence[int]
    text: str
    passes: int
    nll: float | None
    seconds: float | None = None
    joules: float | None = None
    thinking_tokens: int = 0
    thinking_passes: int = 0


class Store:
    """Answers of one pair, as lines of JSON in a file that gzip has compressed.

    What was not written to its end is dropped.

    Args:
        path: None keeps nothing.
        belongs: what all answers in the file have in common: the hashes of the pair's checkpoints.

    Raises:
        InvalidInput: the file is not such a file, or holds other answers.
    """

    def __init__(self, path: Path | None, belongs: Mapping[str, Any]) -> None:
        self._path, self._found = path, dict[str, Any]()
        if path is None:
            return
        lines = _whole_lines(path) if path.exists() else [json.dumps(belongs)]
        try:
            if json.loads(lines[0]) != belongs:
                raise InvalidInput("answers", str(path), "holds answers of another pair or kind; give another file")
            self._found = dict(json.loads(line) for line in lines[1:])
        except (ValueError, TypeError, IndexError) as error:
            raise InvalidInput("answers", str(path), f"holds no answers ({error}); give another file") from None
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = path.with_name(path.name + ".whole")
        whole.write_bytes(gzip.compress("".join(line + "\n" for line in lines).encode()))
        whole.replace(path)

    def get(self, setting: Setting, prompt: str) -> list[Answer]:
        """Answers of a setting to a prompt; none if there are none."""
        return [Answer(**one) for one in self._found.get(_key(setting, prompt), ())]

    def add(self, setting: Setting, prompt: str, answers: Sequence[Answer]) -> None:
        """Keep them."""
        self.keep(_key(setting, prompt), [asdict(one) for one in answers])

    def kept(self, key: str) -> Any:
        """What `keep` was given under a key, or None."""
        return self._found.get(key)

    def keep(self, key: str, value: Any) -> None:
        """Keep anything that JSON holds."""
        self._found[key] = value
        if self._path:
            with self._path.open("ab") as file:
                file.write(gzip.compress((json.dumps([key, value]) + "\n").encode()))


def _key(setting: Setting, prompt: str) -> str:
    return json.dumps([hashlib.sha256(prompt.encode()).hexdigest()[:16], setting.description], sort_keys=True)


def _whole_lines(path: Path) -> list[str]:
    """The lines up to the first that cannot be read."""
    lines: list[str] = []
    with contextlib.suppress(EOFError, OSError, zlib.error, UnicodeDecodeError), gzip.open(path, "rt") as file:
        lines.extend(line.rstrip("\n") for line in file if line.endswith("\n"))
    return lines
