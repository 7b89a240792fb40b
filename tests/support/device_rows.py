"""Rows of a block on a device beside the same rows on the host: filters, drafts and decisions, from given logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engines.buffers import size_of, views
from mtad import block as host
from mtad.batch import Decisions, ScoredTrees, Trees
from mtad.device import block, launches, tables
from mtad.device.tables import Given, Results, Scored, Tables, Tree
from mtad.distribution import Distributions
from mtad.params import DecodingParams
from runtime.decoder.batch_arrays import BatchArrays
from runtime.decoder.block import BlockInput
from runtime.decoder.buckets import Buckets
from runtime.decoder.cuda_graph.captured_block import Key, write
from tests.support.noise import draw_noise

CAPACITY = 64
COMMITTED = 5


def keys_of(params: Sequence[DecodingParams]) -> list[tuple[int, int]]:
    return [(p.seed or row, row) for row, p in enumerate(params)]


def roots_of(params: Sequence[DecodingParams], vocab: int) -> list[int]:
    return [(3 + row) % vocab for row in range(len(params))]


def given_of(params: Sequence[DecodingParams], vocab: int, padded: int = 0) -> tuple[Key, Given]:
    """The input of a block of these rows, and of some padded ones."""
    count, last_two = len(params), [(1, root) for root in roots_of(params, vocab)]
    asked = BlockInput(params, last_two, [COMMITTED] * count, keys_of(params), [None] * count, [True] * count)
    key = Key.of(asked, Buckets(count + padded, CAPACITY))._replace(rows=count + padded)
    memory = torch.full((size_of(key.given),), 255, dtype=torch.uint8)
    given: Given = views(key.given, memory)
    write(asked, key, {name: tensor.numpy() for name, tensor in given._asdict().items()}, vocab)
    return key, given


def logits_after(model: Tensor, depths: Tensor, tokens: Tensor) -> Tensor:
    """A model's logits after tokens [R, S], each at its depth [R, S] (0 for the root's): float32 [R, S, V].

    Args:
        model: float32 [D + 1, V, V], by depth and last token.
    """
    return model[depths, tokens].contiguous()


def block_on_device(
    key: Key, given: Given, auxiliary: Tensor, target: Tensor, is_end: Tensor
) -> tuple[Tree | None, Scored | None, Results]:
    """A block whose models are tables."""
    rows, finite, drawn, tree, scored, q = len(given.real), given.real, list[Tables](), None, None, None
    if key.levels:
        tree = Tree.empty(rows, key.levels, key.width, torch.device("cpu"))
        tokens = given.last_two[:, 1:]
        for level in range(key.levels):
            logits = logits_after(auxiliary, torch.full_like(tokens, level), tokens)
            drawn.append(launches.filtered(logits, given))
            tokens, *_ = launches.draw_level(level, tree, drawn[-1], given, is_end, key.length, CAPACITY)
        finite = ~tree.log_q.isnan().flatten(1).any(1)
        scored = block.select_nodes(tree, given, is_end, key.tree)
        q = tables.stacked(drawn) if key.rules.intersection(block.CHAINS) else None
    tokens, positions, *_ = block.target_inputs(scored, given, key.length, CAPACITY)
    p = launches.filtered(logits_after(target, positions - given.committed[:, None] + 1, tokens), given)
    found = Results.empty(rows, key.levels, "cpu")
    block.decide(scored, p, q, given, finite, key.rules, found)
    return tree, scored, found


def block_on_host(
    params: Sequence[DecodingParams], auxiliary: Tensor, target: Tensor, is_end: Tensor
) -> tuple[Trees, ScoredTrees, Decisions]:
    """The same rows by `mtad.block`."""
    vocab, layout = auxiliary.shape[1], BatchArrays(params, auxiliary.shape[1])
    trees, starts, count = Trees.empty(layout.starts), layout.starts, len(params)
    noise = draw_noise(keys_of(params), layout.draft_len, layout.width)
    finite, ends = np.ones(count, np.bool_), is_end.numpy()
    shape = count, 1 + int(starts.max()), vocab
    filtered = np.empty(shape, np.int32), np.empty(shape, np.float32), np.full(shape[:2], -1)
    q = Distributions(np.empty((0, 0, 0), np.float32), *filtered)
    tokens = torch.tensor(roots_of(params, vocab))[:, None]
    for level in range(layout.draft_len):
        logits = logits_after(auxiliary, torch.full_like(tokens, level), tokens).numpy()
        host.draft_levels(0, count, layout.rows, level, trees, logits, q, noise.draft, ends, finite)
        at = np.minimum(starts[:, level, None] + np.arange(layout.width), max(shape[1] - 2, 0))
        tokens = torch.from_numpy(np.take_along_axis(trees.tokens, at, 1))
    nodes = int(np.where(layout.rows["tree"], layout.starts[:, -1], layout.rows["draft_len"]).max())
    scored = ScoredTrees.empty(count, nodes, layout.draft_len)
    host.select_nodes(layout.rows, layout.draft_len, trees, ends, scored)
    tokens = torch.from_numpy(np.c_[roots_of(params, vocab), scored.tokens])
    depths = torch.from_numpy(np.c_[np.zeros(count, np.int64), scored.depths])
    logits = logits_after(target, depths, tokens).numpy()
    decisions = Decisions.empty(count, layout.draft_len)
    decisions.finite[:] = finite
    host.decide(0, count, layout.rows, trees, scored, logits, logits, q, noise.accept, noise.bonus, decisions)
    return trees, scored, decisions
