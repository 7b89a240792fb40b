"""Teach the demo pair to think: a short derivation in tags before each query, learnt from the committed checkpoints.

    python -m scripts.demo.think build/thinking            # build/thinking/target and build/thinking/auxiliary

The derivation says in words which tables and columns the query needs, how rows are chosen, and how they are grouped and
sorted. It is made from the query (`derivation`), in one of several wordings drawn at random, so it has entropy where
the answer has little. One question in ten is asked with an empty thought in the prompt and answered at once. The
auxiliary learns from the target, as in `scripts.demo.train`; interrupted, the same command goes on likewise.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from runtime.commands.entry import Parser, command
from scripts.demo import batches, dataset
from scripts.demo.questions import Author
from scripts.demo.schemas import Schema, make_schema
from scripts.demo.tokenizer import TEMPLATE
from scripts.demo.train import RECIPES, Recipe, fit, surprises
from scripts.paths import DEMO

OPEN, CLOSE = "<think>", "</think>"
"""Tokens of their own, added behind the demo's vocabulary."""
UNTHOUGHT_SHARE = 0.1

THINKING_TEMPLATE = TEMPLATE.replace(
    "{{ '<|assistant|>' }}",
    "{{ '<|assistant|>' }}{% if enable_thinking is defined and not enable_thinking %}"
    f"{{{{ '{OPEN}{CLOSE}' }}}}{{% endif %}}",
)

_COMPARED = re.compile(r"(\w+) (=|<>|!=|>=|<=|>|<|LIKE|NOT LIKE) ('[^']*'|\d+)")
_COMMON: dict[str, Any] = {"sql_rows": 3, "code_rows": 0, "decay": 0.8, "warmup": 20, "shown": 24, "saved": 50}
THINKING = {
    "target": replace(RECIPES["target"], **_COMMON, steps=400, matrix_rate=1e-3, embedding_rate=1e-3, seed=11),
    "auxiliary": replace(
        RECIPES["auxiliary"], **_COMMON, steps=300, matrix_rate=3e-3, embedding_rate=2e-3, guided_from=0.5, seed=12
    ),
}
"""Few steps of three rows of 512 tokens, at low rates: the models know the queries, and learn what precedes them."""


def derivation(schema: Schema, query: str, rng: random.Random) -> str:
    """What a query does, in a few sentences whose wording is drawn at random."""
    bare = re.sub(r"\b(?:\w+)\.(\w+)", r"\1", query)  # without qualifiers
    bare = re.sub(r" AS (?:T\d|[ab]|total|result)\b", "", bare)

    def say(values: list[str], *wordings: str) -> list[str]:
        joined = " and ".join(values)
        return [rng.choice(wordings).format(joined)] if values else []

    tables = [t for t in schema.tables if re.search(rf"\b{t.name}\b", query)]
    keys = [t.parent + "_id" for t in tables if t.parent and t.parent in {one.name for one in tables}]
    shown = re.match(r"SELECT (.*?) FROM", bare)
    sorting, limit = re.findall(r"ORDER BY (.+?)(?: LIMIT|\)|$)", bare), re.findall(r"LIMIT (\d+)", bare)
    grouped, having = re.findall(r"GROUP BY (\w+)", bare), re.findall(r"HAVING (.+)$", bare)
    compared = [" ".join(match) for match in _COMPARED.findall(bare.partition(" HAVING ")[0])]
    others = re.findall(r"(\w+ [=<>]+) \(SELECT (?:MAX|MIN|AVG)", bare)
    parts = [
        *say([t.name for t in tables], "The tables are {}.", "I need {}.", "This is about {}.", "Look at {}."),
        *say(keys, "They are linked by {}.", "The link is {}.", "Match them by {}."),
        *say([shown[1]] if shown else [], "It asks for {}.", "Show {}.", "The result is {}."),
        *say(compared, "Only where {}.", "The condition is {}.", "Keep rows with {}.", "It must hold that {}."),
        *say(others, "Compare {} an aggregate.", "There is a bound, {} an aggregate of all rows."),
        *say(["NOT EXISTS"] if "NOT IN" in bare or "IS NULL" in bare else [], "Leave out what has a partner."),
        *say(grouped, "Group by {}.", "One row for each {}.", "The groups are by {}."),
        *say(having, "Of groups, those with {}.", "Groups must have {}."),
        *say(sorting, "Sort by {}.", "The order is {}.", "Put them in order of {}."),
        *say(limit, "Take {}.", "Only the first {}."),
    ]
    return " ".join(parts)


def groups(seed: int) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Endless schemas, each with (rest of the prompt, thought and query) of several questions."""
    rng = random.Random(f"{seed}:train:thoughts")
    while True:
        schema, pairs = make_schema(rng, "train"), list[tuple[str, str]]()
        authors = [Author(rng, schema, plain) for plain in (True, False)]
        talk, shared = rng.random() < dataset.CHAT_SHARE, schema.prompt()
        start = dataset.SYSTEM + shared.rstrip("\n") if talk else shared
        for _ in range(dataset.PAIRS):
            question = authors[rng.random() < dataset.VAGUE_SHARE].write()
            said = dataset.USER + question.text + dataset.ASSISTANT if talk else dataset.question_prompt(question.text)
            thought, query = derivation(schema, question.gold, rng), question.gold if talk else " " + question.gold
            if rng.random() < UNTHOUGHT_SHARE:
                pairs.append((f"{said}{OPEN}{CLOSE}", query))
            else:
                pairs.append((said, f"{OPEN}{thought}{CLOSE}{query}"))
        yield start, pairs


def vocabulary() -> PreTrainedTokenizerFast:
    """The demo's, with the tags."""
    words = AutoTokenizer.from_pretrained(DEMO / "pair" / "target", local_files_only=True)
    words.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in (OPEN, CLOSE)])
    words.chat_template = THINKING_TEMPLATE
    return words  # type: ignore[no-any-return]


def make(words: PreTrainedTokenizerFast, recipe: Recipe, step: int) -> batches.Batch:
    """The batch of a step, a function of the recipe's seed and the step alone."""
    own = groups(int(np.random.default_rng((recipe.seed, step)).integers(1 << 40)))
    rows = [batches._sql_row(words, *next(own)) for _ in range(recipe.sql_rows)]
    return batches._batch(rows, batches.ROW)


def held_out(model: PreTrainedModel, words: PreTrainedTokenizerFast, count: int) -> dict[str, float]:
    """Mean negative log-likelihood per token (nats) of queries behind their derivations, on development questions."""
    rng, losses = random.Random("development:thoughts"), list[torch.Tensor]()
    for _ in range(count):
        schema = make_schema(rng, "development")
        question = Author(rng, schema, True).write()
        said = f"{schema.prompt()}{dataset.question_prompt(question.text)}{OPEN}"
        said += derivation(schema, question.gold, rng) + CLOSE
        losses.append(surprises(model, words, said, f" {question.gold}{dataset.END}"))
    return {"development_sql": round(float(torch.cat(losses).mean()), 4)}


@command
def main() -> None:
    parser = Parser(prog="scripts.demo.think", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="for target/ and auxiliary/; a model that is there is kept")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    words = vocabulary()
    for role, recipe in THINKING.items():
        if not (args.folder / role / "training.jsonl").exists():

            def batch_of(step: int, recipe: Recipe = recipe) -> batches.Batch:
                return make(words, recipe, step)

            fit(recipe, words, batch_of, args.folder / role, True, DEMO / "pair" / role, held_out)
        print(args.folder / role)


if __name__ == "__main__":
    main()
