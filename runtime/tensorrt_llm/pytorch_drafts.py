"""Drafts and decisions for a runtime that keeps the requests itself: who asks, row by row, and what is accepted.

Knows nothing of TensorRT-LLM: token ids and logits in, token ids out. The decision is `mtad.block.decide`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from engines.prefix_cache import common_prefix
from mtad import block
from mtad.block import Draft
from mtad.distribution import Candidates
from mtad.errors import InvalidInput
from mtad.params import DecodingParams
from mtad.tree import TokenTree
from runtime.decoder.batch_builder import BatchBuilder
from runtime.decoder.roles import Auxiliary

IDLE = DecodingParams(method="sample", temperature=0.0)
"""Of rows without a request."""


class Decision(NamedTuple):
    """A block: accepted tokens, then the target's own. The first `length` are of the draft."""

    tokens: list[int]
    length: int


@dataclass
class _Row:
    """One row of the auxiliary's cache.

    Attributes:
        owner: the request it belongs to.
        held: tokens whose keys and values it holds.
    """

    owner: int
    held: list[int] = field(default_factory=list)


class _Proposal(NamedTuple):
    """A draft that waits: of one row, under a text's last two tokens, of so many committed ones."""

    draft: Draft
    last_two: tuple[int, int]
    committed: int


class Speculation:
    """Drafts with an auxiliary of this package and decides what another runtime's target has scored.

    Rows of the auxiliary's cache are lent to requests; the least recently used one goes first, and a request that comes
    back finds its text stored anew. What was accepted is stored anew as well: it is as long as a draft.

    Args:
        auxiliary: the role that drafts; its cache is this object's alone.
        rows: of that cache.
        params: of all requests; of a method that scores one path, drafted by the auxiliary.
        vocab_size, eos: of the pair.
        seed: key of the random numbers, with each request's number and the length of its text.

    Attributes:
        decided, accepted: drafts that were decided so far, and tokens of them that were kept.

    Raises:
        InvalidInput: the method is none of these.
    """

    def __init__(
        self,
        auxiliary: Auxiliary,
        rows: int,
        params: DecodingParams,
        vocab_size: int,
        eos: tuple[int, ...],
        seed: int = 0,
    ) -> None:
        if not params.assisted or params.spec.tree:
            problem = "over TensorRT-LLM's PyTorch backend a method must score one path of the auxiliary's: mtad, modal"
            raise InvalidInput("method", params.method, problem)
        if params.constrained or params.logit_bias or params.min_tokens or params.repetition_penalty != 1:
            raise InvalidInput("params", params, "constraints are not applied there; leave them out")
        if params.presence_penalty or params.frequency_penalty:
            raise InvalidInput("params", params, "penalties are not applied there; leave them out")
        self.params, self.vocab_size = params, vocab_size
        self.decided = self.accepted = 0
        self._auxiliary, self._count, self._seed = auxiliary, rows, seed
        self._drafting, self._deciding = BatchBuilder(vocab_size, eos), BatchBuilder(vocab_size, eos)
        self._rows: OrderedDict[int, _Row] = OrderedDict()  # by row, the least recently used first
        self._proposals: dict[int, _Proposal] = {}

    @torch.inference_mode()
    def propose(self, texts: Mapping[int, Sequence[int]]) -> dict[int, list[int]]:
        """Draft for requests.

        Args:
            texts: by request, a number, its committed tokens; no more requests than rows.

        Returns:
            by request, the drafted tokens: `draft_len` of them, or fewer.
        """
        assert len(texts) <= self._count, "more requests than rows"
        rows = {key: self._row(key, set(texts)) for key in texts}
        for key, tokens in texts.items():
            self._store(rows[key], list(tokens))
        by_row = {row: key for key, row in rows.items()}
        count = 1 + max(by_row)
        idle = set(range(count)) - by_row.keys()
        for row in idle:
            self._rows.pop(row, None)  # rows between those that draft are written to
        lengths = [len(texts[by_row[row]]) if row in by_row else 1 for row in range(count)]
        batch = self._drafting.build(
            [IDLE if row in idle else self.params for row in range(count)],
            [_tail(texts[by_row[row]]) if row in by_row else (0, 0) for row in range(count)],
            lengths,
            [(self._key(by_row.get(row, 0)), lengths[row]) for row in range(count)],
        )
        levels = batch.shape.draft_len
        batch, draft = self._auxiliary.draft(batch)
        found = {}
        for row, key in by_row.items():
            alone = _padded(_of(draft, row), levels)
            length = int(alone.tree.drafted.sum())
            found[key] = alone.tree.tokens[0, :length].tolist()
            self._proposals[key] = _Proposal(alone, _tail(texts[key]), len(texts[key]))
        return found

    @torch.inference_mode()
    def decide(self, key: int, logits: Tensor) -> Decision:
        """Decide what of a request's last draft is kept.

        Args:
            key: the request.
            logits: the target's, after its committed tokens and after each drafted one: float [1 + drafted, V or more].
                What lies behind, of padding, is not looked at.
        """
        draft, last_two, committed = self._proposals.pop(key)
        batch = self._deciding.build([self.params], [last_two], [committed], [(self._key(key), committed)])
        drafted, levels = int(draft.tree.drafted.sum()), draft.tree.levels
        rows = logits[: 1 + drafted, : self.vocab_size].float().cpu()
        # a node that is not drafted can never be accepted: any logits will do
        rows = torch.cat([rows, rows[:1].expand(levels - drafted, -1)])[None]
        accepted = block.decide(draft, rows, rows, batch.noise, batch.committed, batch.rows, batch.shape.rules)
        length = int(accepted.length[0])
        self.decided += 1
        self.accepted += length
        return Decision(accepted.tokens[0, : length + 1].tolist(), length)

    def drafted(self, key: int) -> int | None:
        """Tokens of a request's draft that waits for its decision, without padding; None where there is none."""
        proposal = self._proposals.get(key)
        return None if proposal is None else int(proposal.draft.tree.drafted.sum())

    def _key(self, key: int) -> int:
        return (self._seed + key) % 2**63

    def _row(self, key: int, wanted: set[int]) -> int:
        """The row of a request; taken from the one that was not asked for longest, if none is free."""
        for row, held in self._rows.items():
            if held.owner == key:
                self._rows.move_to_end(row)
                return row
        free = next((row for row in range(self._count) if row not in self._rows), None)
        if free is None:
            free = next(row for row, held in self._rows.items() if held.owner not in wanted)
            gone = self._rows.pop(free)
            self._proposals.pop(gone.owner, None)
        self._rows[free] = _Row(key)
        return free

    def _store(self, row: int, tokens: list[int]) -> None:
        """Bring a row's cache up to the last two tokens, which the draft itself runs."""
        held, end = self._rows[row].held, len(tokens) - 2
        start = min(common_prefix(held, tokens), max(end, 0))
        if start < end:
            self._auxiliary.prefill(row, tokens[start:end], start)
        self._rows[row].held = tokens[: max(end, 0)]


