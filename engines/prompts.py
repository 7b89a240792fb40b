"""Files of prompts: JSON lines with the field `prompt` and, where a right answer is known, `answer`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from mtad.errors import InvalidInput, read_text


@dataclass(frozen=True)
class Example:
    """One line of the file; other fields are not looked at."""

    prompt: str
    answer: str | None = None

    def right(self, text: str) -> bool | None:
        """Whether `text` is the answer, white space at both ends aside; None if there is no answer to compare with."""
        return None if self.answer is None else text.strip() == self.answer.strip()


def read_prompts(path: Path) -> list[Example]:
    """All examples of a file.

    Raises:
        InvalidInput: unreadable, empty, a line is no JSON object with a non-empty text `prompt`, or some lack `answer`.
    """
    found = []
    for number, line in enumerate(read_text("prompts", path).split("\n"), 1):
        if not line.strip():
            continue
        where = f"prompts line {number}"
        try:
            values = {**json.loads(line)}
        except (ValueError, TypeError, RecursionError):
            raise InvalidInput(where, line[:80], "not a JSON object; give one per line") from None
        prompt, answer = values.get("prompt"), values.get("answer")
        if not isinstance(prompt, str) or not prompt:
            raise InvalidInput(f"{where} prompt", prompt, "give non-empty text")
        if not isinstance(answer, (str, type(None))):
            raise InvalidInput(f"{where} answer", answer, "give text, or leave it out")
        found.append(Example(prompt, answer))
    if not found:
        raise InvalidInput("prompts", str(path), "holds no prompts")
    known = sum(example.answer is not None for example in found)
    if 0 < known < len(found):
        raise InvalidInput("prompts answer", f"{known} of {len(found)}", "give all prompts an answer, or none")
    return found
