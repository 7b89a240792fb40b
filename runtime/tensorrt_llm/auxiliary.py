"""The auxiliary's role over an executor. Not executed with the library."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mtad import block
from mtad.accept import Accepted
from mtad.block import Draft
from mtad.constrain import extend, root_paths
from mtad.distribution import Candidates, process
from mtad.draft import Level, expand, root, stack
from mtad.live import replay
from mtad.params import Rule
from mtad.rows import choose_rows
from runtime.decoder.batch import Batch
from runtime.tensorrt_llm.beams import Beam, levels_of
from runtime.tensorrt_llm.executor import Client
from runtime.tensorrt_llm.target import ExecutorTarget

FREE_RULES: frozenset[Rule] = frozenset({"joint", "modal", "typical"})
"""Rules that judge by the draft's joint likelihood alone, or not by the draft at all."""


class ExecutorAuxiliary:
    """Drafts; see `runtime.decoder.roles.Auxiliary`. Keeps nothing of the rows: it asks the target's role.

    An engine that was built for `search` drafts a row by one request, a deterministic beam search. Level by level, with
    a request of one token per beam, it drafts what any other engine's auxiliary would draw: with an engine built for
    `steps` always, and otherwise wherever a draft is no beams (a sampled chain, whose rule needs the distributions it
    was drawn from; branches; constrained rows; what the target drafts itself).

    Args:
        client: the auxiliary's executor.
        target: the role whose rows it drafts for. Its executor drafts where a row's method says so.
    """

    def __init__(self, client: Client, target: ExecutorTarget) -> None:
        self.client, self.target = client, target

    def prefill(self, row: int, tokens: Sequence[int], start: int) -> None:
        """Nothing: the executor stores a text's keys and values when it first meets it."""

    def move_row(self, source: int, to: int, columns: int) -> None:
        """Nothing: see the class."""

    def clear_row(self, row: int) -> None:
        """Nothing: see the class."""

    def commit(self, batch: Batch, draft: Draft, accepted: Accepted) -> None:
        """Nothing: see the class."""

    def draft(self, batch: Batch) -> tuple[Batch, Draft]:
        """A draft that stops early asks for less, but keeps its shape."""
        rows, shape, sequences = batch.rows, batch.shape, self.target.sequences(batch)
        own = self._searched(batch)
        levels, first, above = ([], [], []) if all(own) else self._step(batch, sequences, own)
        if any(own):
            found = levels_of(self._search(batch, sequences, own), shape.draft_len, shape.width)
            mine = torch.tensor(own)
            levels = [choose_rows(mine, a, b) for a, b in zip(found, levels, strict=True)] if levels else found
        tree, origin = block.finish(stack(levels), rows, shape.selects)
        if first:
            q = Candidates(*(torch.stack(column) for column in zip(*first, strict=True)))
        else:  # no rule of these rows looks at it
            none = torch.zeros(shape.draft_len, len(own), shape.candidates)
            q = Candidates(none.long(), none)
        return batch, Draft(
            tree, origin, q, tuple(above) if shape.children or batch.live is not None else (), batch.live
        )

    def _searched(self, batch: Batch) -> list[bool]:
        """Rows whose draft is one request."""
        if self.client.spec.drafting == "steps" or batch.constraints:
            return [False] * len(batch.committed)
        rules = [batch.shape.rules[rule] if rule >= 0 else None for rule in batch.rows.rule.tolist()]
        return [rule in FREE_RULES and not own for rule, own in zip(rules, _by_target(batch), strict=True)]

    def _step(
        self, batch: Batch, sequences: Sequence[Sequence[int]], searched: Sequence[bool]
    ) -> tuple[list[Level], list[Candidates], list[Candidates]]:
        """Levels of the rows not `searched`; the distributions slot 0 was drawn from; and those after each beam."""
        shape, count = batch.shape, len(sequences)
        rows = batch.rows._replace(draft_len=batch.rows.draft_len.masked_fill(torch.tensor(searched)[:, None], 0))
        level, levels, first, above = root(rows, shape), list[Level](), list[Candidates](), list[Candidates]()
        texts: list[list[list[int]]] = [[[]] for _ in range(count)]
        prefixes = root_paths(count) if batch.constraints else None
        for depth in range(shape.draft_len):
            logits = self._after(batch, sequences, texts, level.growing)
            if batch.constraints and prefixes:
                logits = batch.constraints.adjust(logits, *prefixes)
            candidates = process(logits, rows)
            noise, place = batch.noise.gumbel[depth], batch.places[depth]
            grown = expand(level, candidates, noise, rows, place, shape.children > 0)
            level = grown if batch.live is None else replay(grown, level, batch.live, depth + 1, place, rows)
            first.append(Candidates(candidates.ids[:, 0], candidates.log_prob[:, 0]))
            above.append(candidates)
            if batch.stops:  # `bild`: what follows a token that the target is going to choose is never looked at
                level = level._replace(growing=level.growing & (first[-1].log_prob[:, :1] >= rows.log_fallback))
            levels.append(level)
            prefixes = extend(prefixes, level) if prefixes else None
            parents, tokens = level.parents.tolist(), level.tokens.tolist()
            texts = [
                [[*texts[row][up], token] for up, token in zip(parents[row], tokens[row], strict=True)]
                for row in range(count)
            ]
        return levels, first, above

    def _after(
        self, batch: Batch, sequences: Sequence[Sequence[int]], texts: list[list[list[int]]], growing: Tensor
    ) -> Tensor:
        """Logits after each beam that grows, float32 [R, B, V]: 0 for the others, of a failed one not numbers."""
        logits = torch.zeros(*growing.shape, self.client.vocab_size)
        for client, mine in ((self.client, False), (self.target.client, True)):
            at = [(row, beam) for row, beam in growing.nonzero().tolist() if _by_target(batch)[row] == mine]
            asked = [[*sequences[row], *texts[row][beam]] for row, beam in at]
            for (row, beam), found in zip(at, client.logits(asked, [()] * len(at)), strict=True):
                logits[row, beam] = math.nan if found is None else found[0]
        return logits

    def _search(self, batch: Batch, sequences: Sequence[Sequence[int]], searched: Sequence[bool]) -> list[list[Beam]]:
        """The beams of the rows `searched`, each row's likeliest first; none of the others."""
        rows, own = batch.rows, [row for row, mine in enumerate(searched) if mine]
        lengths, widths = rows.draft_len[:, 0].tolist(), (rows.level_bias[0] == 0).sum(1).tolist()
        heeds, least = rows.heeds[:, 0].tolist(), rows.log_confidence[:, 0].tolist()
        answers = self.client.search([sequences[row] for row in own], [lengths[row] for row in own])
        found: list[list[Beam]] = [[] for _ in searched]
        for row, beams in zip(own, answers, strict=True):
            if beams is None:
                found[row] = [Beam((0,), (math.nan,))]  # ends its request, and no other
                continue
            known = (beam.known(self.client.vocab_size) for beam in beams)
            cut = [beam.cut(rows.ends if heeds[row] else None, least[row]) for beam in known if beam.tokens]
            found[row] = sorted(cut, key=lambda beam: -beam.log_q[-1])[: widths[row]]
        return found


def _by_target(batch: Batch) -> list[bool]:
    return [False] * len(batch.committed) if batch.by_target is None else batch.by_target.tolist()
