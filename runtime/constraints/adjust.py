"""The constraints of one block's rows, applied to both models' logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mtad.constrain import Ints, Terms, constrain
from runtime.constraints.constraint import Constraint


class Constraints:
    """The constraints of one block's rows, until one of them advances.

    Both models' logits go through `adjust` at every node of the token tree, before the filter.
    """

    def __init__(self, constraints: Sequence[Constraint | None]) -> None:
        self._members = [(row, member, member.terms) for row, member in enumerate(constraints) if member is not None]

    @classmethod
    def of(cls, constraints: Sequence[Constraint | None]) -> Constraints | None:
        """The constraints of rows 0 .. R-1; None where no row has any."""
        return cls(constraints) if any(constraint is not None for constraint in constraints) else None

    def adjust(self, logits: npt.NDArray[np.float32], paths: Ints, lengths: Ints) -> npt.NDArray[np.float32]:
        """Logits under each row's constraints: float32 [R, S, V], new memory.

        A row's result does not depend, to the bit, on the other rows; rows without a constraint are unchanged.

        Args:
            logits: float32 [R, S, V], of either model, after S nodes.
            paths, lengths: int64 [R, S, D] and [R, S], the drafted tokens that lead to each node, see `constrain`.
        """
        out = logits.copy()
        for row, member, terms in self._members:
            adjust(out[row], paths[row], lengths[row], member, terms)
        return out


def adjust(logits: npt.NDArray[np.float32], paths: Ints, lengths: Ints, member: Constraint, terms: Terms) -> None:
    """Put a row's logits [S, V] under its constraint, in place."""
    allowed = np.empty((len(lengths), 0), np.uint8)
    texts = [tuple(path[:length]) for path, length in zip(paths.tolist(), lengths.tolist(), strict=True)]
    if member.follower:
        allowed = np.array([member.follower.allowed(text) for text in texts])
    elif member.words:
        allowed = np.array([member.words.allowed((*member.tail, *text)) for text in texts])
    constrain(logits, paths, lengths, terms, allowed)
