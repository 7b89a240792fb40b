"""Which lengths automatic drafts may have, and what drafts cost where no clock may decide. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mtad.params import LONGEST, DecodingParams


def draft_lengths(longest: int) -> list[int]:
    """Few lengths, since each is another shape of a block, and another graph to capture."""
    return [0, *(1 << power for power in range(longest.bit_length()))]


def with_length(params: DecodingParams, length: int) -> DecodingParams:
    """A request's parameters where its drafts have `length` tokens."""
    return replace(params, draft_len=length) if length else replace(params, method="sample")


def variants(params: DecodingParams, longest: int = LONGEST) -> list[DecodingParams]:
    """What blocks of a request may be: itself, or if its drafts are automatic, each length up to `longest`."""
    found, lengths = list[DecodingParams](), draft_lengths(min(longest, LONGEST))
    for part in [params] if params.thinking is params else [params, params.thinking]:
        found += [with_length(part, n) for n in lengths if n or params.follows_load] if part.automatic else [part]
    return found


@dataclass(frozen=True)
class DraftCosts:
    """What drafts cost where no clock may decide, relative to a step of the target over one token.

    Attributes:
        level: seconds of a step of the auxiliary.
        node: seconds that the target takes longer for each further token it scores.
    """

    level: float = 0.15
    node: float = 0.01

    def block(self, params: DecodingParams, length: int) -> float:
        """A block with a draft of `length` tokens."""
        return 1 + length * (self.level + self.node * (params.beam_width if params.spec.tree else 1))
