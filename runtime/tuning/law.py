"""What temperature and filters make of the target's law, and how far that is from the law itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mtad.filters import filter_logits
from mtad.params import DecodingParams
from mtad.rows import stack_rows

if TYPE_CHECKING:
    from runtime.llm import LLM

Floats = npt.NDArray[np.float64]


@torch.inference_mode()
def law_change(llm: LLM, prompt: Sequence[int], tokens: Sequence[int], params: DecodingParams) -> Floats:
    """How far temperature and filters change the target's law at each token of an answer, in total variation.

    Penalties, biases and constraints do not count; see `variation`.

    Args:
        llm: idle, and for this call alone.

    Returns:
        float64 [tokens].
    """
    target, first, step = llm.loop.caches.target, len(prompt) - 1, llm.config.max_prefill_tokens
    if (params.temperature, params.top_k, params.top_p, params.min_p) == (1, 0, 1, 0):
        return np.zeros(len(tokens))
    for at in range(0, first, step):
        target.prefill(0, prompt[at : min(at + step, first)], at)
    read = target.logits(0, [prompt[-1], *tokens[:-1]], first)
    changes = [variation(logits.cpu(), params) for logits in read]
    llm.loop.caches.release(0)
    return np.concatenate(changes)


def variation(logits: Tensor, params: DecodingParams) -> Floats:
    """Total variation between the law of logits, float32 [n, V], and what temperature and filters make of it: [n].

    It is half the sum over the vocabulary of |p_T - p|. At temperature 0, p_T has the most likely token alone.
    """
    own, plain = replace(params, method="sample"), DecodingParams(method="sample")
    return np.abs(filtered(logits, own) - filtered(logits, plain)).sum(1) / 2


def filtered(logits: Tensor, params: DecodingParams) -> Floats:
    """Distributions after a request's filters, float64 [positions, V], from logits, float32 [positions, V]."""
    count, vocab = logits.shape
    row, found = stack_rows([params], vocab)[0], np.zeros((count, vocab))
    ids, log_p = np.empty(vocab, np.int32), np.empty(vocab, np.float32)
    for own, out in zip(logits.numpy(), found, strict=True):
        kept = filter_logits(own, row, ids, log_p)
        out[ids[:kept]] = np.exp(log_p[:kept].astype(np.float64))
    return found
