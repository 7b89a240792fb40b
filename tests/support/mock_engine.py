"""A mock engine with a real cache: its logits are a hash of exactly the (token, position) pairs a query attends to.

Whatever goes wrong with columns, masks, rows or positions changes the hash and so the tokens. All arithmetic before the
last step is on integers, so a row's logits are the same bits in any batch.
"""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, decoders, models
from torch import Tensor

from engines.base import Engine, EngineSpec, Step
from engines.cache.base import KvCache
from engines.cache.columns import ColumnCache, index_columns
from engines.cache.paged import PageCache, gathered, slots
from tests.support.steps import change

VOCAB = 12
EOS = 0
PRIME = 1_000_003


def mock_spec(rows: int, capacity: int = 128) -> EngineSpec:
    return EngineSpec("Mock", 1, 1, 2, VOCAB, "float32", rows, capacity, (EOS,), "torch", "", {})


def mock_tokenizer() -> Tokenizer:
    """Token i is the i-th letter; no merges."""
    tokenizer = Tokenizer(models.WordLevel({chr(ord("a") + i): i for i in range(VOCAB)}, unk_token="a"))
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


class MockEngine(Engine):
    """Stores token and position as key; `noise` moves the logits away from those of noise 0.

    Attributes:
        faults: what the next steps do instead of their work: None for nothing unusual, an exception to raise, or the
            index of a row whose logits become NaN.
    """

    def __init__(self, spec: EngineSpec, noise: float, cache: KvCache | None = None) -> None:
        super().__init__(spec, cache or ColumnCache(spec))
        self.noise = noise
        self.faults: list[Exception | int | None] = []

    def step(self, step: Step) -> Tensor:
        fault = self.faults.pop() if self.faults else None
        if isinstance(fault, Exception):
            for row, start in enumerate(step.write_at.tolist(), step.first_row):
                change(self, row, slice(start, None), spoiled)  # it may leave anything where it writes
            raise fault
        assert int(step.write_at.max()) + step.tokens.shape[1] <= self.spec.capacity, "written beyond the row"
        logits = self.run(step)
        if isinstance(fault, int) and len(logits):
            logits[fault % len(logits)] = torch.nan
        return logits

    def run(self, step: Step) -> Tensor:
        """The step's work."""
        columns = step.write_at[:, None] + torch.arange(step.tokens.shape[1])
        pairs = torch.stack([step.tokens, step.positions], -1).float()
        seen = step.mask[:, 0].index_select(1, step.keep)
        held = self.exchange(slice(step.first_row, step.first_row + len(pairs)), columns, pairs)[:, : seen.shape[2]]
        poisoned = held.isnan().any(-1).any(-1)  # NaN x 0 is NaN: a masked column poisons its row, as in attention
        token, position = held.nan_to_num().long().unbind(-1)
        mixed = ((token + 1) * 7919 + (position + 1) * 104_729 + (token + 3) * (position + 5) * 31) % PRIME
        hashed = (seen * mixed[:, None]).sum(-1) % PRIME
        vocab = torch.arange(VOCAB) + 1
        logits = _spread(hashed, vocab, 1) + self.noise * _spread(hashed, vocab, 2)
        return logits.masked_fill(poisoned[:, None, None], torch.nan)

    def exchange(self, rows: slice, columns: Tensor, pairs: Tensor) -> Tensor:
        """Write pairs [R, S, 2] to columns [R, S] of rows; returns what all columns hold, [R, L, 2]."""
        assert isinstance(self.cache, ColumnCache)
        cache = self.cache.kv[0, 0, rows, 0]
        return cache.scatter_(1, columns[:, :, None].expand_as(pairs), pairs)


class DeviceColumns(ColumnCache):
    """Columns as on a device: padded rows may write behind them, and what is kept is moved by torch's indexing."""

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        self.kv = torch.nn.functional.pad(self.kv, (0, 0, 0, 17))

    def keep(self, source: Tensor, to: Tensor) -> None:
        index_columns(self.kv, source, to)


class CapturableMock(MockEngine):
    """The same, without a look at what it is given: its step can be part of a CUDA graph."""

    capturable = True

    def __init__(self, spec: EngineSpec, noise: float) -> None:
        super().__init__(spec, noise, DeviceColumns(spec))

    def step(self, step: Step) -> Tensor:
        return self.run(step)


class PagedMock(MockEngine):
    """The same, whose cache is that of the torch engine: a pool of pages.

    Args:
        pages: of the pool; 0 for all that rows can fill.
    """

    capturable = True

    cache: PageCache

    def __init__(self, spec: EngineSpec, noise: float, pages: int = 0) -> None:
        super().__init__(spec, noise, PageCache(spec))
        if pages:
            self.cache.allocate_pages(pages)

    def step(self, step: Step) -> Tensor:
        self.cache.reserve(step.spans, step.first_row)
        return self.enqueue(step)

    def enqueue(self, step: Step) -> Tensor:
        return super().step(step) if self.faults else self.run(step)

    def exchange(self, rows: slice, columns: Tensor, pairs: Tensor) -> Tensor:
        page_table, (pool,) = self.cache.page_table[rows], self.cache.kv[0, 0]
        pool[slots(page_table, columns)] = pairs
        return gathered(pool[None], page_table[:, :-1])[:, 0]


def spoiled(values: Tensor) -> Tensor:
    return torch.full_like(values, torch.nan)


def _spread(hashed: Tensor, vocab: Tensor, salt: int) -> Tensor:
    """Numbers from 0 to 5 that look independent, as good as never equal: [R, N, V]."""
    mixed = (hashed[:, :, None] + 17) * (vocab * (2 * salt + 1) + vocab * vocab * 7561) * 65_537
    return (mixed % 16_777_213).float() * (5 / 2**24)
