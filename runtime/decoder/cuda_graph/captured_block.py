"""One block as work that can be captured: what it is captured for, the memory it runs on, what the host reads of it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engines import base
from engines.base import Engine
from engines.buffers import Arena, size_of, views
from mtad.device import block, launches
from mtad.device.tables import Given, Results, Step, Tables, Tree, stacked
from mtad.random import Noise, fill_noise
from mtad.rows import stack_rows
from runtime.decoder.block import BlockInput
from runtime.decoder.buckets import Buckets


class Key(NamedTuple):
    """What a block is captured for.

    Attributes:
        rows, length: rows, padded, and columns of the masks.
        levels, width: D and W, of the largest draft; 0 and 0 where nothing is drafted.
        tree: some row's whole draft is scored.
        rules: of the rows that draft, the widest.
    """

    rows: int
    length: int
    levels: int
    width: int
    tree: bool
    rules: frozenset[str]

    @classmethod
    def of(cls, given: BlockInput, buckets: Buckets) -> Key:
        drafting = [p for p in given.params if p.drafts]
        levels = max((p.drafted for p in drafting), default=0)
        width = max((p.draft_width for p in drafting), default=0)
        tree = any(p.spec.tree for p in drafting)
        tokens = max(1 + levels * (width if tree else 1), width)
        rows, length = buckets.padded(len(given.params), tokens), buckets.length(max(given.committed) + levels * width)
        return cls(rows, length, levels, width, tree, block.widest(p.spec.rule for p in drafting))

    @property
    def nodes(self) -> int:
        """M, nodes that the target scores per row."""
        return self.levels * (self.width if self.tree else 1)

    @property
    def size(self) -> tuple[int, ...]:
        """Larger ones need more memory."""
        return self.rows * (1 + self.nodes), self.length

    @property
    def given(self) -> Given:
        """Tensors without memory, of the types that `mtad.device.tables.Given` says."""

        def like(*sizes: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.empty((self.rows, *sizes), dtype=dtype, device="meta")

        number, flag, real = torch.float32, torch.bool, torch.float64
        noise = like(self.levels, self.width, dtype=real)
        return Given(
            *(like(dtype=number), like(), like(dtype=number), like(dtype=number), like(dtype=number)),
            *(like(dtype=number), like(dtype=flag), like()),
            *(like(dtype=real), like(), like(), like(dtype=flag), like(dtype=flag), like(dtype=real), like(dtype=flag)),
            *(like(2), like(), like(dtype=flag), noise, noise, like(dtype=real)),
        )


class Arenas(NamedTuple):
    """The memory that all blocks share, one after another.

    Attributes:
        sent, received: the host's, of a batch and of a block's results.
        placed, out, logits: the device's, of both and of the target's logits.
    """

    sent: Arena
    received: Arena
    placed: Arena
    out: Arena
    logits: Arena

    @classmethod
    def on(cls, device: torch.device) -> Arenas:
        """With pinned memory of the host, for a GPU."""
        pinned = device.type == "cuda"
        return cls(Arena(pinned=pinned), Arena(pinned=pinned), Arena(device), Arena(device), Arena(device))


def write(given: BlockInput, key: Key, to: Mapping[str, npt.NDArray[Any]], vocab_size: int) -> None:
    """Write a batch into the host's memory of a block; padded rows draft and filter nothing."""
    count, records = len(given.params), stack_rows(given.params, vocab_size)
    noise = Noise.empty(len(given.keys), key.levels, key.width)
    fill_noise(np.array(given.keys, np.uint64), noise)
    known: dict[str, Any] = {name: records[name] for name in records.dtype.names or () if name in to}
    known |= {"inverse_temperature": 1 / records["temperature"], "last_two": given.last_two, "real": True}
    known |= {"committed": given.committed, "draft": noise.draft, "accept": noise.accept, "bonus": noise.bonus}
    idle = {"inverse_temperature": 1, "top_k": vocab_size, "top_p": 1, "committed": 2}
    for name, values in to.items():
        values[:count], values[count:] = known[name], idle.get(name, 0)


