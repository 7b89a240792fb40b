"""Questions of published benchmarks, and who says whether an answer is right.

Files lie in one folder, as JSON lines (`.jsonl`, or `.jsonl.gz`) with the names and fields of their publishers:

humaneval-plus  HumanEvalPlus: prompt, entry_point, test (EvalPlus, Liu et al. 2023)
mbpp-plus       MbppPlus: prompt, test (EvalPlus)
gsm8k           test.jsonl of GSM8K as gsm8k.jsonl: question, answer (Cobbe et al. 2021)
mt-bench        question.jsonl of MT-Bench as mt-bench.jsonl: turns, of which the first is asked; nobody judges
demo            the demo's questions, in this repository
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mtad.errors import InvalidInput
from scripts.demo import dataset
from scripts.scoring.sandbox import Sandbox

SANDBOX = Sandbox(seconds=20.0, cpu_seconds=15)
NUMPY = """class np:
    ndarray = ()

    @staticmethod
    def allclose(a, b, rtol=1e-7, atol=1e-8):
        pairs = list(zip(a, b, strict=True)) if hasattr(a, "__iter__") else [(a, b)]
        return all(abs(x - y) <= atol + rtol * abs(y) for x, y in pairs)

    class testing:
        @staticmethod
        def assert_allclose(a, b, rtol=1e-7, atol=0):
            assert np.allclose(a, b, rtol, atol)
"""
"""What EvalPlus's tests use of NumPy, which the sandbox has not."""


@dataclass(frozen=True)
class Question:
    """One question.

    Attributes:
        prompt: of the user's message; of the demo, the whole text.
        right: whether a text answers it; None where nobody says.
    """

    prompt: str
    right: Callable[[str], bool] | None = None


def load(name: str, folder: Path | None) -> list[Question]:
    """The questions of a benchmark, in the order of its file.

    Raises:
        InvalidInput: its file is missing or has other fields, or programs cannot be run here.
    """
    if name == "demo":
        return [Question(one.prompt, partial(dataset.matches, one)) for one in dataset.load("test", "sql")]
    if name not in READERS:
        raise InvalidInput("benchmarks", name, f"give some of demo, {', '.join(READERS)}")
    if folder is None:
        raise InvalidInput("data", None, f"give the folder with {name}.jsonl")
    path = next((found for end in (".jsonl", ".jsonl.gz") if (found := folder / f"{name}{end}").is_file()), None)
    if path is None:
        raise InvalidInput("data", str(folder), f"it has no {name}.jsonl")
    if name.endswith("-plus"):
        SANDBOX.check()
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
        try:
            return [READERS[name](json.loads(line)) for line in lines if line.strip()]
        except (KeyError, ValueError) as error:
            raise InvalidInput("data", str(path), f"not the benchmark's file: {error!r}") from None


def _human_eval(values: dict[str, Any]) -> Question:
    prompt, test, entry = values["prompt"], values["test"], values["entry_point"]
    return Question(
        f"Complete this function. Answer with the whole function in one Python code block.\n```python\n{prompt}```",
        lambda text: passes(f"{prompt}\n    pass\n\n{code(text)}", f"{test}\ncheck({entry})"),
    )


def _mbpp(values: dict[str, Any]) -> Question:
    test = values["test"]
    return Question(f"{values['prompt']}\nAnswer with one Python code block.", lambda text: passes(code(text), test))


def _gsm8k(values: dict[str, Any]) -> Question:
    wanted = number(values["answer"].rpartition("####")[2])
    asked = f"{values['question']}\nThink step by step. The last line is the number alone."
    return Question(asked, lambda text: number(text) == wanted)


def _mt_bench(values: dict[str, Any]) -> Question:
    return Question(values["turns"][0])


READERS: dict[str, Callable[[dict[str, Any]], Question]] = {
    "humaneval-plus": _human_eval,
    "mbpp-plus": _mbpp,
    "gsm8k": _gsm8k,
    "mt-bench": _mt_bench,
}


def code(text: str) -> str:
    """The last code block of an answer; the whole answer where it has none."""
    blocks: Sequence[str] = re.findall(r"```(?:python)?\n(.*?)(?:```|\Z)", text, re.DOTALL)
    return blocks[-1] if blocks else text


def number(text: str) -> float | None:
    """The last number of a text, thousands with or without commas."""
    found = re.findall(r"-?\d[\d,]*(?:\.\d+)?", text)
    return float(found[-1].replace(",", "")) if found else None


def passes(program: str, test: str) -> bool:
    """Whether a program stands EvalPlus's test."""
    return SANDBOX.passes(f"{program}\n{test.replace('import numpy as np', NUMPY)}\n")
