"""Compare decoding methods on one set of prompts: how much faster, and at what price in quality.

    python -m scripts.evaluation code|code-others|sql|sql-thinking|sql-ambiguous|jsonl=FILE --answers FILE
    python -m scripts.evaluation code --quick          one minute, to see that it works

Each setting first gets the draft that is fastest on development prompts. Then all settings answer each prompt in turns,
four times, or eight times where answers are verified; the first answers to the first prompts (`--timed`)
are timed. Two tables are printed and written, as JSON with a plot:

* `settings`: tokens per target pass and per second of decoding alone, also as a multiple of `block`'s (paired);
  perplexity under the target, unprocessed (exp of the mean over texts of the negative log-likelihood per token);
  distinct-2; self-BLEU over four answers to a prompt; pass@1 and pass@8; how well a classifier tells the answers from
  `block`'s (50 %: not at all; `block again` is the null); joules per token, where there is a meter.
* `gain`: what remains of the speed beside `block` at a temperature of no worse figures, and whether that counts. The
  auxiliary alone is the control (`scripts/evaluation/gain.py`).

Errors are standard errors over prompts. With --answers, a run that was broken off goes on, also with more prompts, and
a finished one makes its tables again; seconds of one machine or version stand beside those of another only if the file
is used for both.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtad.errors import InvalidInput
from runtime.commands.entry import PLACEMENT, Parser, add_options, command, given_options
from runtime.config import RuntimeConfig
from scripts.evaluation.report import plot, tables, verdict
from scripts.evaluation.settings import BLOCK, DEFAULT, LONGEST, TEMPERATURES, WIDEST, Setting, every_setting
from scripts.paths import RESULTS, ROOT

if TYPE_CHECKING:
    from scripts.evaluation.answers import Answer

__all__ = ["tables"]

MAX_TOKENS = 128
QUICK_PROMPTS, QUICK_TOKENS, QUICK_METHODS = 4, 16, "mtad,mmtad_sample"


def parser() -> Parser:
    own = Parser(prog="scripts.evaluation", description="Decoding methods side by side on one set of prompts.")
    own.add_argument("set", help="code, code-others, sql, sql-thinking, sql-ambiguous, or jsonl=FILE")
    own.add_argument(
        "--pair", type=Path, default=ROOT / "build" / "demo-pair", help="pair folder (default: build/demo-pair)"
    )
    own.add_argument("--methods", help=f"settings beside those that are measured always (default: {DEFAULT})")
    own.add_argument("--prompts", type=int, help="so many prompts, from the set's beginning (default: its file's)")
    own.add_argument("--timed", type=int, default=40, help="of so many prompts, first answers are timed (default: 40)")
    curve = f"of the curve of block (default: {' '.join(map(str, TEMPERATURES))})"
    own.add_argument("--temperatures", type=float, nargs="+", default=TEMPERATURES, help=curve)
    own.add_argument("--answers", type=Path, help="file that keeps all answers, gzipped lines of JSON")
    own.add_argument("--results", type=Path, help=f"folder to write to (default: {RESULTS.relative_to(ROOT)})")
    own.add_argument("--quick", action="store_true", help="few methods and prompts, into build/results")
    add_options(own, RuntimeConfig, PLACEMENT)
    return own


@command
def main() -> None:
    from scripts.results import save, table

    options = parser().parse_args()
    figures = measured(options)
    folder = options.results or (ROOT / "build" / "results" if options.quick else RESULTS)
    path = folder / f"evaluation-{figures['set']}.json"
    save(path, "scripts.evaluation.__main__", figures)
    plot(figures, path.with_suffix(".png"))
    for name, rows in tables(figures).items():
        print(f"\n{name}\n\n{table(rows)}")
    print(f"\n{verdict(figures)}\nwritten to {path} and .png")


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """The figures of a run.

    Raises:
        InvalidInput: an option is not usable; nothing was measured.
    """
    from scripts.evaluation.prompts import open_set

    if options.prompts is not None and options.prompts < 1:
        raise InvalidInput("prompts", options.prompts, "give at least 1")
    if options.timed < 1:
        raise InvalidInput("timed", options.timed, "give at least 1")
    task = open_set(options.set, options.prompts or (QUICK_PROMPTS if options.quick else None))
    methods = options.methods or (QUICK_METHODS if options.quick else DEFAULT)
    settings = every_setting(methods, QUICK_TOKENS if options.quick else MAX_TOKENS, task.stop, options.temperatures)

    import torch

    from scripts.evaluation import measure
    from scripts.evaluation.answers import Store

    about = measure.describe(options.pair, task)
    store = Store(options.answers, about)
    torch.set_num_threads(1)  # the loop's own tensors are small; the cores belong to the engines
    given = given_options(options, RuntimeConfig)
    config = RuntimeConfig(max_draft_len=LONGEST, max_beam_width=WIDEST, prefix_tokens=0, **given)
    writers = measure.Writers(options.pair, config, scored=task.verify is None)
    prompts = measure.fitting(writers.llm, task, settings)
    left_out, development = len(task.prompts) - len(prompts), [writers.llm.tokenize(one) for one in task.development]
    if options.quick:
        development = development[:1]
    settings = measure.choose_drafts(writers, settings, development, store)
    written = measure.write_answers(writers, settings, task, prompts, options.timed, store)
    right = {label: measure.verify(task, list(prompts), answers) for label, answers in written.items()}
    return {
        "about": about,
        "set": task.name,
        "prompts": len(prompts),
        "left_out": left_out,
        "answers": task.answers,
        "timed": min(options.timed, len(prompts)),
        "energy": writers.meter.name,
        **_compared(settings, written, right),
    }


def _compared(
    settings: Sequence[Setting],
    written: Mapping[str, Sequence[Sequence[Answer]]],
    right: Mapping[str, Sequence[Sequence[bool]] | None],
) -> dict[str, Any]:
    """Figures and gains of all settings."""
    from scripts.evaluation.figures import figures_of, summary
    from scripts.evaluation.gain import control_failed, gains
    from scripts.evaluation.two_samples import told_apart

    known = {label: figures_of(answers, right[label]) for label, answers in written.items()}
    for label, answers in written.items():
        if label != BLOCK and "perplexity" in known[label]:
            known[label]["told_apart"] = told_apart(answers, written[BLOCK])
    rows = {
        one.label: {
            "parameters": one.description,
            "draft": one.draft,
            "figures": summary(known[one.label], known[BLOCK]),
        }
        for one in settings
    }
    gained = gains(settings, known)
    return {"settings": rows, "gain": gained, "control_failed": control_failed(gained)}


if __name__ == "__main__":
    main()
