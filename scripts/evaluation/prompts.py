"""Sets of prompts, each with texts that drafts are chosen on, and a way to verify answers where there is one.

code            source code of the demo's test split, open-ended
code-others     the other functions of held-out files, shuffled, but for those that drafts are chosen on: to confirm
                what `code` showed; how many there are depends on the running Python's library
sql             the demo's plain questions: a query must give the rows of the gold query. Of questions there are as many
                as are asked for, by default those of the demo's files
sql-thinking    the questions of sql, for a pair that thinks before its query (`scripts.demo.think`); what follows the
                thought is verified
sql-ambiguous   the demo's questions that can be read in two ways, verified likewise
jsonl=FILE      lines with `prompt` and, for all or none, `answer`, which the text must equal, or `tests`: Python that
                must run to its end, in a sandbox, behind the prompt and the text. Drafts are chosen on the first lines
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from engines.prompts import read_prompts
from mtad.errors import InvalidInput

DEMO = {
    "code": ("test", "code"),
    "code-others": ("test", "code"),
    "sql": ("test", "sql"),
    "sql-ambiguous": ("ambiguous", "sql"),
    "sql-thinking": ("test", "sql"),
}
"""The demo's sets: split and kind."""
DEVELOPMENT = 24
"""Prompts that drafts are chosen on."""
FUNCTION_ENDS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")
"""Where a completed function ends (HumanEval, Chen et al. 2021)."""


@dataclass(frozen=True)
class PromptSet:
    """Prompts, and how an answer to one of them is verified.

    Attributes:
        name: in tables and files.
        prompts: in order; a prompt's place is its number.
        development: prompts of the same kind that are not measured.
        verify: whether a text answers the prompt of a number; None where nothing is right or wrong.
        stop: strings that end a text.
    """

    name: str
    prompts: Sequence[str]
    development: Sequence[str]
    verify: Callable[[int, str], bool] | None = None
    stop: tuple[str, ...] = ()

    @property
    def answers(self) -> int:
        """Answers to each prompt: pass@8 needs eight, self-BLEU four."""
        return 8 if self.verify else 4


def open_set(name: str, count: int | None = None) -> PromptSet:
    """A set by its name on the command line, and the first `count` of its prompts; by default, all that a file holds.

    Raises:
        InvalidInput: unknown, its file is unusable, or there is no sandbox for what it asks for.
    """
    if name.startswith("jsonl="):
        return _file(Path(name.removeprefix("jsonl=")), count)
    if name not in DEMO:
        raise InvalidInput("set", name, f"give one of {', '.join(DEMO)}, or jsonl=FILE")
    from scripts.demo import dataset

    split, kind = DEMO[name]
    examples = dataset.load(split, kind)
    if kind == "sql" and count and count > len(examples):
        examples = list(islice(dataset.sql_examples(split), count))  # they begin with those of the file
    development = [example.prompt for example in dataset.load("development", kind)[:DEVELOPMENT]]
    if name == "code-others":
        known = {*development, *(example.prompt for example in examples)}
        others = [one for one in dataset.held_out_code() if one not in known]
        random.Random(0).shuffle(others)  # functions of one file are alike, and the first prompts alone are timed
        return PromptSet(name, others[:count], development)

    def verify(number: int, text: str) -> bool:
        return dataset.matches(examples[number], text.rpartition("</think>")[2])

    return PromptSet(name, [e.prompt for e in examples][:count], development, verify if kind == "sql" else None)


def _file(path: Path, count: int | None) -> PromptSet:
    examples = read_prompts(path)
    tried = min(DEVELOPMENT, len(examples) // 4)
    if tried < 1:
        raise InvalidInput("set", str(path), f"has {len(examples)} prompts; give at least 4")
    own = examples[tried:][:count]
    development, prompts = ([example.prompt for example in part] for part in (examples[:tried], own))
    tests = [json.loads(line).get("tests") for line in path.read_text("utf-8").splitlines() if line.strip()][tried:]

    def same(number: int, text: str) -> bool:
        return bool(own[number].right(text))

    if own[0].answer is not None:
        return PromptSet(path.stem, prompts, development, same)
    if not any(tests):
        return PromptSet(path.stem, prompts, development)
    if not all(isinstance(test, str) and test for test in tests):
        raise InvalidInput("set", str(path), "some prompts have no `tests`; give all of them some, or none")
    from scripts.scoring.sandbox import Sandbox

    sandbox = Sandbox()
    sandbox.check()

    def passes(number: int, text: str) -> bool:
        return sandbox.passes(f"{own[number].prompt}{text}\n{tests[number]}\n")

    return PromptSet(path.stem, prompts, development, passes, FUNCTION_ENDS)
