"""Two vocabularies: which tokens are in both, how one spells the other's, and where a text lies in a cache then."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from engines.cache.page_table import Ints
from mtad.errors import InvalidInput


@dataclass(frozen=True, eq=False)
class Translation:
    """The tokens of a target in those of an auxiliary, each by itself: what one becomes does not depend on others.

    Attributes:
        pieces: int64 [..], the auxiliary's tokens that spell each of the target's, one token's behind another's.
        ends: int64 [V], where in `pieces` those of each token end.
        sizes: int64 [V], how many they are, at least 1.
        drafted: int64 [V], the auxiliary's token that stands for the same; -1 where it has none.
        lead: what a text of the auxiliary begins with and one of the target does not.
    """

    pieces: Ints
    ends: Ints
    sizes: Ints
    drafted: Ints
    lead: tuple[int, ...]

    @classmethod
    def of(cls, target: PreTrainedTokenizerBase, auxiliary: PreTrainedTokenizerBase) -> Translation:
        """Of two tokenizers: tokens are the same where their `contents` are, or their roles."""
        ours, theirs = contents(target), contents(auxiliary)
        known = {content: token for token, content in theirs.items()}
        for role in ("eos_token_id", "bos_token_id"):
            one, other = getattr(target, role), getattr(auxiliary, role)
            if one is not None and other is not None and ours[one] not in known:
                ours[one] = theirs[other]
        if (end := target.eos_token_id) is not None:
            ours[end] = ours.pop(end)  # of tokens with one content, the last one is drafted
        same = {token: known[content] for content, token in {c: t for t, c in ours.items()}.items() if content in known}
        drafted = np.full(max(ours) + 1, -1)
        drafted[list(same)] = list(same.values())
        longest, rest = max(map(len, known)), [auxiliary.eos_token_id or 0]
        each = [rest] * len(drafted)
        for token, content in ours.items():
            raw = content.encode() if isinstance(content, str) else content
            each[token] = [known[content]] if content in known else _spell(raw, known, longest) or rest
        sizes = np.array(list(map(len, each)))
        lead = [] if target("").input_ids else auxiliary("").input_ids[:1]
        return cls(np.concatenate(each), sizes.cumsum(), sizes, drafted, tuple(lead))

    def spell(self, tokens: Ints) -> Ints:
        """The auxiliary's tokens that spell tokens of the target, without the lead."""
        sizes = self.sizes[tokens]
        found: Ints = self.pieces[np.repeat(self.ends[tokens] - sizes.cumsum(), sizes) + np.arange(sizes.sum())]
        return found


class Text:
    """A row's text in the target's tokens, and where the auxiliary's cache has it: from `first` on, behind the lead.

    Attributes:
        tokens: int64 [capacity], committed ones, and behind them the nodes of the latest draft.
        begins: int64 [capacity + 1], how many of the auxiliary's tokens spell what is before each column; up to `base`.
        base: columns of the text when its latest draft began; behind them, each token has one column.
        known: columns whose tokens are known.
        first: where the part of the text begins that fits the auxiliary's cache; -1 where none is there.
    """

    def __init__(self, capacity: int, words: Translation, room: int) -> None:
        self.tokens, self.begins = np.zeros(capacity, np.int64), np.zeros(capacity + 1, np.int64)
        self.base = self.known = self.first = 0
        self._words, self._lead, self._room, self._half = words, len(words.lead), room, room // 2

    def place(self, column: int) -> int:
        """The auxiliary's column of a column."""
        inside = min(column, self.base)
        begun = self._lead + int(self.begins[inside] - self.begins[self.first])
        return 0 if self.first < 0 else max(0, begun) + column - inside

    def extend(self, tokens: Ints, start: int) -> tuple[int, Ints]:
        """Let the text go on with tokens from column `start` on, and have nothing behind.

        Where it is too long for the auxiliary's cache, that holds its last part, from half to all of the room: how much
        depends on the text alone.

        Returns:
            what has to be run: the auxiliary's first column, and its tokens; none where columns before are not known.
        """
        if start > self.known:
            return self.place(self.known), tokens[:0]
        low, end = min(self.base, start), start + len(tokens)
        self.tokens[start:end] = tokens
        sizes = self._words.sizes[self.tokens[low:end]]
        self.begins[low + 1 : end + 1] = self.begins[low] + sizes.cumsum()
        self.base = self.known = end
        odd = np.flatnonzero(sizes[: start - low] != 1)  # was a node, of one column, and is several tokens
        start, first, over = low + int(odd[0]) if len(odd) else start, 0, self._lead + self.begins[end] - self._room
        if over > 0:
            first = int(np.searchsorted(self.begins[: end + 1], -(-over // self._half) * self._half))
        start = max(start, first) if first == self.first else first
        self.first = first
        lead = self._words.lead if start == first else ()
        return self.place(start) - len(lead), np.array([*lead, *self._words.spell(self.tokens[start:end])], np.int64)

    def part(self, columns: int) -> Text:
        """A copy without what is behind the first columns."""
        other = copy.copy(self)
        other.tokens, other.begins = self.tokens.copy(), self.begins.copy()
        other.base, other.known = min(self.base, columns), min(self.known, columns)
        return other


def contents(tokenizer: PreTrainedTokenizerBase) -> dict[int, bytes | str]:
    """What each token stands for: its bytes, or the name of a special token; the best of one content comes last.

    Raises:
        InvalidInput: it is neither a byte-level tokenizer nor one like SentencePiece's.
    """
    decoder = str(json.loads(tokenizer.backend_tokenizer.to_str())["decoder"])
    if "ByteLevel" not in decoder and "▁" not in decoder:
        problem = "its tokens are neither bytes nor SentencePiece's; give two models with one vocabulary"
        raise InvalidInput("tokenizer", tokenizer.name_or_path, problem)
    table = bytes_to_unicode().items() if "ByteLevel" in decoder else ()  # type: ignore[no-untyped-call]
    numbers = {character: byte for byte, character in table}
    single = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)}
    added, found = tokenizer.added_tokens_decoder, dict[int, bytes | str]()
    for name, token in sorted(tokenizer.get_vocab().items(), key=lambda item: (not item[0].startswith("<0x"), item[1])):
        if token in added:
            found[token] = name if added[token].special else (name if numbers else name.replace("▁", " ")).encode()
        elif numbers.keys() >= set(name):
            found[token] = bytes(numbers[character] for character in name)
        else:
            found[token] = single.get(name) or name.replace("▁", " ").encode()
    return found


def _spell(raw: bytes, known: dict[bytes | str, int], longest: int) -> list[int]:
    """The tokens of some bytes, the longest that fits first; bytes that no token begins with are left out."""
    found = list[int]()
    while raw:
        size = next((n for n in range(min(longest, len(raw)), 0, -1) if raw[:n] in known), 0)
        found += [known[raw[:size]]] if size else []
        raw = raw[size or 1 :]
    return found
