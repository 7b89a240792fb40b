"""The rows of a training step: schemas with questions about them, code, and now and then long conversations.

A SQL row is one schema followed by as many question-answer pairs as fit; a few have fields and records instead, see
`dataset`. Each pair sees the schema and itself only (a tree mask with positions that restart behind the schema), so it
is trained exactly as if the schema stood in front of it alone, while the schema is computed once for about eight pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from scripts.demo.dataset import conversations, training_groups

ROW, LONG, LONG_EVERY = 512, 2048, 10
"""Tokens of a row and of a long one, which is the models' context, and steps of which one has long rows."""
PROMPT_WEIGHT = 0.1  # random schemas cannot be predicted; most of the capacity belongs elsewhere
ANSWER_WEIGHT = 2.0
CODE_WEIGHT = 1.0


@dataclass(frozen=True)
class Row:
    """Tokens, the token that should follow each of them and what that weighs in the loss, positions, and branches.

    A branch is the number of a pair, and 0 for what all pairs share.
    """

    tokens: list[int]
    targets: list[int]
    weights: list[float]
    positions: list[int]
    branches: list[int]


@dataclass(frozen=True)
class Batch:
    """What a model is given, and the targets and weights [R, T] of its logits."""

    inputs: dict[str, torch.Tensor]
    targets: torch.Tensor
    weights: torch.Tensor


def _plain(tokens: list[int], weights: list[float]) -> Row:
    """A row of text of which `weights` says what predicting each token weighs; it is one token longer than the row."""
    length = len(tokens) - 1
    return Row(tokens[:-1], tokens[1:], weights[1:], list(range(length)), [0] * length)


def _sql_row(words: PreTrainedTokenizerFast, schema: str, pairs: list[tuple[str, str]]) -> Row:
    root, *parts = words([schema, *(text for pair in pairs for text in pair)])["input_ids"]
    row = _plain([*root, 0], [PROMPT_WEIGHT] * len(root) + [0.0])
    for branch, (question, answer) in enumerate(zip(parts[::2], parts[1::2], strict=True), 1):
        path = [*question, *answer]
        if len(row.tokens) + len(path) <= ROW:
            row.tokens.extend(path)
            row.targets.extend([*path[1:], words.eos_token_id])
            row.weights.extend([PROMPT_WEIGHT] * (len(question) - 1) + [ANSWER_WEIGHT] * (len(answer) + 1))
            row.positions.extend(range(len(root), len(root) + len(path)))
            row.branches.extend([branch] * len(path))
    return row


def _talk_row(words: PreTrainedTokenizerFast, seed: int) -> Row:
    """Conversations one behind the other."""
    ids: list[int] = []
    weights: list[float] = []
    talk = conversations(seed)
    while len(ids) <= LONG:
        said, answer = words(list(next(talk)))["input_ids"]
        ids += [*said, *answer, words.eos_token_id]
        weights += [PROMPT_WEIGHT] * len(said) + [ANSWER_WEIGHT] * (len(answer) + 1)
    return _plain(ids[: LONG + 1], weights[: LONG + 1])


@lru_cache(maxsize=4)
def _epoch(seed: int, epoch: int, count: int, length: int) -> tuple[np.ndarray, int]:
    """The order of `count` row starts in a pass through the files, and where in a row's length it begins."""
    shuffled = np.random.default_rng((seed, epoch, 7))
    return shuffled.permutation(count), int(shuffled.integers(length))


def _code_row(code: np.ndarray, number: int, seed: int, length: int) -> Row:
    count = (len(code) - 1) // length - 1
    epoch, at = divmod(number, count)
    order, first = _epoch(seed, epoch, count, length)
    start = int(order[at]) * length + first
    return _plain(code[start : start + length + 1].tolist(), [CODE_WEIGHT] * (length + 1))


def make(
    words: PreTrainedTokenizerFast, code: np.ndarray, sql_rows: int, code_rows: int, seed: int, step: int
) -> Batch:
    """The batch of one step, a function of `seed` and `step` alone: a resumed run sees the same data.

    Long rows are one of conversations and one of code: what is far back is learnt from these.
    """
    if step % LONG_EVERY == LONG_EVERY - 1:
        talk = _talk_row(words, int(np.random.default_rng((seed, step, 3)).integers(1 << 40)))
        return _batch([talk, _code_row(code, step, seed, LONG)], LONG)
    groups = training_groups(int(np.random.default_rng((seed, step)).integers(1 << 40)))
    rows = [_sql_row(words, *next(groups)) for _ in range(sql_rows)]
    return _batch([*rows, *(_code_row(code, step * code_rows + n, seed, ROW) for n in range(code_rows))], ROW)


def _batch(rows: list[Row], length: int) -> Batch:
    def padded(name: str, value: float = 0) -> torch.Tensor:
        return torch.tensor([[*getattr(row, name), *[value] * (length - len(row.tokens))] for row in rows])

    inputs, branches = {"input_ids": padded("tokens")}, padded("branches", -1)
    if branches.any():  # otherwise the rows are plain text, which causal attention reads
        seen = (branches[:, :, None] == branches[:, None, :]) | (branches[:, None, :] == 0)
        mask = (seen & torch.ones(length, length, dtype=torch.bool).tril())[:, None]
        inputs |= {"attention_mask": mask, "position_ids": padded("positions")}
    return Batch(inputs, padded("targets"), padded("weights"))
