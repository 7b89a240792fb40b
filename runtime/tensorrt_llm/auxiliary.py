"""The auxiliary's role over an executor. Not executed with the library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from mtad import block
from mtad.block import Draft
from mtad.constrain import extend, root_paths
from mtad.distributions.candidates import Candidates, process
from mtad.draft.levels import Level, expand, root, stack
from mtad.draft.live import replay
from mtad.methods import Rule
from mtad.rows import choose_rows
from mtad.rules.accept import Accepted
from runtime.decoder.batch import Batch
from runtime.tensorrt_llm.executor import ExecutorClient, Found
from runtime.tensorrt_llm.target import ExecutorTarget

FREE_RULES: frozenset[Rule] = frozenset({"joint", "joint_sample", "modal", "typical"})
"""Rules that judge by the draft's joint likelihood alone, or not by the draft at all."""


class Beam(NamedTuple):
    """One beam: its tokens, the joint log-likelihood up to each of them, and whether its text has ended."""

    tokens: tuple[int, ...]
    log_q: tuple[float, ...]
    ended: bool = False

    @classmethod
    def of(cls, found: Found, vocab_size: int, ends: Tensor | None, log_confidence: float) -> Beam:
        """As far as a beam may be drafted.

        That is up to the first token that ends a text (`ends`, bool [V]; None where texts go on), or at which its
        likelihood falls below `log_confidence`; and not beyond tokens of probability 0 or ids of padding.
        """
        tokens, log_q, ended = list[int](), list[float](), False
        for token, total in zip(found[0], accumulate(found[1]), strict=True):
            if token >= vocab_size or total == -math.inf:
                break
            tokens, log_q = [*tokens, token], [*log_q, total]
            ended = ends is not None and bool(ends[token])
            if total < log_confidence or ended:
                break
        return cls(tuple(tokens), tuple(log_q), ended)


class ExecutorAuxiliary:
    """Drafts; see `runtime.decoder.roles.Auxiliary`. Keeps nothing of the rows: it asks the target's role.

    An engine built for `search` drafts a row by one request, a deterministic beam search. Level by level, a request of
    one token per beam, it drafts what any other engine's auxiliary draws: an engine built for `steps` always, and any
    engine where a draft is no beams (a sampled chain, whose rule needs what it was drawn from; branches), where rows
    are constrained, and where the target drafts itself.
    """

    def __init__(self, client: ExecutorClient, target: ExecutorTarget) -> None:
        self.client, self.target = client, target

    def prefill(self, row: int, tokens: Sequence[int], start: int) -> None:
        """Nothing: the executor stores a text's keys and values when it first meets it."""

    def move_row(self, source: int, to: int, columns: int) -> None: ...

    def clear_row(self, row: int, start: int = 0) -> None: ...

    def commit(self, batch: Batch, draft: Draft, accepted: Accepted) -> None: ...

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
        if not first:  # no rule of these rows looks at it
            none = torch.zeros(len(own), shape.candidates)
            first = [Candidates(none.long(), none)] * shape.draft_len
        q = Candidates(*(torch.stack(column) for column in zip(*first, strict=True)))
        above = above if shape.children or batch.live is not None else []
        return batch, Draft(tree, origin, (q,), tuple((level,) for level in above), batch.live)

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
            noise, place = batch.noise.levels[depth], batch.places[depth]
            grown = expand(level, candidates, noise, rows, place, shape.forms)
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
            answers = client.logits(asked, [()] * len(at), self.target.salts(row for row, _ in at))
            for (row, beam), found in zip(at, answers, strict=True):
                logits[row, beam] = math.nan if found is None else found[0]
        return logits

    def _search(self, batch: Batch, sequences: Sequence[Sequence[int]], searched: Sequence[bool]) -> list[list[Beam]]:
        """The beams of the rows `searched`, each row's likeliest first; none of the others."""
        rows, own = batch.rows, [row for row, mine in enumerate(searched) if mine]
        lengths, widths = rows.draft_len[:, 0].tolist(), (rows.level_bias[0] == 0).sum(1).tolist()
        stops, least = rows.stops_at_eos[:, 0].tolist(), rows.log_confidence[:, 0].tolist()
        texts, steps = [sequences[row] for row in own], [lengths[row] for row in own]
        answers = self.client.search(texts, steps, self.target.salts(own))
        found: list[list[Beam]] = [[] for _ in searched]
        for row, beams in zip(own, answers, strict=True):
            if beams is None:
                found[row] = [Beam((0,), (math.nan,))]  # ends its request, and no other
                continue
            limits = self.client.vocab_size, rows.ends if stops[row] else None, least[row]
            known = [Beam.of(beam, *limits) for beam in beams]
            found[row] = sorted((b for b in known if b.tokens), key=lambda b: -b.log_q[-1])[: widths[row]]
        return found


def _by_target(batch: Batch) -> list[bool]:
    return [False] * len(batch.committed) if batch.by_target is None else batch.by_target.tolist()


def levels_of(rows: Sequence[Sequence[Beam]], draft_len: int, width: int) -> list[Level]:
    """Levels of a draft [R, width] from each row's beams, as `mtad.draft.levels.expand` makes them.

    Beams that begin alike share nodes, and a text that has ended is carried down with the weight it has.

    Args:
        rows: of each row, at most `width` beams, the likeliest first, none empty; none goes on where another one ended.
    """
    count, levels = len(rows), list[Level]()
    above: list[dict[tuple[int, ...], int]] = [{(): 0} for _ in rows]
    paths = torch.zeros(count, 1, draft_len, dtype=torch.int64)
    for depth in range(1, draft_len + 1):
        tokens = torch.zeros(count, width, dtype=torch.int64)
        parents = torch.zeros_like(tokens)
        log_q = torch.full((count, width), -math.inf)
        drafted, growing, ended = torch.zeros(3, count, width, dtype=torch.bool)
        for row, beams in enumerate(rows):
            slots: dict[tuple[int, ...], int] = {}
            for beam in beams:
                prefix = beam.tokens[:depth]
                carried = depth > len(beam.tokens)
                if prefix in slots or (carried and not beam.ended):
                    continue
                slot = slots[prefix] = len(slots)
                tokens[row, slot] = prefix[-1]
                parents[row, slot] = above[row][prefix if carried else prefix[:-1]]
                log_q[row, slot] = beam.log_q[len(prefix) - 1]
                drafted[row, slot] = not carried
                growing[row, slot] = depth < len(beam.tokens)
                ended[row, slot] = beam.ended and depth >= len(beam.tokens)
            above[row] = slots
        paths = paths.gather(1, parents[:, :, None].expand(-1, -1, draft_len)).clone()
        paths[:, :, depth - 1] = torch.arange(width)
        levels.append(Level(tokens, parents, log_q, drafted, growing, ended, paths))
    return levels
