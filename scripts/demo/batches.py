"""Training batches: rows of 512 tokens (of code alone: any length), SQL rows first, then rows of code.

A SQL row is one schema followed by as many question-answer pairs as fit; a few have fields and records instead, see
`dataset`. Each pair sees the schema and itself only (a tree mask with positions that restart behind the schema), so it
is trained exactly as if the schema stood in front of it alone, while the schema is computed once for about eight pairs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from scripts.demo.dataset import conversations, training_groups

ROW = 512
PROMPT_WEIGHT = 0.1  # random schemas cannot be predicted; most of the capacity belongs elsewhere
ANSWER_WEIGHT = 2.0
CODE_WEIGHT = 1.0
FILES = 512  # tokenised at once


@dataclass(frozen=True)
class Batch:
    """`tokens`, `positions`, `targets` int64 [R, T]; `weights` float [R, T]; `mask` bool [R, 1, T, T].

    `targets` at a place is the token that should follow it there; its weight is 0 where nothing is asked.
    `sql_rows` rows of SQL come first. Without any, `mask` is None: rows are plain text from position 0.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    targets: torch.Tensor
    weights: torch.Tensor
    mask: torch.Tensor | None
    sql_rows: int

    @property
    def inputs(self) -> dict[str, torch.Tensor]:
        """What a model is given. Without a mask attention is the causal kernel's."""
        if self.mask is None:
            return {"input_ids": self.tokens}
        return {"input_ids": self.tokens, "attention_mask": self.mask, "position_ids": self.positions}

    def parts(self, rows: int | None, device: str) -> Iterator[Batch]:
        """Batches of up to `rows` rows each on a device; None: all at once."""
        rows = rows or len(self.tokens)
        for at in range(0, len(self.tokens), rows):
            own = slice(at, at + rows)
            tokens, positions, targets, weights = (
                whole[own].to(device) for whole in (self.tokens, self.positions, self.targets, self.weights)
            )
            mask = None if self.mask is None else self.mask[own].to(device)
            yield Batch(tokens, positions, targets, weights, mask, min(max(self.sql_rows - at, 0), rows))


def code_tokens(tokenizer: PreTrainedTokenizerFast, folder: Path, texts: Sequence[str]) -> np.ndarray:
    """All training files as one uint16 array, an end token behind each file; kept in `folder` between runs."""
    path = folder / "code.npy"
    if not path.exists():
        pieces = []
        for at in range(0, len(texts), FILES):
            ids = tokenizer(list(texts[at : at + FILES]), verbose=False, return_attention_mask=False)["input_ids"]
            pieces += [np.array([*one, tokenizer.eos_token_id], dtype=np.uint16) for one in ids]
        np.save(path, np.concatenate(pieces))
    loaded: np.ndarray = np.load(path, mmap_mode="r")
    return loaded


@lru_cache(maxsize=2)
def _epoch(seed: int, epoch: int, count: int, length: int) -> tuple[np.ndarray, int]:
    """The order of `count` row starts in a pass through the files, and where in a row's length it begins."""
    shuffled = np.random.default_rng((seed, epoch, 7))
    return shuffled.permutation(count), int(shuffled.integers(length))


def _sql_row(tokenizer: PreTrainedTokenizerFast, schema: str, pairs: list[tuple[str, str]]) -> np.ndarray:
    """int64 [5, ROW]: token, position, target, weight x 10, branch (0 = schema, -1 = padding)."""
    texts = [schema, *(text for pair in pairs for text in pair)]
    ids = tokenizer(texts)["input_ids"]
    end = tokenizer.eos_token_id
    row = np.zeros((5, ROW), dtype=np.int64)
    row[4] = -1
    root = ids[0]
    n = len(root)
    row[0, :n], row[1, :n], row[4, :n] = root, range(n), 0
    row[2, : n - 1], row[3, : n - 1] = root[1:], round(10 * PROMPT_WEIGHT)
    for branch, (question, answer) in enumerate(zip(ids[1::2], ids[2::2], strict=True), 1):
        path = [*question, *answer]
        if n + len(path) > ROW:
            continue
        at = slice(n, n + len(path))
        row[0, at], row[1, at], row[4, at] = path, range(len(root), len(root) + len(path)), branch
        row[2, at] = [*path[1:], end]
        prompt = round(10 * PROMPT_WEIGHT)
        row[3, at] = [prompt] * (len(question) - 1) + [round(10 * ANSWER_WEIGHT)] * (len(answer) + 1)
        n += len(path)
    return row


def _talk_row(tokenizer: PreTrainedTokenizerFast, seed: int, length: int) -> np.ndarray:
    """int64 [4, length]: token, position, target, weight x 10 of conversations one behind the other."""
    ids: list[int] = []
    weights: list[int] = []
    for turns in conversations(seed):
        said, answer = tokenizer(list(turns))["input_ids"]
        ids += [*said, *answer, tokenizer.eos_token_id]
        weights += [round(10 * PROMPT_WEIGHT)] * len(said) + [round(10 * ANSWER_WEIGHT)] * (len(answer) + 1)
        if len(ids) > length:
            break
    return np.array([ids[:length], range(length), ids[1 : length + 1], weights[1 : length + 1]])


def make_long(tokenizer: PreTrainedTokenizerFast, code: np.ndarray, seed: int, step: int, length: int) -> Batch:
    """Conversations in one row, code in the other, `length` tokens each: what is far back is learnt from these."""
    batch = make(tokenizer, code, 1, 0, seed, step, length)
    talk = torch.from_numpy(_talk_row(tokenizer, int(np.random.default_rng((seed, step, 3)).integers(1 << 40)), length))
    tokens, positions, targets, weights = (
        torch.cat([new[None].to(old.dtype), old])
        for new, old in zip(talk, (batch.tokens, batch.positions, batch.targets, batch.weights * 10), strict=True)
    )
    return Batch(tokens, positions, targets, weights / 10, None, 0)


def make(
    tokenizer: PreTrainedTokenizerFast,
    code: np.ndarray,
    rows: int,
    sql_rows: int,
    seed: int,
    step: int,
    length: int = ROW,
) -> Batch:
    """The batch of one step, `sql_rows` of its `rows` rows SQL, `length` tokens a row.

    A function of `seed` and `step` alone, so a resumed run sees the same data.
    """
    rng = np.random.default_rng((seed, step))
    groups = training_groups(int(rng.integers(1 << 40)))
    stacked = np.zeros((5, rows, length), dtype=np.int64)
    for r in range(sql_rows):
        stacked[:, r] = _sql_row(tokenizer, *next(groups))
    # a pass through the files in random order: an epoch's permutation of the row starts
    count = (len(code) - 1) // length - 1
    for r in range(rows - sql_rows):
        epoch, at = divmod(step * (rows - sql_rows) + r, count)
        order, first = _epoch(seed, epoch, count, length)
        start = int(order[at]) * length + first
        piece = np.asarray(code[start : start + length + 1], dtype=np.int64)
        i = sql_rows + r
        stacked[0, i], stacked[1, i], stacked[2, i] = piece[:-1], np.arange(length), piece[1:]
        stacked[3, i] = round(10 * CODE_WEIGHT)
    tokens, positions, targets, weights, branch = torch.from_numpy(stacked)
    mask = None
    if sql_rows:
        same = (branch[:, :, None] == branch[:, None, :]) | (branch[:, None, :] == 0)
        mask = (same & torch.ones(length, length, dtype=torch.bool).tril())[:, None]
    return Batch(tokens, positions, targets, weights.float() / 10, mask, sql_rows)
