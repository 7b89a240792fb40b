"""A mock engine with a real cache: its logits are a hash of exactly the (token, position) pairs a query attends to.

Whatever goes wrong with columns, masks, rows or positions changes the hash and so the tokens. All arithmetic before the
last step is on integers, so a row's logits are the same bits in any batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tokenizers import Tokenizer, decoders, models
from torch import Tensor

from engines import Engine, EngineSpec, Step
from engines.pages import PageTable

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

    def __init__(self, spec: EngineSpec, noise: float, scratch: int = 0) -> None:
        super().__init__(spec, scratch=scratch)
        self.noise = noise
        self.faults: list[Exception | int | None] = []

    def step(self, step: Step) -> Tensor:
        fault = self.faults.pop() if self.faults else None
        if isinstance(fault, Exception):
            for row, start in enumerate(step.write_at.tolist()):  # it may leave anything behind where it writes
                self.kv[0, :, step.first_row + row, :, start:] = torch.nan
            raise fault
        assert int(step.write_at.max()) + step.tokens.shape[1] <= self.spec.capacity, "written beyond the row"
        logits = self.run(step)
        if isinstance(fault, int) and len(logits):
            logits[fault % len(logits)] = torch.nan
        return logits

    def run(self, step: Step) -> Tensor:
        """The step's work."""
        rows, steps = step.tokens.shape
        cache = self.kv[0, 0, step.first_row : step.first_row + rows, 0]
        columns = step.write_at[:, None] + torch.arange(steps)
        pairs = torch.stack([step.tokens, step.positions], -1).float()
        cache.scatter_(1, columns[:, :, None].expand_as(pairs), pairs)
        seen = step.mask[:, 0].index_select(1, step.keep)
        held = cache[:, : seen.shape[2]]
        poisoned = held.isnan().any(-1).any(-1)  # NaN x 0 is NaN: a masked column poisons its row, as in attention
        token, position = held.nan_to_num().long().unbind(-1)
        mixed = ((token + 1) * 7919 + (position + 1) * 104_729 + (token + 3) * (position + 5) * 31) % PRIME
        hashed = (seen * mixed[:, None]).sum(-1) % PRIME
        vocab = torch.arange(VOCAB) + 1
        logits = _spread(hashed, vocab, 1) + self.noise * _spread(hashed, vocab, 2)
        return logits.masked_fill(poisoned[:, None, None], torch.nan)


class PagedMock(MockEngine):
    """The same, whose rows may fill a pool of pages between them: it only counts them, and has none to spare."""

    def __init__(self, spec: EngineSpec, noise: float, pages: int) -> None:
        super().__init__(spec, noise)
        self.pages, self.table = pages, PageTable(spec.rows, spec.capacity, 32, pages)

    def step(self, step: Step) -> Tensor:
        for row, start in enumerate(step.write_at.tolist()):
            self.table.make_writable(step.first_row + row, start, start + step.tokens.shape[1])
        return super().step(step)

    def fits(self, spans: Sequence[tuple[int, int]]) -> bool:
        return sum(self.table.missing(row, *span) for row, span in enumerate(spans)) <= self.table.pages.free

    def free_row(self, row: int) -> None:
        self.table.cut(row, 0)

    def copy_row(self, source: int, to: int, columns: int) -> None:
        super().copy_row(source, to, columns)
        self.table.adopt(to, 0, self.table.pages_of(source, 0, columns))


class CapturableMock(MockEngine):
    """The same, without a look at what it is given: its step can be part of a CUDA graph."""

    capturable = True

    def step(self, step: Step) -> Tensor:
        return self.run(step)


def _spread(hashed: Tensor, vocab: Tensor, salt: int) -> Tensor:
    """Numbers from 0 to 5 that look independent, as good as never equal: [R, N, V]."""
    mixed = (hashed[:, :, None] + 17) * (vocab * (2 * salt + 1) + vocab * vocab * 7561) * 65_537
    return (mixed % 16_777_213).float() * (5 / 2**24)