def _tail(text: Sequence[int]) -> tuple[int, int]:
    """The last two tokens; of a single one, it twice."""
    tail = text[-2:]
    return tail[0], tail[-1]


def _of(draft: Draft, row: int) -> Draft:
    """One row of a draft, in memory of its own."""
    here = slice(row, row + 1)
    tree = TokenTree(*(values[here].clone() for values in draft.tree))
    q = Candidates(*(values[:, here].clone() for values in draft.q))
    return Draft(tree, draft.origin[here].clone(), q)


def _padded(draft: Draft, levels: int) -> Draft:
    """A chain that stopped early, with levels that hold nothing until it has as many as were asked for."""
    missing = levels - draft.tree.levels
    if not missing:
        return draft
    tree = draft.tree
    index = torch.arange(levels)[None]

    def more(values: Tensor) -> Tensor:
        return torch.cat([values, values[:, -1:].expand(-1, missing)], 1)

    longer = TokenTree(
        more(tree.tokens),
        index - 1,
        more(tree.log_q),
        torch.cat([tree.drafted, torch.zeros(1, missing, dtype=torch.bool)], 1),
        torch.zeros(1, levels, levels, dtype=torch.int64),
    )
    q = Candidates(*(torch.cat([values, values[-1:].expand(missing, -1, -1)]) for values in draft.q))
    return Draft(longer, index, q)
