"""Drafting and scoring as courses: what is asked of the executors, and what is made of the answers.

There is no tree of requests: a tree is scored as one request a leaf, all with the same prefix, and comes out as one
pass would have scored it. The acceptance is `mtad.block.decide`, as with any engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from mtad import block
from mtad.accept import Accepted
from mtad.block import Draft
from mtad.constrain import extend, root_paths, tree_paths
from mtad.distribution import Candidates, process
from mtad.draft import Level, expand, root, stack
from mtad.live import replay
from mtad.params import Rule
from mtad.rows import choose_rows
from mtad.tree import TokenTree
from runtime.decoder.batch import Batch
from runtime.tensorrt_llm.beams import Path, levels_of
from runtime.tensorrt_llm.exchange import Course
from runtime.tensorrt_llm.executor import Answer, Ask, Client, Logits, Samples, Search

Drafting = Literal["search", "samples", "steps"]
"""How the beams of a draft are found: by one request's deterministic beam search; as independent samples of one
request; or level by level, each level as many requests of one token as it has beams, which draws exactly what any other
engine's auxiliary draws. Whatever is not beams (a sampled chain, whose rule needs the distributions it was drawn from;
branches; constrained rows; what the target drafts itself) is drawn level by level, always."""

FREE_RULES: frozenset[Rule] = frozenset({"joint", "joint_sample", "modal", "typical"})
"""Rules that judge by the draft's joint likelihood alone, or not by the draft at all."""


def draft(
    batch: Batch, sequences: Sequence[Sequence[int]], auxiliary: Client, target: Client, drafting: Drafting
) -> Course[Draft]:
    """Grow a draft under each row.

    Args:
        batch: `batch.shape.draft_len` >= 1.
        sequences: committed tokens of each row.
        auxiliary, target: who drafts; the target for rows whose method says so.
        drafting: how beams are found.
    """
    rows, shape = batch.rows, batch.shape
    whole = _whole(batch, drafting)
    drafters = [target if own else auxiliary for own in _by_target(batch)]
    levels, first, above = yield from _stepped(batch, sequences, drafters, whole)
    if any(whole):
        paths = yield from _found(batch, sequences, auxiliary, drafting, whole)
        found = levels_of(paths, shape.draft_len, shape.width)
        own = torch.tensor(whole)
        levels = [choose_rows(own, ours, theirs) for ours, theirs in zip(found, levels, strict=True)]
    tree, origin = block.finish(stack(levels), rows, shape.selects)
    q = Candidates(*(torch.stack(column) for column in zip(*first, strict=True)))
    return Draft(tree, origin, q, tuple(above) if shape.children or batch.live is not None else (), batch.live)


def score(batch: Batch, sequences: Sequence[Sequence[int]], tree: TokenTree | None, target: Client) -> Course[Tensor]:
    """Logits after each row's root and nodes, float32 [R, 1 + N, V]; of nodes that are not drafted, the root's."""
    places = [(row, nodes) for row in range(len(sequences)) for nodes in _leaves(tree, row)]
    tokens = tree.tokens.tolist() if tree else [[]] * len(sequences)
    answers = yield [(target, Logits(sequences[row], [tokens[row][node] for node in nodes])) for row, nodes in places]
    logits = torch.empty(len(sequences), 1 + len(tokens[0]), target.vocab_size)
    begun = set()
    for (row, nodes), answer in zip(places, answers, strict=True):
        if row not in begun:
            logits[row] = answer.logits[0, 0]
            begun.add(row)
        logits[row, [1 + node for node in nodes]] = answer.logits[0, 1:]
    return logits


def decide(batch: Batch, drafted: Draft | None, logits: Tensor) -> Accepted:
    """Accept; see `runtime.decoder.roles.Target.accept`."""
    adjusted = logits
    if batch.constraints:
        paths = tree_paths(drafted.tree) if drafted else root_paths(len(batch.committed))
        adjusted = batch.constraints.adjust(logits, *paths)
    return block.decide(drafted, adjusted, logits, batch.noise, batch.committed, batch.rows, batch.shape.rules)


def _by_target(batch: Batch) -> list[bool]:
    return [False] * len(batch.committed) if batch.by_target is None else batch.by_target.tolist()


def _whole(batch: Batch, drafting: Drafting) -> list[bool]:
    """Rows whose draft is one request."""
    if drafting == "steps" or batch.constraints:
        return [False] * len(batch.committed)
    rules = [batch.shape.rules[rule] if rule >= 0 else None for rule in batch.rows.rule.tolist()]
    return [rule in FREE_RULES and not own for rule, own in zip(rules, _by_target(batch), strict=True)]


