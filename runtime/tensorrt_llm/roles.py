"""The two roles over executors, for a loop that decodes all rows in step. Not executed with the library."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from mtad.accept import Accepted
from mtad.block import Draft
from mtad.tree import TokenTree
from runtime.decoder.batch import Batch
from runtime.tensorrt_llm import drafting as courses
from runtime.tensorrt_llm.drafting import Drafting
from runtime.tensorrt_llm.exchange import Exchange
from runtime.tensorrt_llm.executor import Client


class ExecutorTarget:
    """Scores; see `runtime.decoder.roles.Target`. Owns the tokens of each row, which are all that is kept of them here.

    Keys and values are the executor's. A row's text is sent whole with every request, and what the executor knows of
    it, from blocks it keeps of earlier requests, it does not compute again. So nothing ever has to be rolled back.

    Args:
        client: the target's executor.
        exchange: shared by the two roles.

    Attributes:
        tokens: by row, what its "columns" hold.
    """

    def __init__(self, client: Client, exchange: Exchange) -> None:
        self.client, self.exchange = client, exchange
        self.tokens: dict[int, list[int]] = {}

    def prefill(self, row: int, tokens: Sequence[int], start: int) -> None:
        """Note `tokens` as columns start .. start + len - 1 of `row`."""
        held = self.tokens.get(row, [])
        assert start <= len(held), "columns before them are not there"
        self.tokens[row] = [*held[:start], *tokens]

    def move_row(self, source: int, to: int, columns: int) -> None:
        """Move a request's first `columns` columns to another row; fewer, of one that was cleared."""
        self.tokens[to] = self.tokens.get(source, [])[:columns]

    def clear_row(self, row: int, start: int = 0) -> None:
        """Forget a row."""
        self.tokens[row] = self.tokens.get(row, [])[:start]

    def sequences(self, batch: Batch) -> list[list[int]]:
        """Committed tokens of the batch's rows. The last one comes with it: it is in no column yet."""
        found = []
        for row, (last, count) in enumerate(zip(batch.last_two[:, 1].tolist(), batch.committed.tolist(), strict=True)):
            held = self.tokens.get(row, [])[: count - 1]
            assert len(held) == count - 1, "a row lacks tokens"
            found.append([*held, last])
        return found

    def score(self, batch: Batch, tree: TokenTree | None) -> Tensor:
        sequences = self.sequences(batch)
        self.tokens.update(enumerate(sequences))  # a block without a draft is never committed
        return self.exchange.run(courses.score(batch, sequences, tree, self.client))

    def accept(self, batch: Batch, draft: Draft | None, logits: Tensor) -> Accepted:
        return courses.decide(batch, draft, logits)

    def commit(self, batch: Batch, accepted: Accepted) -> None:
        """Keep the accepted tokens."""
        lengths, tokens = accepted.length.clamp(min=0).tolist(), accepted.tokens.tolist()
        for row, sequence in enumerate(self.sequences(batch)):
            self.tokens[row] = [*sequence, *tokens[row][: lengths[row]]]


class ExecutorAuxiliary:
    """Drafts; see `runtime.decoder.roles.Auxiliary`. Keeps nothing of the rows: it asks the target's role.

    Args:
        client: the auxiliary's executor.
        target: the role whose rows it drafts for. Its executor drafts where a row's method says so.
        drafting: how the beams of a draft are found.
    """

    def __init__(self, client: Client, target: ExecutorTarget, drafting: Drafting = "search") -> None:
        self.client, self.target, self.drafting = client, target, drafting

    def prefill(self, row: int, tokens: Sequence[int], start: int) -> None:
        """Nothing: the executor stores a text's keys and values when it first meets it."""

    def move_row(self, source: int, to: int, columns: int) -> None:
        """Nothing: see the class."""

    def clear_row(self, row: int, start: int = 0) -> None:
        """Nothing: see the class."""

    def draft(self, batch: Batch) -> tuple[Batch, Draft]:
        """A draft that stops early asks for less, but keeps its shape."""
        sequences = self.target.sequences(batch)
        course = courses.draft(batch, sequences, self.client, self.target.client, self.drafting)
        return batch, self.target.exchange.run(course)

    def commit(self, batch: Batch, draft: Draft, accepted: Accepted) -> None:
        """Nothing: see the class."""
