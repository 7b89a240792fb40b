"""Answers held-out questions with the demo pair, and compares three methods; at most 25 lines."""

from __future__ import annotations

import time
from collections import defaultdict
from statistics import mean

from tqdm import tqdm

from mtad import LLM, DecodingParams
from runtime.commands.entry import Parser, command
from scripts.demo.dataset import load, matches
from scripts.paths import ROOT
from scripts.results import table

SHOWN, COMPARED = 5, 40
METHODS = ("sample", "block", "mtad")
NEXT = """\
mtad chat build/demo-pair --system 'Table singer, columns = [*, singer_id, name, age, city]'
mtad serve build/demo-pair   # a page to try it on, and OpenAI's API"""


@command
def main() -> None:
    Parser(prog="scripts.quickstart", description=__doc__).parse_args()
    llm = LLM(ROOT / "build" / "demo-pair")
    examples, found = load("test", "sql")[:COMPARED], defaultdict[str, list[tuple[bool, float, float]]](list)
    print("Questions about databases that the pair has never seen, answered at temperature 0:")
    for example in examples[:SHOWN]:
        result = llm.generate(example.prompt, DecodingParams(temperature=0))[0]
        question = example.prompt.splitlines()[-2].removeprefix("Question: ")
        verdict = "right" if matches(example, result.text) else "wrong"
        figures = f"{verdict} rows; {result.statistics.block_efficiency:.1f} tokens per pass"
        print(f"{question}\n   {result.text.strip()}   [{figures}]", flush=True)
    for number, example in enumerate(tqdm(examples, "comparing", leave=False, disable=None)):
        for method in METHODS:
            began = time.perf_counter()
            params = DecodingParams(method=method, top_k=10, top_p=0.9, seed=number)
            result = llm.generate(example.prompt, params)[0]
            speed = len(result.token_ids) / (time.perf_counter() - began)
            right, efficiency = matches(example, result.text), result.statistics.block_efficiency
            found[method].append((right, efficiency, speed))
    rows = [("method", "right answers", "tokens per pass", "tokens/s")]
    for method, answers in found.items():
        right, efficiency, speed = (mean(values) for values in zip(*answers, strict=True))
        rows.append((method, f"{right:.0%}", f"{efficiency:.2f}", f"{speed:.0f}"))
    print(f"\n{COMPARED} questions, one at a time (by chance, 7 % more or less are right):\n\n{table(rows)}\n\n{NEXT}")


if __name__ == "__main__":
    main()
