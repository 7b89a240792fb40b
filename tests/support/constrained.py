"""Requests under constraints over the mock models of `tests.support.mock_models`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer, decoders, models

from mtad.params import DecodingParams
from runtime.constraints.constraint import Constraint, ConstraintFailed
from tests.support import mock_models
from tests.support.mock_models import Pair, Row, Tokens

FREE = DecodingParams(temperature=1.0, top_k=0, top_p=1.0, draft_len=3, beam_width=3, max_tokens=200)
Asked = dict[str, Any]


def letters(text: str) -> Tokenizer:
    """A tokenizer of single characters; id 0 ends a text, id n is the n-th character."""
    vocabulary = {"<eos>": 0, **{letter: index + 1 for index, letter in enumerate(text)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    return tokenizer


@dataclass
class Running:
    """A request in flight over a mock pair."""

    pair: Pair
    params: DecodingParams
    seed: int
    constraint: Constraint | None
    prompt: Tokens = ()
    text: list[int] = field(default_factory=list)
    done: bool = False
    failed: ConstraintFailed | None = None


def run_block(running: Sequence[Running], vocab: int, eos: Sequence[int], index: int) -> None:
    """One block, and its commit."""
    rows = [Row(r.pair, r.params, (*r.prompt, *r.text), (r.seed, index), r.constraint) for r in running]
    for request, emitted in zip(running, mock_models.run_block(rows, vocab, eos).tokens, strict=True):
        emitted = emitted[: request.params.max_tokens - len(request.text)]
        ends = [at for at, token in enumerate(emitted) if token in eos]
        emitted = emitted[: ends[0] + 1] if ends else emitted
        request.text += emitted
        request.done = bool(ends) or len(request.text) >= request.params.max_tokens
        if request.constraint is not None:
            try:
                request.constraint.advance(emitted)
            except ConstraintFailed as error:
                request.done, request.failed = True, error


def finish(running: Sequence[Running], vocab: int, eos: Sequence[int]) -> None:
    """Run requests to their end, in one batch that shrinks as they finish."""
    for index in itertools.count():
        waiting = [r for r in running if not r.done]
        if not waiting:
            return
        run_block(waiting, vocab, eos, index)