class CapturedBlock:
    """One block on static memory: called, it launches its work, and asks the device for nothing.

    Padded rows write behind the capacity, and nobody reads what they give.

    Args:
        is_end: bool [V], tokens that end a text.
        arenas: where its memory lies.

    Attributes:
        results: of the latest launch, on the device.
        logits: float32 [R, 1 + M, V] of the target, likewise.
    """

    def __init__(self, key: Key, auxiliary: Engine, target: Engine, is_end: Tensor, arenas: Arenas) -> None:
        self._key, self._engines, self._is_end, self._arenas = key, (auxiliary, target), is_end, arenas
        found = Results.empty(key.rows, key.levels, "meta")
        self._placed, self._out = arenas.placed.bytes(size_of(key.given)), arenas.out.bytes(size_of(found))
        self.results: Results = views(found, self._out)
        shape = key.rows, 1 + key.nodes, len(is_end)
        self.logits: Tensor = arenas.logits.view_like(torch.empty(shape, device="meta"))
        self._keep = torch.arange(max(1 + key.nodes, key.width, 2), device=is_end.device)

    @cached_property
    def _sent(self) -> tuple[Tensor, dict[str, npt.NDArray[Any]]]:
        """The host's memory of a batch, and arrays over it, by the names of `mtad.device.tables.Given`."""
        memory = self._arenas.sent.bytes(len(self._placed))
        return memory, {name: tensor.numpy() for name, tensor in views(self._key.given, memory)._asdict().items()}

    @cached_property
    def _received(self) -> tuple[Tensor, Results]:
        """The host's memory of the results, and views of it."""
        memory = self._arenas.received.bytes(len(self._out))
        return memory, views(self.results, memory)

    def send(self, given: BlockInput) -> None:
        """Send a batch to the device, without waiting."""
        memory, arrays = self._sent
        write(given, self._key, arrays, len(self._is_end))
        self._placed.copy_(memory, non_blocking=True)

    def receive(self) -> Results:
        """The results, on the host as soon as all that was sent is done."""
        memory, results = self._received
        memory.copy_(self._out, non_blocking=True)
        return results

    def __call__(self) -> None:
        given: Given = views(self._key.given, self._placed)
        (auxiliary, target), key = self._engines, self._key
        scored, q, finite = None, None, given.real
        if key.levels:
            tree, drawn = self._draft(given)
            finite = ~tree.log_q.isnan().flatten(1).any(1)
            scored = block.select_nodes(tree, given, self._is_end, key.tree)
            q = stacked(drawn) if key.rules.intersection(block.CHAINS) else None
        inputs = block.target_inputs(scored, given, key.length, target.spec.capacity)
        logits = self._step(target, inputs, self._keep[: 1 + key.nodes])
        p = launches.filtered(self.logits.copy_(logits), given)
        block.decide(scored, p, q, given, finite, key.rules, self.results)
        if scored is not None and key.width > 1:
            of_target, of_auxiliary, to = block.kept_columns(self.results, scored, given)
            if key.tree:
                target.cache.keep(of_target, to)
            auxiliary.cache.keep(of_auxiliary, to)

    def _draft(self, given: Given) -> tuple[Tree, list[Tables]]:
        auxiliary, key, drawn = self._engines[0], self._key, []
        capacity = auxiliary.spec.capacity
        tree = Tree.empty(key.rows, key.levels, key.width, self._is_end.device)
        inputs, keep = block.first_inputs(given, key.length, capacity), self._keep[1:2]
        for level in range(key.levels):
            logits = self._step(auxiliary, inputs, keep, drafted=max(level - 1, 0) * key.width)
            drawn.append(launches.filtered(logits, given))
            inputs = launches.draw_level(level, tree, drawn[-1], given, self._is_end, key.length, capacity)
            keep = self._keep[: key.width]
        return tree, drawn

    def _step(self, engine: Engine, inputs: Step, keep: Tensor, drafted: int = 0) -> Tensor:
        """Logits [R, N, V] of the vocabulary that the pair shares, in the graph's own memory."""
        return engine.enqueue(base.Step(*inputs, keep, drafted=drafted))[..., : len(self._is_end)]
