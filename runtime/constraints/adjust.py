"""The constraints of one block's rows, applied to both models' logits."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mtad.constrain import Paths, Penalties, Terms, barrier, constrain
from runtime.constraints.constraint import Constraint


class Constraints:
    """The constraints of one block's rows, until one of them advances.

    Both models' logits go through `adjust` at every node of the token tree, before the filter.
    """

    def __init__(self, constraints: Sequence[Constraint | None]) -> None:
        rows = [row for row, constraint in enumerate(constraints) if constraint is not None]
        self._members = [constraint for constraint in constraints if constraint is not None]
        shared = self._shared = self._members[0].constrainer
        self._rows = rows
        bias = min_left = None
        if any(member.bias is not None for member in self._members):
            bias = torch.stack([shared.zeros if m.bias is None else m.bias for m in self._members])
        if any(member.min_left for member in self._members):
            min_left = torch.tensor([member.min_left for member in self._members])
        self._terms = Terms(bias, self._penalties(), shared.eos, min_left)

    @classmethod
    def of(cls, constraints: Sequence[Constraint | None]) -> Constraints | None:
        """The constraints of rows 0 .. R-1; None where no row has any."""
        return cls(constraints) if any(constraint is not None for constraint in constraints) else None

    def adjust(self, logits: npt.NDArray[np.float32], path_tokens: Tensor, valid: Tensor) -> npt.NDArray[np.float32]:
        """Logits under each row's constraints: float32 [R, S, V], new memory.

        A row's result does not depend, to the bit, on the other rows; rows without a constraint are unchanged.

        Args:
            logits: float32 [R, S, V], of either model, after S nodes.
            path_tokens, valid: int64 and bool [R, S, D], `mtad.constrain.Paths` of the nodes; the valid ones first.
        """
        out = logits.copy()
        paths = Paths(path_tokens[self._rows], valid[self._rows])
        own = torch.from_numpy(logits[self._rows])
        out[self._rows] = self._without_words(constrain(own, paths, self._terms, self._barrier(paths)), paths)
        return out

    def _penalties(self) -> Penalties | None:
        members, shared = self._members, self._shared
        if all(member.counts is None for member in members):
            return None
        params = [member.params for member in members]
        numbers = [(p.repetition_penalty, p.presence_penalty, p.frequency_penalty) for p in params]
        repetition, presence, frequency = torch.tensor(numbers, dtype=torch.float32).unbind(1)
        # padded to a power of two, so that a text that grows brings few shapes
        length = 1 << max(len(member.distinct) for member in members).bit_length()
        tokens = np.zeros((len(members), length), dtype=np.int64)
        for row, member in zip(tokens, members, strict=True):
            row[: len(member.distinct)] = list(member.distinct)
        return Penalties(
            repetition,
            presence,
            frequency,
            counts=torch.stack([shared.zeros if m.counts is None else m.counts for m in members]),
            seen=torch.stack([shared.unseen if m.seen is None else m.seen for m in members]),
            tokens=torch.from_numpy(tokens),
        )

    def _without_words(self, logits: Tensor, paths: Paths) -> Tensor:
        """Forbid the tokens that would complete a bad word, in place; those of one token are in `bias`."""
        if all(member.words is None for member in self._members):
            return logits
        table = zip(self._members, paths.tokens.tolist(), paths.valid.sum(-1).tolist(), strict=True)
        due = [
            (row, node, token)
            for row, (member, tokens, lengths) in enumerate(table)
            if member.words
            for node, (path, length) in enumerate(zip(tokens, lengths, strict=True))
            for token in member.words.last_tokens((*member.tail, *path[:length]))
        ]
        if due:
            logits[tuple(torch.tensor(due).T)] = -math.inf
        return logits

    def _barrier(self, paths: Paths) -> Tensor | None:
        if all(member.follower is None for member in self._members):
            return None
        rows, nodes, _ = paths.tokens.shape
        bits = np.full((rows, nodes, -(-self._shared.vocab_size // 8)), 255, dtype=np.uint8)
        table = zip(self._members, bits, paths.tokens.tolist(), paths.valid.sum(-1).tolist(), strict=True)
        for member, row, tokens, lengths in table:
            if member.follower is not None:
                for node, (path, length) in enumerate(zip(tokens, lengths, strict=True)):
                    row[node] = member.follower.allowed(tuple(path[:length]))
        return barrier(torch.from_numpy(bits), self._shared.vocab_size)
