"""Answer a few held-out questions with the demo pair, and compare mtad with sampling; at most 25 lines.

python -m scripts.quickstart [--pair FOLDER]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from runtime import LLM
from runtime.commands.entry import Parser, command
from scripts.bench.methods import BASE, methods
from scripts.demo import dataset
from scripts.demo.dataset import matches
from scripts.evaluation import report
from scripts.evaluation.measure import compare
from scripts.evaluation.prompts import Demo
from scripts.paths import ROOT

SHOWN, COMPARED = 5, 80
NEXT = """\
mtad chat build/demo-pair --system 'Table singer, columns = [*, singer_id, name, age, city]'
mtad generate build/demo-pair 'def largest(values):' --max-tokens 64 --seed 7
mtad serve build/demo-pair   # a page to try it on, and OpenAI's API"""


@command
def main() -> None:
    parser = Parser(prog="scripts.quickstart", description="A first look at the demo pair.")
    parser.add_argument(
        "--pair", type=Path, default=ROOT / "build" / "demo-pair", help="pair folder (default %(default)s)"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    llm = LLM(options.pair)
    tuned = methods("sql")
    compared = {"sample": tuned["sample"], "block": replace(BASE, method="block"), "mtad": tuned["mtad"]}

    print("Questions about databases that the pair has never seen, answered by mtad:")
    examples = dataset.load("test", "sql")[:SHOWN]
    params = [replace(compared["mtad"], seed=number) for number in range(SHOWN)]
    for example, result in zip(examples, llm.generate([e.prompt for e in examples], params), strict=True):
        question = example.prompt.splitlines()[-2].removeprefix("Question: ")
        verdict = "right rows" if matches(example, result.text) else "wrong rows"
        passes = f"{result.statistics.block_efficiency:.1f} tokens per pass"
        print(f"{question}\n   {result.text.strip()}   [{verdict}; {passes}]")

    rows = compare(llm, Demo("sql", "test", COMPARED), compared, label="comparing")
    print(
        f"\n{COMPARED} questions, one at a time; ± is one standard error:\n\n{table(rows)}\n\n{meaning(rows)}\n\n{NEXT}"
    )


def table(rows: Mapping[str, Any]) -> str:
    """Accuracy, tokens per pass and speed of each setting, as a Markdown table."""
    columns = {"accuracy": (100, ".0f"), "block_efficiency": (1, ".2f"), "tokens_per_second": (1, ".0f")}
    lines = [["setting", "accuracy %", "tokens per pass", "tokens/s"]]
    for label, row in rows.items():
        figures = [(row[name], scale, form) for name, (scale, form) in columns.items()]
        cells = [f"{f['value'] * scale:{form}} ± {f['error'] * scale:{form}}" for f, scale, form in figures]
        lines.append([label, *cells])
    return report.markdown(lines)


def meaning(rows: Mapping[str, Any]) -> str:
    """What the table says, paired over questions."""
    points = rows["mtad"]["accuracy"]["vs"]["sample"]
    faster = {name: rows[name]["tokens_per_second"]["vs"]["sample"] for name in ("block", "mtad")}
    speed = {name: f"{one['ratio']:.2f} ± {one['error']:.2f} times as fast" for name, one in faster.items()}
    return (
        f"Against sampling, mtad is right {100 * points['difference']:+.0f} ± {100 * points['error']:.0f} points more "
        f"often and {speed['mtad']}; block, which keeps sampling's distribution, is {speed['block']}."
    )


if __name__ == "__main__":
    main()
