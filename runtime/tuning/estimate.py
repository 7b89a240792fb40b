"""What drafts would gain for two checkpoints, before anything is exported or generated.

Both models read the same texts. At each position, with p and q their distributions after the request's filters, a
drafted token is accepted with probability 1 - TV(p, q), the sum of min(p, q). From a text's positions follows how many
passes `speculative` would have needed for it, each block beginning where the one before ended.

It is an estimate: the texts are given rather than sampled from the target, and positions are taken as independent given
the text. `block` and `traversal` accept somewhat more.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from engines.prompts import Example
from mtad.errors import InvalidInput
from mtad.params import DecodingParams
from runtime.tuning.measure import Floats, filtered


def texts_to_read(tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example]) -> list[tuple[Tensor, int]]:
    """Each prompt with its answer: token ids, int64 [1, S], and the first position that counts.

    The answer's positions count; where there is no answer, those of the prompt's second half.

    Raises:
        InvalidInput: there are fewer than two texts to read.
    """
    texts = []
    for example in examples:
        prompt = tokenizer(example.prompt).input_ids
        answer = tokenizer(example.answer or "", add_special_tokens=False).input_ids
        first = max(1, len(prompt) // 2) if example.answer is None else len(prompt)
        if first < len(prompt) + len(answer):
            texts.append((torch.tensor([[*prompt, *answer]]), first))
    if len(texts) < 2:
        raise InvalidInput("prompts", len(texts), "give at least two texts that are longer than their context")
    return texts


@torch.inference_mode()
def acceptance_rates(
    models: Sequence[PreTrainedModel], texts: Sequence[tuple[Tensor, int]], params: DecodingParams
) -> list[Floats]:
    """Of each text, how likely a token drafted for each position that counts is to be accepted: float64 [positions].

    Args:
        models: target and auxiliary.
        texts: see `texts_to_read`.
        params: whose filters both models' logits pass.
    """
    params = replace(params, method="speculative")
    vocab = min(model.config.vocab_size for model in models)  # some are padded
    rates = []
    for ids, first in tqdm(texts, "reading", unit="text", file=sys.stderr, disable=None):
        logits = [model(input_ids=ids).logits[0, first - 1 : -1, :vocab].float() for model in models]
        rates.append(np.minimum(*(filtered(own, params) for own in logits)).sum(1))
    return rates


def expected_passes(rates: Floats, draft_len: int) -> float:
    """Expected blocks of a text, from the rate at which a token drafted for each position is accepted, [positions]."""
    count = len(rates)
    passes = np.zeros(count + draft_len + 2)
    for at in range(count - 1, -1, -1):
        reached, passes[at] = 1.0, 1.0
        for step, rate in enumerate(rates[at : at + draft_len]):
            passes[at] += reached * (1 - rate) * passes[at + step + 1]
            reached *= rate
        passes[at] += reached * passes[at + draft_len + 1]
    return float(passes[0])
