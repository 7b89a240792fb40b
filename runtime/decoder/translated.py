"""An auxiliary with a vocabulary of its own, as an engine that takes the target's tokens and gives their logits.

A committed token becomes the tokens that spell it, so a row has columns of its own in the auxiliary's cache. A drafted
one is in both vocabularies, and has one column; what the auxiliary says of such tokens is what drafts are drawn from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from engines.base import Engine, Step
from engines.cache.base import KvCache
from engines.cache.prefix import PrefixCache
from engines.vocabulary import Text, Translation
from mtad.constrain import Floats, Ints
from mtad.errors import InvalidInput
from runtime.decoder.engine_role import EngineRole, StepInputs
from runtime.decoder.kv_cache import PIECE

FEW, UNKNOWN = 8, -1e8
"""The auxiliary's tokens that a row runs at most in a step of several rows, those before them alone; and the logit of a
token that it lacks, which is finite because a request may forbid all that it has."""


class TranslatedCache(KvCache):
    """The cache `own` of an auxiliary, by columns of the target's tokens; `texts` says what each row holds.

    It has memory for all rows, also where they share pages: how many a text takes is known only when the text is.
    """

    def __init__(self, own: KvCache, words: Translation, room: int) -> None:
        self.own, self.words, self.rows, self.capacity = own, words, own.rows, own.capacity
        self._empty = Text(self.capacity, words, room)
        self.texts = [self._empty.part(0) for _ in range(own.rows)]

    @property
    def device(self) -> torch.device:
        return self.own.device

    def release(self, row: int) -> None:
        self.texts[row] = self._empty.part(0)
        self.own.release(row)

    def clear(self, row: int, start: int = 0) -> None:
        self.own.clear(row)
        self.texts[row] = self.texts[row].part(start)
        self.texts[row].first = -1  # a step that broke may have begun to move the text

    def copy(self, source: int, to: int, columns: int) -> None:
        self.own.copy(source, to, self.texts[source].place(columns))
        self.texts[to] = self.texts[source].part(columns)

    def keep(self, source: Tensor, to: Tensor) -> None:
        moves = np.stack([source.cpu().numpy(), to.cpu().numpy()])
        for row, text in enumerate(self.texts[: len(source)]):
            text.tokens[moves[1, row]] = text.tokens[moves[0, row]]
            moves[:, row] += text.place(text.base) - text.base
        own = torch.from_numpy(moves.clip(0, self.capacity - 1)).to(self.device)
        self.own.keep(own[0], own[1])

    def prefix_cache(self, tokens: int) -> PrefixCache:
        return TranslatedPrefixes(self, tokens)


class TranslatedPrefixes(PrefixCache):
    """The prefixes that the auxiliary's cache keeps, by the target's tokens."""

    def __init__(self, cache: TranslatedCache, tokens: int) -> None:
        self._cache, self._words, self._own = cache, cache.words, cache.own.prefix_cache(tokens)

    def restore(self, row: int, tokens: Sequence[int], start: int = 0, salt: int = 0) -> int:
        text = self._cache.texts[row]
        if text.first:
            return start
        own = self._own.restore(row, self._spell(tokens), text.place(start) if start else 0, salt)
        column = max(start, self._whole_tokens(tokens, own))
        text.extend(np.array(tokens[start:column], np.int64), start)
        return column

    def stored(self, tokens: Sequence[int], salt: int = 0) -> int:
        return self._whole_tokens(tokens, self._own.stored(self._spell(tokens), salt))

    def store(self, row: int, tokens: Sequence[int], salt: int = 0) -> None:
        if not self._cache.texts[row].first:
            self._own.store(row, self._spell(tokens), salt)

    def _spell(self, tokens: Sequence[int]) -> list[int]:
        return [*self._words.lead, *self._words.spell(np.array(tokens, np.int64)).tolist()]

    def _whole_tokens(self, tokens: Sequence[int], own: int) -> int:
        ends = len(self._words.lead) + self._words.sizes[np.array(tokens, np.int64)].cumsum()
        return int(np.searchsorted(ends, own, "right"))


class TranslatedEngine(Engine):
    """Steps of an auxiliary over the target's tokens.

    A step with logits after its last token alone is text; one with logits after every token is a level of a draft, a
    node for each token. Nothing of it can be captured: how many tokens a text has is known on the host alone.

    Args:
        nodes: of a draft at most.

    Raises:
        InvalidInput: the auxiliary's capacity leaves too little room for a text.
    """

    cache: TranslatedCache

    def __init__(self, auxiliary: Engine, words: Translation, nodes: int) -> None:
        spec = replace(auxiliary.spec, vocab_size=len(words.drafted), dtype="float32")
        room, least = spec.capacity - nodes - FEW, 3 * int(words.sizes.max())
        if room < least:  # so that each half has room for a token
            problem = f"an auxiliary with a vocabulary of its own needs {nodes + FEW + least}; export again"
            raise InvalidInput("capacity", spec.capacity, problem)
        super().__init__(spec, TranslatedCache(auxiliary.cache, words, room))
        self.max_tokens = min(nodes + 1, auxiliary.max_tokens or nodes + 1)
        self._auxiliary, self._words, self._role = auxiliary, words, EngineRole(auxiliary, auxiliary.spec.vocab_size)
        self._drafted = torch.from_numpy(words.drafted % (auxiliary.spec.vocab_size + 1))

    @property
    def name(self) -> str:
        return f"{self._auxiliary.name}, with a vocabulary of its own"

    @property
    def deferred_rows(self) -> int:
        return self._auxiliary.deferred_rows

    def run_deferred(self) -> None:
        self._auxiliary.run_deferred()

    def step(self, step: Step) -> Tensor:
        is_level = len(step.keep) == step.tokens.shape[1] and not step.is_prompt
        logits = self._run_level(step) if is_level else self._run_text(step)
        out = torch.empty(*logits.shape[:2], self.spec.vocab_size) if step.out is None else step.out
        return torch.index_select(pad(torch.from_numpy(logits), (0, 1), value=UNKNOWN), 2, self._drafted, out=out)

    def _run_text(self, step: Step) -> Floats:
        """Logits after the last token of each row, [R, 1, V] with the auxiliary's V; of a step without logits, none."""
        texts, kept = self.cache.texts[step.first_row :][: len(step.tokens)], len(step.keep)
        tokens, starts = step.tokens.cpu().numpy(), step.write_at.cpu().numpy()
        # a sequence of one token has it twice, of which the second one has the same position
        is_new = step.positions.cpu().numpy() == starts[:, None] + np.arange(tokens.shape[1])
        at, left = list[int](), list[Ints]()
        for row, (text, start) in enumerate(zip(texts, starts.tolist(), strict=True)):
            place, own = text.extend(tokens[row, is_new[row]], start)
            alone = max(0, len(own) - FEW) if kept else len(own)
            for piece in range(0, alone, PIECE):
                some = own[piece : min(piece + PIECE, alone)].tolist()
                self._role.prefill(step.first_row + row, some, place + piece)
            at.append(place + alone)
            left.append(own[alone:])
        if not kept:
            return np.zeros((len(texts), 0, self._role.vocab_size), np.float32)
        lengths = np.array(list(map(len, left)))
        places = np.minimum(at, self.cache.capacity - lengths.max())
        first = int(lengths[lengths > 0].min()) - 1
        inputs = self._role.inputs(len(texts), int(lengths.max()), int(places.max() + lengths.max()), first)
        given, positions, write_at, mask = inputs.arrays
        given[:], write_at[:] = 0, places
        for row, own in enumerate(left):
            given[row, : len(own)] = own
        positions[:] = places[:, None] + np.arange(lengths.max())
        mask[:, 0] = np.arange(mask.shape[3]) <= positions[:, :, None]
        found: Floats = self._run(inputs)[np.arange(len(texts)), np.maximum(lengths - 1, first) - first]
        return found[:, None]

    def _run_level(self, step: Step) -> Floats:
        """Logits after each token, [R, S, V] with the auxiliary's V; a row that drafts nothing runs behind its text."""
        tokens, depths, seen = (x.cpu().numpy() for x in (step.tokens, step.positions, step.mask[:, 0]))
        texts, steps, places, drafts = self.cache.texts[: len(tokens)], tokens.shape[1], list[int](), list[bool]()
        for text, own, start in zip(texts, tokens, step.write_at.tolist(), strict=True):
            drafts.append(text.base <= start <= text.known)
            if drafts[-1]:
                text.tokens[start : start + steps], text.known = own, start + steps
            places.append(min(text.place(start if drafts[-1] else text.known), self.cache.capacity - steps))
        inputs = self._role.inputs(len(tokens), steps, max(places) + steps)
        given, positions, write_at, mask = inputs.arrays
        given[:], write_at[:] = self._words.pieces[self._words.ends[tokens] - 1], places
        for row, (text, place) in enumerate(zip(texts, places, strict=True)):
            end = text.place(text.base) if drafts[row] else place
            mask[row, 0, :, :end], mask[row, 0, :, end:] = True, False
            positions[row] = end
            if drafts[row]:
                nodes = seen[row, :, text.base :][:, : mask.shape[3] - end]
                mask[row, 0, :, end : end + nodes.shape[1]] = nodes
                positions[row] += depths[row] - text.base
        return self._run(inputs, step.drafted)

    def _run(self, inputs: StepInputs, drafted: int = 0) -> Floats:
        steps = inputs.arrays[0].shape[1]
        self._auxiliary.cache.reserve([(start, start + steps) for start in inputs.arrays[2].tolist()])
        return self._role.run(inputs, drafted)
