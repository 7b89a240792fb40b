"""Sets of prompts, each with its own way to score an answer.

sql               the demo's held-out questions: the rows of the answer in SQLite
code              the demo's source code: open-ended, nothing is right or wrong
spider=FOLDER     Spider's development set: execution match
humaneval=FILE    HumanEval (jsonl, or jsonl.gz): its tests, run in a process of their own
jsonl=FILE        lines with `prompt` and perhaps `answer`, which the text must equal
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from engines.prompts import read_prompts
from mtad.errors import InvalidInput
from scripts.demo import dataset
from scripts.demo.dataset import matches
from scripts.evaluation.prompt_set import Prompt, PromptSet


class Demo(PromptSet):
    """The demo's SQL questions or source code of a split."""

    def __init__(self, kind: str, split: str, limit: int | None = None) -> None:
        self.name = kind
        self._examples = dataset.load(split, kind)[:limit]
        self.prompts = [Prompt(example.id, example.prompt) for example in self._examples]
        self.scored = kind == "sql"
        self.how = "rows of the query equal the gold query's" if self.scored else ""

    def right(self, number: int, text: str) -> bool | None:
        return matches(self._examples[number], text) if self.scored else None


class JsonLines(PromptSet):
    """A file of prompts; see `engines.prompts`."""

    def __init__(self, path: Path, limit: int | None = None) -> None:
        self.name = path.stem
        self._examples = read_prompts(path)[:limit]
        self.prompts = [Prompt(f"{path.stem}-{n:04d}", example.prompt) for n, example in enumerate(self._examples, 1)]
        self.scored = self._examples[0].answer is not None
        self.how = "text equals the answer" if self.scored else ""

    def right(self, number: int, text: str) -> bool | None:
        return self._examples[number].right(text)


def open_sets(specs: Sequence[str], split: str, limit: int | None = None) -> list[PromptSet]:
    """Sets by their names on the command line, `NAME` or `NAME=PATH`.

    Args:
        specs: see the module's description.
        split: of the demo's sets, see `scripts.demo.dataset`.
        limit: prompts of each set; None: all.

    Raises:
        InvalidInput: unknown, given twice, or its files are missing or damaged.
    """
    from scripts.evaluation.humaneval import HumanEval
    from scripts.evaluation.spider import Spider

    if limit is not None and limit < 1:
        raise InvalidInput("limit", limit, "give at least 1")
    files = {"spider": Spider, "humaneval": HumanEval, "jsonl": JsonLines}
    found: list[PromptSet] = []
    for spec in specs:
        name, _, path = spec.partition("=")
        if name in ("sql", "code") and not path:
            found.append(Demo(name, split, limit))
        elif name in files and path:
            found.append(files[name](Path(path), limit))
        else:
            known = "sql, code, spider=FOLDER, humaneval=FILE, jsonl=FILE"
            raise InvalidInput("set", spec, f"give sets separated by commas: {known}")
    names = [one.name for one in found]
    if len(set(names)) < len(names):
        raise InvalidInput("set", ",".join(specs), f"two sets are called the same: {', '.join(names)}")
    return found