def _stepped(
    batch: Batch, sequences: Sequence[Sequence[int]], drafters: Sequence[Client], whole: Sequence[bool]
) -> Course[tuple[list[Level], list[Candidates], list[Candidates]]]:
    """Levels of the rows that are not `whole`; the distributions slot 0 was drawn from; and those after each beam."""
    shape, count = batch.shape, len(sequences)
    rows = batch.rows._replace(draft_len=batch.rows.draft_len.masked_fill(torch.tensor(whole)[:, None], 0))
    level, levels, first, above = root(rows, shape), [], [], []
    texts: list[list[list[int]]] = [[[]] for _ in range(count)]
    prefixes = root_paths(count) if batch.constraints else None
    for depth in range(shape.draft_len):
        growing = level.growing.tolist()
        at = [(row, beam) for row in range(count) for beam, grows in enumerate(growing[row]) if grows]
        answers = yield [(drafters[row], Logits([*sequences[row], *texts[row][beam]])) for row, beam in at]
        logits = torch.zeros(count, len(growing[0]), drafters[0].vocab_size)
        for (row, beam), answer in zip(at, answers, strict=True):
            logits[row, beam] = answer.logits[0, 0]
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


def _found(
    batch: Batch, sequences: Sequence[Sequence[int]], auxiliary: Client, drafting: Drafting, whole: Sequence[bool]
) -> Course[list[list[Path]]]:
    """The beams of the rows that are `whole`, each row's likeliest first; none of the others."""
    rows, found = batch.rows, [row for row, own in enumerate(whole) if own]
    lengths = rows.draft_len[:, 0].tolist()
    widths = (rows.level_bias[0] == 0).sum(1).tolist()
    if drafting == "search":
        # requests of different widths would wait for each other, so all have the engine's
        width = auxiliary.spec.max_beam_width
        asks: list[Ask] = [Search(sequences[row], lengths[row], max(width, widths[row])) for row in found]
    else:
        asks = [_samples(batch, row, sequences[row], lengths[row], widths[row]) for row in found]
    answers = yield [(auxiliary, ask) for ask in asks]
    paths: list[list[Path]] = [[] for _ in whole]
    ends, stops, least = rows.ends.tolist(), rows.stops_at_eos[:, 0].tolist(), rows.log_confidence[:, 0].tolist()
    for row, answer in zip(found, answers, strict=True):
        log_probs = answer.log_probs or _log_probs(batch, row, answer)
        beams = [Path.of(tokens, each) for tokens, each in zip(answer.tokens, log_probs, strict=True)]
        known = [path.known(auxiliary.vocab_size) for path in beams]
        cut = [path.cut(ends if stops[row] else None, least[row]) for path in known if path.tokens]
        paths[row] = sorted(cut, key=lambda path: -path.log_q[-1])[: widths[row]]
    return paths


def _samples(batch: Batch, row: int, sequence: Sequence[int], steps: int, count: int) -> Ask:
    rows = batch.rows
    if not float(batch.noise.levels[0].gumbel[row].abs().max()):
        return Search(sequence, steps, count)  # temperature 0: nothing is drawn
    top_p = float(rows.top_p[row])
    return Samples(
        sequence,
        steps,
        count,
        temperature=1 / float(rows.inverse_temperature[row]),
        top_k=int((rows.rank_bias[row] == 0).sum()),
        top_p=min(top_p, 1.0),
        # a number of the request's own random sequence, which no other block has
        seed=int(float(batch.noise.bonus[row]) * 2**24),
    )


def _log_probs(batch: Batch, row: int, answer: Answer) -> list[list[float]]:
    """Log-probability of each sampled token, under the row's own filter; -inf where that would not have drawn it."""
    rows, count = batch.rows, answer.logits.shape[0]
    one = rows._replace(
        inverse_temperature=rows.inverse_temperature[row].expand(count, 1, 1),
        rank_bias=rows.rank_bias[row].expand(count, 1, -1),
        top_p=rows.top_p[row].expand(count, 1, 1),
    )
    found: list[list[float]] = process(answer.logits, one).at(torch.tensor(answer.tokens)).tolist()
    return found


def _leaves(tree: TokenTree | None, row: int) -> list[list[int]]:
    """The nodes of each path of a row's tree that is part of no other; the empty path where nothing is drafted."""
    if tree is None:
        return [[]]
    drafted, parents = tree.drafted[row].tolist(), tree.parents[row].tolist()
    inner = {parent for parent, own in zip(parents, drafted, strict=True) if own}
    paths = []
    for leaf, own in enumerate(drafted):
        if own and leaf not in inner:
            path, node = [], leaf
            while node >= 0:
                path.append(node)
                node = parents[node]
            paths.append(path[::-1])
    return paths or [[]]
