"""Can a classifier tell a setting's answers from those of `block`? A two-sample test on joint texts.

A linear classifier (ridge regression on plus and minus one, with NumPy) learns from the answers to four fifths of the
prompts, and is asked about the rest, five times: of two answers to a prompt, one of each setting, which is which? At
50 % it knows nothing. `block again`, with other random numbers, is the null: it must be at 50 % within its error.
Features: how often tokens and pairs of adjacent tokens occur, in 512 buckets, the length, and the mean log-likelihood.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from scripts.evaluation.answers import Answer
from scripts.evaluation.figures import Figure, Floats

BUCKETS, FOLDS = 512, 5


def told_apart(prompts: Sequence[Sequence[Answer]], others: Sequence[Sequence[Answer]]) -> Figure:
    """Share of pairs of answers to one prompt in which the classifier knows whose is whose.

    Args:
        prompts, others: answers of the two settings to each prompt.
    """
    sides: list[list[Floats]] = [[], []]
    for both in zip(prompts, others, strict=True):
        rows = [np.stack([_features(one) for one in own]) for own in both]
        middle = (rows[0].mean(0) + rows[1].mean(0)) / 2  # what the prompt decides says nothing
        for side, own in zip(sides, rows, strict=True):
            side.append(own - middle)
    share = np.zeros(len(prompts))
    for fold in range(min(FOLDS, len(prompts))):
        inside = [at for at in range(len(prompts)) if at % FOLDS != fold]
        x = np.concatenate([side[at] for side in sides for at in inside] or [np.zeros((1, BUCKETS + 2))])
        y = np.repeat([1.0, -1.0], [sum(len(side[at]) for at in inside) for side in sides]) if inside else np.zeros(1)
        scale = x.std(0) + 1e-6
        x = x / scale
        learned = np.linalg.solve(x.T @ x + len(x) * np.eye(x.shape[1]), x.T @ y) / scale
        for at in range(fold, len(prompts), FOLDS):
            lead = (sides[0][at] @ learned)[:, None] - (sides[1][at] @ learned)[None]
            share[at] = np.mean((lead > 0) + (lead == 0) / 2)
    return Figure(share, np.ones(len(prompts)))


def _features(answer: Answer) -> Floats:
    counts, tokens = np.zeros(BUCKETS), np.array(answer.tokens, np.int64)
    np.add.at(counts, tokens * 31 % BUCKETS, 1)
    np.add.at(counts, (tokens[:-1] * 7919 + tokens[1:] * 104729) % BUCKETS, 1)
    return np.array([*np.sqrt(counts), math.log(len(tokens)), answer.nll or 0.0])
