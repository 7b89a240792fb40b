"""A pair of models that are tables: random logits after every text, over a vocabulary small enough to enumerate."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engines import Engine, EngineSpec, Step
from engines.cache.columns import ColumnCache
from mtad.params import DecodingParams
from runtime.decoder.block import BlockInput
from runtime.decoder.engine_role import EngineRole
from runtime.decoder.host_runner import HostRunner

Tokens = tuple[int, ...]
Floats = npt.NDArray[np.float32]

PROMPT: Tokens = (0, 0)
CAPACITY = 64


class TablePair:
    """The two models.

    Args:
        seed: of the logits.
        vocab: tokens of the vocabulary.
        peak: scale of the target's logits.
        noise: the auxiliary's are the target's plus so many times others of the same scale.
    """

    def __init__(self, seed: int, vocab: int, peak: float, noise: float) -> None:
        @cache
        def logits(text: Tokens) -> tuple[Floats, Floats]:
            target, other = np.random.default_rng([seed, *text]).normal(scale=peak, size=(2, vocab))
            return target.astype(np.float32), (target + noise * other).astype(np.float32)

        self.vocab, self.logits = vocab, logits

    def generate(self, params: Sequence[DecodingParams], length: int) -> list[Tokens]:
        """The first `length` tokens of one request per entry of `params`; seeds are the indices."""
        engines = [TableEngine(self, which, len(params)) for which in (0, 1)]
        target, auxiliary = (EngineRole(engine, self.vocab) for engine in engines)
        runner, texts, block = HostRunner(auxiliary, target, ()), [PROMPT for _ in params], 0
        while waiting := [at for at, text in enumerate(texts) if len(text) < len(PROMPT) + length]:
            own = [texts[at] for at in waiting]
            for engine in engines:
                engine.hold(own)
            given = BlockInput(
                [params[at] for at in waiting],
                [(text[-2], text[-1]) for text in own],
                [len(text) for text in own],
                [(at, block) for at in waiting],
                [None for _ in waiting],
                [True for _ in waiting],
            )
            for at, tokens in zip(waiting, runner.run(given).tokens, strict=True):
                texts[at] += tuple(tokens)
            block += 1
        return [text[len(PROMPT) :][:length] for text in texts]


class TableEngine(Engine):
    """One of the two as an engine. Its cache holds tokens, so what a query sees is a text, in order of the columns.

    Args:
        which: 0 for the target, 1 for the auxiliary.
    """

    def __init__(self, pair: TablePair, which: int, rows: int) -> None:
        spec = EngineSpec("Table", 1, 1, 1, pair.vocab, "float32", rows, CAPACITY, (), "torch", "", {})
        self._columns = ColumnCache(spec)
        super().__init__(spec, self._columns)
        self._pair, self._which = pair, which

    def hold(self, texts: Sequence[Tokens]) -> None:
        """Have the first rows hold these texts."""
        for row, text in enumerate(texts):
            self._columns.kv[0, 0, row, 0, : len(text), 0] = torch.tensor(text)

    def step(self, step: Step) -> Tensor:
        held, count = self._columns.kv[0, 0, step.first_row :, 0, :, 0], step.tokens.shape[1]
        for row, start in enumerate(step.write_at.tolist()):
            held[row, start : start + count] = step.tokens[row].float()
        tokens, seen = held.int().numpy(), step.mask[:, 0].index_select(1, step.keep).numpy()
        found = [
            [self._pair.logits(tuple(own[: len(one)][one].tolist()[len(PROMPT) :]))[self._which] for one in queries]
            for own, queries in zip(tokens, seen, strict=False)
        ]
        return torch.from_numpy(np.array(found))
