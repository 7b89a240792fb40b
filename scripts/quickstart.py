"""Answer a few held-out questions with the demo pair, then compare the methods side by side.

python -m scripts.quickstart [--pair FOLDER]
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from runtime import LLM
from runtime.commands.entry import Parser, command
from scripts.bench.methods import methods
from scripts.demo import dataset
from scripts.demo.dataset import matches
from scripts.evaluation import report
from scripts.evaluation.measure import compare
from scripts.evaluation.prompts import Demo
from scripts.paths import ROOT

SHOWN, COMPARED = 5, 40


@command
def main() -> None:
    """Entry point."""
    parser = Parser(prog="scripts.quickstart", description="A first look at the demo pair.")
    parser.add_argument(
        "--pair", type=Path, default=ROOT / "build" / "demo-pair", help="pair folder (default %(default)s)"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    llm = LLM(options.pair)
    examples = dataset.load("test", "sql")
    compared = methods("sql")

    print(f"\nHeld-out questions, answered by mtad (accept_threshold {compared['mtad'].accept_threshold}):\n")
    params = [replace(compared["mtad"], seed=number) for number in range(SHOWN)]
    for example, result in zip(examples, llm.generate([e.prompt for e in examples[:SHOWN]], params), strict=False):
        question = next(line for line in example.prompt.splitlines() if line.startswith("Question:"))
        verdict = (
            "right rows" if matches(example, result.text) else f"wrong rows (a right query: {example.answer.strip()})"
        )
        efficiency = f"{result.statistics.block_efficiency:.2f} tokens a target pass"
        print(f"{question}\n  {result.text.strip()}\n  {verdict}; {efficiency}\n")

    del compared["greedy"]
    rows = compare(llm, Demo("sql", "test", COMPARED), compared, label="comparing")
    print(f"\nThe first {COMPARED} questions, one at a time (± is one standard error; accuracy is that of the rows):\n")
    print(f"{report.table(rows)}\n\n{report.comparison(rows, 'speculative')}")
    print("\nMore questions, open-ended text, other decoders: python -m scripts.evaluation")


if __name__ == "__main__":
    main()
