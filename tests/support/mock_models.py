"""Mock models, which are functions of the tokens so far, and blocks of requests whose engines compute them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engines.base import Engine, EngineSpec, Step
from engines.cache.columns import ColumnCache
from mtad.errors import InvalidInput
from mtad.params import DecodingParams
from runtime.constraints.constraint import Constraint
from runtime.decoder.block import Block, BlockInput
from runtime.decoder.engine_role import EngineRole
from runtime.decoder.host_runner import HostRunner

Tokens = tuple[int, ...]
Model = Callable[[Tokens], npt.NDArray[np.float32]]

BEFORE: Tokens = (0, 0)
"""What an engine holds before a text, which the models do not see: a block needs two committed tokens."""


class Pair(NamedTuple):
    """Two mock models of one vocabulary."""

    target: Model
    auxiliary: Model


def mock_pair(seed: int, vocab: int, peak: float, noise: float) -> Pair:
    """Random logits per prefix, `peak` their scale; the auxiliary's are the target's plus `noise` times as much."""

    @cache
    def logits(tokens: Tokens) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        generator = np.random.default_rng([seed, *tokens])
        target, other = generator.normal(scale=peak, size=(2, vocab))
        return target.astype(np.float32), (target + noise * other).astype(np.float32)

    return Pair(lambda tokens: logits(tokens)[0], lambda tokens: logits(tokens)[1])


def sure_pair(seed: int, vocab: int, gap: float) -> Pair:
    """An auxiliary whose logits put one token, which one depends on the prefix, `gap` above all others."""
    target, near = mock_pair(seed, vocab, peak=1.0, noise=1.0)

    @cache
    def sure(tokens: Tokens) -> npt.NDArray[np.float32]:
        logits = near(tokens).copy()
        logits[(2 * len(tokens) + sum(tokens)) % vocab] = logits.max() + gap
        return logits

    return Pair(target, sure)


class Row(NamedTuple):
    """One request's part of a block; `key` is its seed and the block's index."""

    pair: Pair
    params: DecodingParams
    text: Tokens
    key: tuple[int, int]
    constraint: Constraint | None = None


class TextEngine(Engine):
    """An engine whose rows each have a model of their own. Its cache holds tokens, so what a query sees is a text."""

    def __init__(self, models: Sequence[Model], texts: Sequence[Tokens], vocab: int, capacity: int) -> None:
        spec = EngineSpec("Text", 1, 1, 1, vocab, "float32", len(texts), capacity, (), "torch", "", {})
        super().__init__(spec, ColumnCache(spec))  # which is not used: what is held is written anew for each block
        self._models, self._held = models, np.zeros((len(texts), capacity), np.int64)
        for held, text in zip(self._held, texts, strict=True):
            held[: len(BEFORE + text)] = BEFORE + text

    def step(self, step: Step) -> Tensor:
        tokens, found = step.tokens.numpy(), []
        for held, model, new, start, mask in zip(
            self._held, self._models, tokens, step.write_at.tolist(), step.mask[:, 0], strict=True
        ):
            held[start : start + len(new)] = new
            seen = mask.index_select(0, step.keep).numpy()
            found.append([model(tuple(held[: len(own)][own].tolist()[len(BEFORE) :])) for own in seen])
        return torch.from_numpy(np.array(found))


def run_block(rows: Sequence[Row], vocab: int, eos: Sequence[int] = ()) -> Block:
    """A block of these requests on the host."""
    texts = [row.text for row in rows]
    capacity = 64 + max(len(row.text) + len(BEFORE) + sum(row.params.widths) for row in rows)
    roles = [
        EngineRole(TextEngine([row.pair[which] for row in rows], texts, vocab, capacity), vocab) for which in (1, 0)
    ]
    given = BlockInput(
        [row.params for row in rows],
        [(BEFORE + text)[-2:] for text in texts],  # type: ignore[misc]
        [len(BEFORE + text) for text in texts],
        [row.key for row in rows],
        [row.constraint for row in rows],
        [True for _ in rows],
    )
    return HostRunner(roles[0], roles[1], eos).run(given)


@dataclass
class Running:
    """A request in flight over a mock pair."""

    pair: Pair
    params: DecodingParams
    seed: int
    constraint: Constraint | None = None
    prompt: Tokens = ()
    text: list[int] = field(default_factory=list)
    done: bool = False
    failed: InvalidInput | None = None

    def commit(self, emitted: list[int], eos: Sequence[int]) -> None:
        """What a block gives, as far as the text goes on."""
        assert self.params.max_tokens is not None
        emitted = emitted[: self.params.max_tokens - len(self.text)]
        ends = [at + 1 for at, token in enumerate(emitted) if token in eos and not self.params.ignore_eos]
        emitted = emitted[: ends[0]] if ends else emitted
        self.text += emitted
        self.done = bool(ends) or len(self.text) >= self.params.max_tokens
        if self.constraint is not None:
            try:
                self.constraint.advance(emitted)
            except InvalidInput as error:
                self.done, self.failed = True, error


def finish(running: Sequence[Running], vocab: int, eos: Sequence[int]) -> None:
    """Run requests to their end, in one batch that shrinks as they finish."""
    for index in itertools.count():
        waiting = [one for one in running if not one.done]
        if not waiting:
            return
        rows = [Row(r.pair, r.params, (*r.prompt, *r.text), (r.seed, index), r.constraint) for r in waiting]
        for one, tokens in zip(waiting, run_block(rows, vocab, eos).tokens, strict=True):
            one.commit(tokens, eos)


def generate(
    pair: Pair, params: Sequence[DecodingParams], vocab: int, length: int, eos: Sequence[int] = ()
) -> list[Tokens]:
    """The first `length` tokens of one request per entry of `params`, block by block; seeds are the indices."""
    running = [Running(pair, replace(own, max_tokens=length), seed) for seed, own in enumerate(params)]
    finish(running, vocab, eos)
    return [tuple(one.text) for one in running]
