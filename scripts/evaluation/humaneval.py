"""HumanEval (Chen et al. 2021): functions completed from their docstrings, scored by their tests.

One JSON object a line, as distributed: `task_id`, `prompt`, `entry_point`, `test` and `canonical_solution`. A
completion ends at the first line that leaves the function (the stop strings of the paper). `pass_at_k` is the paper's
unbiased estimator.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from pathlib import Path
from typing import Any

from engines.placement import cores
from mtad.errors import InvalidInput
from scripts.evaluation.prompt_set import Prompt, PromptSet
from scripts.scoring.sandbox import Sandbox

STOP = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")
FIELDS = ("task_id", "prompt", "entry_point", "test")


class HumanEval(PromptSet):
    """A file of problems; programs run in `sandbox`.

    Raises:
        InvalidInput: the file cannot be read, is not in HumanEval's format, or there is no sandbox.
    """

    name = "humaneval"
    stop = STOP
    max_tokens = 384
    workers = cores()

    def __init__(self, path: Path, limit: int | None = None, sandbox: Sandbox | None = None) -> None:
        self._problems = _read(path)[:limit]
        self._sandbox = sandbox or Sandbox()
        self._sandbox.check()
        self._verdicts: dict[tuple[int, str], bool] = {}
        self.prompts = [Prompt(problem["task_id"], problem["prompt"]) for problem in self._problems]
        self.how = f"the problem's tests pass; {self._sandbox}"

    def right(self, number: int, text: str) -> bool | None:
        """Whether the completion passes the task's tests; the same completion is run once."""
        completion = cut(text, STOP)
        if (number, completion) not in self._verdicts:
            problem = self._problems[number]
            program = f"{problem['prompt']}{completion}\n{problem['test']}\ncheck({problem['entry_point']})\n"
            self._verdicts[number, completion] = self._sandbox.passes(program)
        return self._verdicts[number, completion]


def cut(text: str, stop: tuple[str, ...]) -> str:
    """`text` before the first of the strings."""
    found = [at for at in (text.find(string) for string in stop) if at >= 0]
    return text[: min(found)] if found else text


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Probability that one of `k` completions passes, estimated without bias from `samples` of which `right` pass.

    Raises:
        ValueError: k is not from 1 to `samples`.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"k = {k}: give 1 to {samples}, the completions there are")
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode("utf-8")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise InvalidInput("humaneval", str(path), f"cannot be read: {error}") from None
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
            wrong = [name for name in FIELDS if not isinstance(values[name], str) or not values[name]]
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidInput(
                f"humaneval line {number}", line[:80], f"not a problem of HumanEval: {error!r}"
            ) from None
        if wrong:
            raise InvalidInput(f"humaneval line {number} {wrong[0]}", values[wrong[0]], "give non-empty text")
        found.append(values)
    if not found:
        raise InvalidInput("humaneval", str(path), "holds no problems")
    return found
