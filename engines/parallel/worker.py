"""One rank's part of a divided target, and what is done to it. The same code on rank 0 and on the others."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from engines.base import Step
from engines.buffers import size_of, views
from engines.parallel.process_group import ProcessRanks
from engines.prefix_cache import PrefixCache
from engines.pytorch.engine import TorchEngine

Tensors = tuple[Tensor, ...]

WORDS = 8
"""Integers in a command: its number, an `Op`, what it is about."""


class Op(IntEnum):
    """What rank 0 tells the others to do. Behind it: what the command says; what follows it."""

    STOP = 0
    STEP = 1  # rows, steps, length, kept, first_row; the step
    MOVE = 2  # rows, columns per row; from where, to where
    COPY = 3  # source, to, columns
    CLEAR = 4  # row
    SAVE = 5
    LOAD = 6
    PREFIXES = 7  # tokens to keep
    STORE = 8  # row, 0, count, salt; tokens
    RESTORE = 9  # row, start, count, salt; tokens
    CHECK = 10


class Worker:
    """A rank with its part of the target.

    Args:
        engine: this rank's.
        ranks: all.

    Attributes:
        number: of the last command.
        prefixes: kept prefixes of this part; none before `Op.PREFIXES`.
    """

    def __init__(self, engine: TorchEngine, ranks: ProcessRanks) -> None:
        self.engine, self.ranks, self.number = engine, ranks, 0
        self.prefixes = PrefixCache(engine.kv, 0)
        self._saved: list[Tensor] = []
        self._buffer = torch.empty(0, dtype=torch.uint8, device=engine.kv.device)
        self._seen = torch.zeros((), dtype=torch.int64, device=engine.kv.device)

    def send_command(self, op: Op, about: Sequence[int] = (), tokens: Sequence[int] = ()) -> None:
        """Rank 0: the others are to do this."""
        self.number += 1
        words = [self.number, op, *about]
        self.ranks.broadcast_words(torch.tensor(words + [0] * (WORDS - len(words))))
        if tokens:
            self.ranks.broadcast_words(torch.tensor(tokens))

    def recv_command(self) -> tuple[Op, list[int], list[int]]:
        """The others: what to do next, what it is about, and the tokens that belong to it.

        Raises:
            RuntimeError: it is not the next command.
        """
        words = torch.zeros(WORDS, dtype=torch.int64)
        self.ranks.broadcast_words(words)
        number, op, *about = words.tolist()
        self.number += 1
        if number != self.number:
            raise RuntimeError(f"fell out of step: command {self.number} was due, and {number} came")
        tokens = torch.zeros(about[2] if op in (Op.STORE, Op.RESTORE) else 0, dtype=torch.int64)
        if len(tokens):
            self.ranks.broadcast_words(tokens)
        return Op(op), about, tokens.tolist()

    def run(self, op: Op, about: Sequence[int], tokens: Sequence[int] = (), given: Tensors | None = None) -> Any:
        """Run a command on this rank's part; rank 0 gives the tensors that follow it.

        Returns:
            what the command gives on rank 0: logits of a step, columns of a restored prefix, fingerprints of all ranks.
        """
        match op:
            case Op.STEP:
                ids, positions, write_at, keep, mask = self.broadcast(step_shapes(*about[:4]), given)
                return self.engine.step(Step(ids, positions, write_at, mask, keep, first_row=about[4]))
            case Op.MOVE:
                self.engine.move_columns(*self.broadcast(move_shapes(*about[:2]), given))
            case Op.COPY:
                self.engine.copy_row(*about[:3])
            case Op.CLEAR:
                self.engine.clear_row(*about[:2])
            case Op.SAVE:
                self._saved.append(self.engine.kv.clone())
            case Op.LOAD:
                self.engine.kv.copy_(self._saved.pop())
            case Op.PREFIXES:
                self.prefixes = PrefixCache(self.engine.kv, about[0])
            case Op.STORE:
                self.prefixes.store(about[0], tokens, about[3])
            case Op.RESTORE:
                return self.prefixes.restore(about[0], tokens, about[1], about[3])
            case Op.CHECK:
                return self.ranks.compare(self.state())
        return None

    def broadcast(self, shapes: Tensors, given: Tensors | None = None) -> Tensors:
        """Tensors of rank 0 on every rank, in one exchange of device memory; valid until the next.

        Args:
            shapes: tensors of these shapes and types.
            given: what they hold; on rank 0.
        """
        size = size_of(shapes)
        if len(self._buffer) < size:
            self._buffer = torch.zeros(size, dtype=torch.uint8, device=self._buffer.device)
        memory = self._buffer[:size]
        found: Tensors = views(shapes, memory)
        for view, tensor in zip(found, given or (), strict=given is not None):
            view.copy_(tensor)
        self.ranks.broadcast(memory)
        for view in found:
            if view.dtype == torch.int64:
                self._seen.mul_(1_000_003).add_(view.sum())  # a fingerprint; that it wraps around does not matter
        return found

    def state(self) -> list[int]:
        """A fingerprint of all that was done: equal on all ranks, or one has fallen out of step."""
        return [self.number, int(self._seen), crc32(self.prefixes.fingerprint)]


def step_shapes(rows: int, steps: int, length: int, kept: int) -> Tensors:
    """Tokens, positions, write_at, keep and mask of a step."""
    sizes = (rows, steps), (rows, steps), (rows,), (kept,)
    integers = (torch.empty(size, dtype=torch.int64, device="meta") for size in sizes)
    return (*integers, torch.empty(rows, 1, steps, length, dtype=torch.bool, device="meta"))


def move_shapes(rows: int, columns: int) -> Tensors:
    """Where columns are moved from, and to."""
    return tuple(torch.empty(rows, columns, dtype=torch.int64, device="meta") for _ in range(2))
