"""Training batches: rows of 512 tokens, SQL rows first, then rows of code.

A SQL row is one schema followed by as many question-answer pairs as fit. Each pair sees the schema and itself only
(a tree mask with positions that restart behind the schema), so it is trained exactly as if the schema stood in front of
it alone, while the schema is computed once for about eight pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from scripts.demo import corpus
from scripts.demo.dataset import training_groups

ROW = 512
PROMPT_WEIGHT = 0.1  # random schemas cannot be predicted; most of the capacity belongs elsewhere
ANSWER_WEIGHT = 2.0
CODE_WEIGHT = 1.0


@dataclass(frozen=True)
class Batch:
    """`tokens`, `positions`, `targets` int64 [R, 512]; `weights` float [R, 512]; `mask` bool [R, 1, 512, 512].

    `targets` at a place is the token that should follow it there; its weight is 0 where nothing is asked.
    `sql_rows` rows of SQL come first.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    targets: torch.Tensor
    weights: torch.Tensor
    mask: torch.Tensor
    sql_rows: int


def code_tokens(tokenizer: PreTrainedTokenizerFast, folder: Path) -> np.ndarray:
    """All training files as one uint16 array, an end token behind each file; kept in `folder` between runs."""
    path = folder / "code.npy"
    if not path.exists():
        texts = [text for _, text in corpus.files("train")]
        ids = tokenizer(texts, verbose=False)["input_ids"]
        flat = [t for one in ids for t in (*one, tokenizer.eos_token_id)]
        np.save(path, np.array(flat, dtype=np.uint16))
    loaded: np.ndarray = np.load(path, mmap_mode="r")
    return loaded


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


def make(tokenizer: PreTrainedTokenizerFast, code: np.ndarray, rows: int, sql_rows: int, seed: int, step: int) -> Batch:
    """The batch of one step, `sql_rows` of its `rows` rows SQL.

    A function of `seed` and `step` alone, so a resumed run sees the same data.
    """
    rng = np.random.default_rng((seed, step))
    groups = training_groups(int(rng.integers(1 << 40)))
    stacked = np.zeros((5, rows, ROW), dtype=np.int64)
    for r in range(sql_rows):
        stacked[:, r] = _sql_row(tokenizer, *next(groups))
    # a pass through the files in random order: an epoch's permutation of the row starts
    count = (len(code) - 1) // ROW - 1
    for r in range(rows - sql_rows):
        n = step * (rows - sql_rows) + r
        epoch, at = divmod(n, count)
        shuffled = np.random.default_rng((seed, epoch, 7))
        start = int(shuffled.permutation(count)[at]) * ROW + int(shuffled.integers(ROW))
        piece = np.asarray(code[start : start + ROW + 1], dtype=np.int64)
        i = sql_rows + r
        stacked[0, i], stacked[1, i], stacked[2, i] = piece[:-1], np.arange(ROW), piece[1:]
        stacked[3, i] = round(10 * CODE_WEIGHT)
    tokens, positions, targets, weights, branch = torch.from_numpy(stacked)
    same = (branch[:, :, None] == branch[:, None, :]) | (branch[:, None, :] == 0)
    mask = (same & torch.ones(ROW, ROW, dtype=torch.bool).tril())[:, None]
    return Batch(tokens, positions, targets, weights.float() / 10, mask, sql_rows)


def shift(batch: Batch, share: float, positions: int, seed: tuple[int, int]) -> None:
    """Let about `share` of the rows of code begin at a random position, so that all `positions` are learnt.

    A table of positions learns nothing of those behind the longest row; text begins at 0, so most rows still do.
    """
    rng = np.random.default_rng((*seed, 11))
    for row in range(batch.sql_rows, batch.positions.shape[0]):
        if rng.random() < share:
            batch.positions[row] += int(rng.integers(positions - ROW + 1))
