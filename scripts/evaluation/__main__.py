"""Compare decoding methods on sets of prompts: quality, repetition, acceptance, speed, energy.

    python -m scripts.evaluation                                        the demo's test prompts, all settings
    python -m scripts.evaluation --set spider=DIR,humaneval=FILE,jsonl=FILE --pair PAIR --checkpoints DIR --seeds 4
    python -m scripts.evaluation --methods sample,speculative,mtad:accept_threshold=0.3 --baselines none
    python -m scripts.evaluation --curve accept_threshold=0,0.1,0.3,0.5,0.7,0.9 --methods mtad,mmtad --split development

For each prompt and seed all settings run one after another, in an order that rotates. Speed is decoding alone: storing
the prompt, tokenising and scoring are not in it. Perplexity is under the target, unprocessed, at temperature 1: exp of
the mean over texts of their mean negative log-likelihood per token. Errors are standard errors over prompts
(`scripts/evaluation/figures.py`); differences and ratios are paired. Energy is what meters say, or "none".

Prints Markdown tables; writes evaluation.json and .png, with --curve curves.json and .png, under build/results or the
folder of --results. Sets of prompts: `scripts/evaluation/prompts.py`; settings: `settings.py` beside it.
"""

from __future__ import annotations

from runtime.commands.entry import command


@command
def main() -> None:
    from scripts.evaluation.command import parser, run

    run(parser().parse_args())


if __name__ == "__main__":
    main()
