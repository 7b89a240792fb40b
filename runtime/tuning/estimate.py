"""What drafts would gain for two checkpoints, before anything is exported or generated.

Both models read the same texts. At each position, with p and q their distributions after the request's filters, a
drafted token is accepted with probability 1 - TV(p, q), the sum of min(p, q). Of several children of a node, drawn with
replacement, the next is tried against what the one before has left. From a text's positions follows how many passes a
lossless method would have needed for it, each block beginning where the one before ended.

It is an estimate: the texts are given rather than sampled from the target, and positions are taken as independent given
the text. `block` and `traversal` accept somewhat more than the token-wise rule that is assumed here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel

from mtad.errors import InvalidInput
from mtad.filters import filter_logits
from mtad.params import DecodingParams
from mtad.rows import stack_rows

Floats = npt.NDArray[np.float64]

DRAFT_LENS, WIDTHS = range(1, 9), (1, 2, 4)
"""Draft lengths, and children of the root; every other node has one."""
REPEATS = 7


class Costs(NamedTuple):
    """What steps cost, as shares of a target's step over one token.

    Attributes:
        token: each further token that the target scores.
    """

    auxiliary: float
    token: float

    def block(self, draft_len: int, width: int) -> float:
        """A block whose draft has `width` chains."""
        return draft_len * self.auxiliary + 1 + draft_len * width * self.token


@dataclass(frozen=True)
class DraftEstimate:
    """For one draft length and width: expected tokens per target pass, and speed as a multiple of `sample`'s."""

    draft_len: int
    width: int
    tokens_per_pass: float
    speed: float


@dataclass(frozen=True)
class Report:
    """What was found.

    Attributes:
        acceptance, acceptance_error: mean over positions of 1 - TV, and its standard error over texts.
        quantiles: of the positions' 1 - TV: 10, 50 and 90 %.
    """

    texts: int
    positions: int
    acceptance: float
    acceptance_error: float
    quantiles: tuple[float, ...]
    costs: Costs
    estimates: list[DraftEstimate]

    @property
    def best(self) -> DraftEstimate:
        return max(self.estimates, key=lambda one: one.speed)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "costs": self.costs._asdict(), "best": asdict(self.best)}


def estimate(
    target: PreTrainedModel,
    auxiliary: PreTrainedModel,
    texts: Sequence[tuple[Sequence[int], int]],
    params: DecodingParams,
    costs: Costs | None = None,
    progress: Callable[[], object] = lambda: None,
) -> Report:
    """Estimate the gain of drafts of every length and width.

    Args:
        texts: token ids, and the first position that counts: what is before it is context.
        costs: of steps; measured with the two models if None.

    Raises:
        InvalidInput: there are fewer than two texts with a token that counts.
    """
    texts = [(ids, first) for ids, first in texts if first < len(ids)]
    if len(texts) < 2:
        raise InvalidInput("prompts", len(texts), "give at least two texts that are longer than their context")
    params = replace(params, method="speculative")
    vocab = min(model.config.vocab_size for model in (target, auxiliary))  # some are padded
    found = []
    for ids, first in texts:
        p, q = (_logits(model, ids, first)[:, :vocab] for model in (target, auxiliary))
        found.append(acceptance(p, q, params))
        progress()
    costs = costs or measure_costs(target, auxiliary, texts[0][0])
    means = np.array([one[0].mean() for one in found])
    first_child = np.concatenate([one[0] for one in found])
    estimates = []
    for width in WIDTHS:
        for draft_len in DRAFT_LENS:
            passes = sum(expected_passes(one[WIDTHS.index(width)], one[0], draft_len) for one in found)
            tokens = len(first_child) / passes
            estimates.append(DraftEstimate(draft_len, width, tokens, tokens / costs.block(draft_len, width)))
    return Report(
        texts=len(found),
        positions=len(first_child),
        acceptance=float(first_child.mean()),
        acceptance_error=float(means.std(ddof=1) / math.sqrt(len(means))),
        quantiles=tuple(np.quantile(first_child, (0.1, 0.5, 0.9)).tolist()),
        costs=costs,
        estimates=estimates,
    )


def acceptance(target: Tensor, auxiliary: Tensor, params: DecodingParams) -> Floats:
    """Probability that one of `WIDTHS` children is accepted: float64 [widths, positions].

    Args:
        target, auxiliary: logits, float32 [positions, V].
        params: whose filters both pass.
    """
    left, other = (filtered(logits, params) for logits in (target, auxiliary))
    rejected, found = np.ones(len(left)), []
    for child in range(1, max(WIDTHS) + 1):
        rejected = rejected * np.maximum(1 - np.minimum(left, other).sum(1), 0)
        residual = np.maximum(left - other, 0)
        mass = residual.sum(1, keepdims=True)
        left = np.where(mass > 1e-12, residual / np.maximum(mass, 1e-12), left)
        if child in WIDTHS:
            found.append(1 - rejected)
    return np.stack(found)


def filtered(logits: Tensor, params: DecodingParams) -> Floats:
    """Distributions after a request's filters, float64 [positions, V], from logits, float32 [positions, V]."""
    count, vocab = logits.shape
    row, found = stack_rows([params], vocab)[0], np.zeros((count, vocab))
    ids, log_p = np.empty(vocab, np.int32), np.empty(vocab, np.float32)
    for own, out in zip(logits.numpy(), found, strict=True):
        kept = filter_logits(own, row, ids, log_p)
        out[ids[:kept]] = np.exp(log_p[:kept].astype(np.float64))
    return found


def expected_passes(first: Floats, others: Floats, draft_len: int) -> float:
    """Expected blocks of a text of n tokens, by the acceptance at each: of a block's first token, and of others."""
    count = len(first)
    passes = np.zeros(count + draft_len + 2)
    for at in range(count - 1, -1, -1):
        passes[at], reached = 1.0, 1.0
        for step in range(draft_len):
            if at + step >= count:
                break
            rate = first[at] if step == 0 else others[at + step]
            passes[at] += reached * (1 - rate) * passes[at + step + 1]
            reached *= rate
        else:
            passes[at] += reached * passes[at + draft_len + 1]
    return float(passes[0])


@torch.inference_mode()
def _logits(model: PreTrainedModel, ids: Sequence[int], first: int) -> Tensor:
    """After each token before one that counts: [positions, V]."""
    logits: Tensor = model(input_ids=torch.tensor([list(ids)])).logits[0, first - 1 : -1].float()
    return logits


@torch.inference_mode()
def measure_costs(target: PreTrainedModel, auxiliary: PreTrainedModel, ids: Sequence[int]) -> Costs:
    """Costs of steps behind a text, by the models as they are here; an engine's own ratio may be another."""
    many = 1 + max(DRAFT_LENS) * max(WIDTHS)

    def seconds(model: PreTrainedModel, tokens: int) -> float:
        taken = []
        for _ in range(REPEATS):
            cache = model(input_ids=torch.tensor([list(ids)]), use_cache=True).past_key_values
            step = torch.tensor([[ids[-1]] * tokens])
            started = time.perf_counter()
            model(input_ids=step, past_key_values=cache, use_cache=True)
            taken.append(time.perf_counter() - started)
        return sorted(taken)[REPEATS // 2]

    one, more = seconds(target, 1), seconds(target, many)
    return Costs(seconds(auxiliary, 1) / one, max(0.0, (more / one - 1) / (many - 1)))
