"""Keys and values of earlier prompts, kept so that a prompt that starts alike need not compute them again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from engines.base import KV_PAGE

Key = tuple[int, tuple[int, ...]]
"""Slot of the preceding page (for none, -1 - salt), and the page's own tokens: together, all tokens from the start."""


class PrefixCache:
    """Stretches of 64 columns of one cache, found by all tokens from the start; the least recently used go first.

    It belongs to one engine in one process, so it can never serve another pair. Only prompts are kept: their keys and
    values are those of a plain forward pass, to the bit on engines whose logits do not depend on how a prompt is cut
    (ONNX Runtime on CPUs); those of decoded tokens were computed inside a tree.

    Args:
        slots: stretches to keep at most.
    """

    def __init__(self, slots: int) -> None:
        self._count, self._free = slots, list(range(slots))
        # a stretch is touched before the one it follows, so the least recently used one never has a follower
        self._slots: OrderedDict[Key, int] = OrderedDict()

    def load(self, slots: Sequence[int], row: int, start: int, tokens: Sequence[int]) -> None:
        """Let columns `start` .. of a row, those of these tokens, be what the slots hold."""

    def save(self, slot: int, row: int, start: int) -> None:
        """Let a slot hold 64 columns of a row."""

    def restore(self, row: int, tokens: Sequence[int], start: int = 0, salt: int = 0) -> int:
        """Write what is known of `tokens` into `row`; returns the columns that are right, from 0.

        Columns before `start` hold what they should. What has another salt, from 0 to 2**63 - 2, is not found.
        """
        chain = self._find(tokens, salt)
        first = start // KV_PAGE
        if slots := [self._slots[key] for key in chain[first:]]:
            self.load(slots, row, first * KV_PAGE, tokens[first * KV_PAGE : len(chain) * KV_PAGE])
        return max(start, len(chain) * KV_PAGE)

    def stored(self, tokens: Sequence[int], salt: int = 0) -> int:
        """Leading columns of `tokens` that `restore` would write."""
        return len(self._find(tokens, salt)) * KV_PAGE

    def store(self, row: int, tokens: Sequence[int], salt: int = 0) -> None:
        """Keep the whole pages of `tokens`, whose keys and values are columns 0 .. len - 1 of `row`."""
        chain = self._find(tokens, salt)
        for number in range(len(chain), min(len(tokens) // KV_PAGE, self._count)):
            columns = slice(number * KV_PAGE, (number + 1) * KV_PAGE)
            key = self._slots[chain[-1]] if chain else -1 - salt, tuple(tokens[columns])
            slot = self._free.pop() if self._free else self._slots.popitem(last=False)[1]
            try:
                self.save(slot, row, columns.start)
            except BaseException:
                self._free.append(slot)
                self._touch(chain)  # no page outlives the one it follows
                raise
            self._slots[key] = slot
            chain.append(key)
        self._touch(chain)

    def _find(self, tokens: Sequence[int], salt: int) -> list[Key]:
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


def common_prefix(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Leading tokens two prompts share."""
    length = min(len(ours), len(theirs))
    pages = range(0, length, KV_PAGE)
    page = next((at for at in pages if ours[at : at + KV_PAGE] != theirs[at : at + KV_PAGE]), length)
    return next((at for at in range(page, length) if ours[at] != theirs[at]), length)
