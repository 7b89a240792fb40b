"""Decoding parameters of the rows of one batch, as tensors: rows with different parameters share one computation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mtad.params import DecodingParams, Rule


class Rows(NamedTuple):
    """Parameters per row. Shapes are [R] unless said.

    Attributes:
        temperature: float32, > 0.
        top_k: int64, 1 .. V.
        top_p: float32, (0, 1].
        log_threshold: float32, log tau; -inf for tau = 0.
        draft_len: int64, levels this row drafts, 0 for none.
        beam_width: int64, beams this row drafts.
        tree: bool, the target scores all beams of this row rather than the best one.
        lossless: bool, the row is accepted by the `lossless` rule, else by `joint`.
        eos: int64 [R, E], tokens that end this row's text; -1 stands for none.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    log_threshold: Tensor
    draft_len: Tensor
    beam_width: Tensor
    tree: Tensor
    lossless: Tensor
    eos: Tensor


class Shape(NamedTuple):
    """The static shape of one block: the largest row decides, smaller rows are padded with dead nodes.

    Attributes:
        draft_len: levels of the tree.
        width: beams the auxiliary drafts a level.
        score_width: nodes a level that the target scores.
        candidates: K, most likely tokens looked at per position; V where any row has no top-k.
        selects: whether some row is scored along its best beam only, out of several.
        rules: acceptance rules of the rows that draft.
    """

    draft_len: int
    width: int
    score_width: int
    candidates: int
    selects: bool
    rules: tuple[Rule, ...]


def top_k_of(params: DecodingParams, vocab_size: int) -> int:
    """Tokens a request's filter keeps at most: greedy is top-k 1, no filter is the vocabulary."""
    if params.temperature == 0 and params.spec.lossless:
        return 1
    return min(params.top_k or vocab_size, vocab_size)


def block_shape(params: Sequence[DecodingParams], vocab_size: int) -> Shape:
    """The smallest block shape that holds every row."""
    width = max(p.draft_width for p in params)
    return Shape(
        draft_len=max(p.drafted for p in params),
        width=width,
        score_width=max(p.score_width for p in params),
        candidates=max(top_k_of(p, vocab_size) for p in params),
        selects=width > 1 and not all(p.spec.tree for p in params),
        rules=tuple(sorted({p.spec.rule for p in params if p.drafted})),
    )


def stack_rows(
    params: Sequence[DecodingParams], vocab_size: int, eos: Sequence[int], device: torch.device | str = "cpu"
) -> Rows:
    """Rows for a batch of requests.

    Temperature 0 has no code of its own: lossless methods become top-k 1, the others keep temperature 1 and are given
    noise 0 (`mtad.noise`), which turns beam sampling into beam search and the bonus draw into an argmax.
    """
    ends = list(eos) or [-1]
    return Rows(
        temperature=torch.tensor([p.temperature or 1.0 for p in params], dtype=torch.float32, device=device),
        top_k=torch.tensor([top_k_of(p, vocab_size) for p in params], device=device),
        top_p=torch.tensor([p.top_p for p in params], dtype=torch.float32, device=device),
        log_threshold=torch.tensor(
            [math.log(p.accept_threshold) if p.accept_threshold > 0 else -math.inf for p in params],
            dtype=torch.float32,
            device=device,
        ),
        draft_len=torch.tensor([p.drafted for p in params], device=device),
        beam_width=torch.tensor([p.draft_width for p in params], device=device),
        tree=torch.tensor([p.spec.tree for p in params], device=device),
        lossless=torch.tensor([p.spec.rule == "lossless" for p in params], device=device),
        eos=torch.tensor([[-1] * len(ends) if p.ignore_eos else ends for p in params], device=device),
    )
