"""The target's role over an executor. Not executed with the library."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from mtad import block
from mtad.block import Draft
from mtad.constrain import root_paths, tree_paths
from mtad.draft.tree import TokenTree
from mtad.errors import InvalidInput
from mtad.rules.accept import Accepted
from runtime.decoder.batch import Batch
from runtime.scheduler.request import Request, TokenScore
from runtime.tensorrt_llm.executor import ExecutorClient


class ExecutorTarget:
    """Scores and accepts; see `runtime.decoder.roles.Target`. Owns `tokens`, by row what its "columns" hold.

    Keys and values are the executor's. Each request sends its row's text whole, and what the executor knows of it from
    earlier requests it does not compute again. So nothing ever has to be rolled back. A tree is one request per leaf.
    `running` are the loop's requests at any time; without them, all share keys and values.
    """

    def __init__(self, client: ExecutorClient, running: Sequence[Request] = ()) -> None:
        self.client, self._running = client, running
        self.tokens: dict[int, list[int]] = {}
        self._logits, self._scored = torch.empty(0), torch.empty(0, dtype=torch.bool)

    def prefill(self, row: int, tokens: Sequence[int], start: int) -> None:
        """Note `tokens` as columns start .. start + len - 1 of `row`."""
        held = self.tokens.get(row, [])
        assert start <= len(held), "columns before them are not there"
        self.tokens[row] = [*held[:start], *tokens]

    def score_prompt(self, row: int, tokens: Sequence[int], start: int, count: int) -> list[TokenScore]:
        """Refused: what is known of a text's beginning is not computed again, and its logits are not returned.

        Raises:
            InvalidInput: always; `ExecutorLLM.requests` refuses such requests before they are queued.
        """
        raise InvalidInput("prompt_logprobs", count, "not over TensorRT-LLM executors; leave it out")

    def move_row(self, source: int, to: int, columns: int) -> None:
        """Move a request's first `columns` columns to another row; fewer, of one that was cleared."""
        self.tokens[to] = self.tokens.get(source, [])[:columns]

    def clear_row(self, row: int, start: int = 0) -> None:
        """Forget a row's columns from `start` on."""
        self.tokens[row] = self.tokens.get(row, [])[:start]

    def salts(self, rows: Iterable[int]) -> list[int]:
        """Whose keys and values rows may reuse."""
        return [self._running[row].salt for row in rows] if self._running else []

    def sequences(self, batch: Batch) -> list[list[int]]:
        """Committed tokens of the batch's rows. The last one comes with it: it is in no column yet."""
        found = []
        for row, (last, count) in enumerate(zip(batch.last_two[:, 1].tolist(), batch.committed.tolist(), strict=True)):
            held = self.tokens.get(row, [])[: count - 1]
            assert len(held) == count - 1, "a row lacks tokens"
            found.append([*held, last])
        return found

    def score(self, batch: Batch, tree: TokenTree | None) -> Tensor:
        """Logits after the root and each node; of nodes that were not scored, the root's."""
        sequences = self.sequences(batch)
        self.tokens.update(enumerate(sequences))  # a block without a draft is never committed
        places = [(row, nodes) for row in range(len(sequences)) for nodes in _leaves(tree, row)]
        tokens = tree.tokens.tolist() if tree else [[]] * len(sequences)
        drafts = [[tokens[row][node] for node in nodes] for row, nodes in places]
        shape = len(sequences), 1 + len(tokens[0]), self.client.vocab_size
        if self._logits.shape != shape:
            self._logits = torch.empty(shape)
        self._scored = torch.zeros(shape[:2], dtype=torch.bool)
        asked, salts = [sequences[row] for row, _ in places], self.salts(row for row, _ in places)
        answers = self.client.logits(asked, drafts, salts)
        failed = set()
        for (row, nodes), rows in zip(places, answers, strict=True):
            if rows is None or rows.isnan().any():
                failed.add(row)
                continue
            if not self._scored[row, 0]:
                self._logits[row] = rows[0]
            at = [0, *(1 + node for node in nodes)][: len(rows)]
            self._logits[row, at], self._scored[row, at] = rows, True
        for row in failed:  # of a tree, the rest would be another draft, and the text another than it is alone
            self._logits[row] = math.nan  # ends this request, and no other
        return self._logits

    def accept(self, batch: Batch, draft: Draft | None, logits: Tensor) -> Accepted:
        """Decide what is kept; a node that was not scored counts as one that was not drafted."""
        adjusted = logits
        if batch.constraints:
            paths = tree_paths(draft.tree) if draft else root_paths(len(batch.committed))
            adjusted = batch.constraints.adjust(logits, *paths)
        if draft:
            tree = draft.tree
            draft = draft._replace(tree=tree._replace(drafted=tree.drafted & self._scored[:, 1:]))
        return block.decide(draft, adjusted, logits, batch.noise, batch.committed, batch.rows, batch.shape.rules)

    def commit(self, batch: Batch, accepted: Accepted) -> None:
        """Keep the accepted tokens."""
        lengths, tokens = accepted.length.clamp(min=0).tolist(), accepted.tokens.tolist()
        for row, sequence in enumerate(self.sequences(batch)):
            self.tokens[row] = [*sequence, *tokens[row][: lengths[row]]]


def _leaves(tree: TokenTree | None, row: int) -> list[list[int]]:
    """The nodes of each path of a row's tree that is part of no other; the empty path where nothing is drafted."""
    if tree is None:
        return [[]]
    drafted, parents = tree.drafted[row].tolist(), tree.parents[row].tolist()
    inner = {parent for parent, own in zip(parents, drafted, strict=True) if own}

    def path(node: int) -> list[int]:
        return [] if node < 0 else [*path(parents[node]), node]

    return [path(node) for node, own in enumerate(drafted) if own and node not in inner] or [[]]
