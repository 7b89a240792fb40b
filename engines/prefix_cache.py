"""Keys and values of earlier prompts, kept so that a prompt that starts alike need not compute them again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch

from engines.base import KV_PAGE, Engine

Key = tuple[int, tuple[int, ...]]
"""Slot of the preceding page (for none, -1 - salt), and the page's own tokens: together, all tokens from the start."""


class PrefixCache:
    """Pages of 64 tokens of one engine's cache, found by all tokens from the start; the least recently used go first.

    It belongs to one engine in one process, so it can never serve another pair. Only prompts are kept: their keys and
    values are those of a plain forward pass, to the bit on engines whose logits do not depend on how a prompt is cut
    (ONNX Runtime on CPUs); those of decoded tokens were computed inside a tree.

    Args:
        engine: one whose `kv` holds columns by row.
        tokens: tokens to keep at most; rounded down to pages; allocated at once.
    """

    def __init__(self, engine: Engine, tokens: int) -> None:
        kv = engine.kv
        layers, pair, _, heads, _, dim = kv.shape
        self._engine = engine
        self._pool = torch.zeros(tokens // KV_PAGE, layers, pair, heads, KV_PAGE, dim, dtype=kv.dtype, device=kv.device)
        self._begin(len(self._pool), self._pool.nbytes)

    def _begin(self, size: int, count: int) -> None:
        """Begin with nothing kept in a store of `size` pages, `count` bytes."""
        self._size, self.bytes = size, count
        self._free = list(range(size))
        # a page is touched before the one it follows, so the least recently used one never has a follower
        self._slots: OrderedDict[Key, int] = OrderedDict()

    def restore(self, row: int, tokens: Sequence[int], start: int = 0, salt: int = 0) -> int:
        """Write what is known of `tokens` into `row`; returns the columns that are right, from 0.

        Columns before `start` are right already and are left alone. What was stored with another salt, from 0 to
        2**63 - 2, is not found.
        """
        chain = self._find(tokens, salt)
        first = start // KV_PAGE
        if slots := [self._slots[key] for key in chain[first:]]:
            self._load(slots, row, first, tokens[first * KV_PAGE : len(chain) * KV_PAGE])
        return max(start, len(chain) * KV_PAGE)

    def store(self, row: int, tokens: Sequence[int], salt: int = 0) -> None:
        """Keep the whole pages of `tokens`, whose keys and values are columns 0 .. len - 1 of `row`."""
        chain = self._find(tokens, salt)
        for number in range(len(chain), min(len(tokens) // KV_PAGE, self._size)):
            columns = slice(number * KV_PAGE, (number + 1) * KV_PAGE)
            key = self._slots[chain[-1]] if chain else -1 - salt, tuple(tokens[columns])
            slot = self._free.pop() if self._free else self._slots.popitem(last=False)[1]
            self._keep(slot, row, number)
            self._slots[key] = slot
            chain.append(key)
        self._touch(chain)

    def _load(self, slots: Sequence[int], row: int, first: int, tokens: Sequence[int]) -> None:
        """Write pages of a row from page `first` on, the columns of these tokens, from the store."""
        self._engine.reserve([(first * KV_PAGE, first * KV_PAGE + len(tokens))], row)
        for number, slot in enumerate(slots, first):
            self._engine.kv[:, :, row, :, number * KV_PAGE : (number + 1) * KV_PAGE] = self._pool[slot]

    def _keep(self, slot: int, row: int, number: int) -> None:
        """Store page `number` of a row."""
        self._pool[slot] = self._engine.kv[:, :, row, :, number * KV_PAGE : (number + 1) * KV_PAGE]

    def _find(self, tokens: Sequence[int], salt: int) -> list[Key]:
        """The longest known chain of pages, marked as used."""
        chain: list[Key] = []
        for start in range(0, len(tokens) - KV_PAGE + 1, KV_PAGE):
            key = self._slots[chain[-1]] if chain else -1 - salt, tuple(tokens[start : start + KV_PAGE])
            if key not in self._slots:
                break
            chain.append(key)
        self._touch(chain)
        return chain

    def _touch(self, chain: Sequence[Key]) -> None:
        for key in reversed(chain):
            self._slots.move_to_end(key)

    @property
    def fingerprint(self) -> bytes:
        """What is kept, in which slots, and what goes first; equal of two caches if all of it is."""
        return repr(list(self._slots.items())).encode()

    def check_integrity(self) -> None:
        """Invariants of the bookkeeping; raises AssertionError."""
        used = list(self._slots.values())
        assert sorted(used + self._free) == list(range(self._size)), "a page is lost or in two places"
        order = {slot: age for age, slot in enumerate(used)}
        for (parent, tokens), slot in self._slots.items():
            assert len(tokens) == KV_PAGE
            assert parent < 0 or order[parent] > order[slot], "a page would outlive the one it follows"


def common_prefix(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Leading tokens two prompts share."""
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
