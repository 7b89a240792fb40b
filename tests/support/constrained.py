"""Requests under constraints over the mock models of `tests.support.mock_models`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer, decoders, models

from mtad.draft.live import Beams
from mtad.params import DecodingParams
from runtime.constraints.adjust import Constraints
from runtime.constraints.constraint import Constraint, ConstraintFailed
from tests.support import cases
from tests.support.mock_models import Pair
from tests.support.reference.request import Tokens

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
    beams: Beams = field(default_factory=list)
    done: bool = False
    failed: ConstraintFailed | None = None


def run_block(running: Sequence[Running], vocab: int, eos: Sequence[int], index: int) -> None:
    """One block, the way the decoding loop does it, and its commit; batch noise is keyed by each request's seed."""
    members = [cases.Case(r.pair, r.params, (*r.prompt, *r.text), (r.seed, index), tuple(r.beams)) for r in running]
    constraints = Constraints.of([r.constraint for r in running])
    accepted = cases.run_block(members, vocab, eos, constraints).accepted
    kept = accepted.live.beams() if accepted.live else [[]] * len(running)
    for row, request in enumerate(running):
        request.beams = kept[row] if request.params.spec.live else []
        emitted = accepted.tokens[row, : int(accepted.length[row]) + 1].tolist()
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
