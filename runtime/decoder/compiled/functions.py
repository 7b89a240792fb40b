"""The functions of `mtad.block`, compiled for ONNX Runtime (CPU)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from operator import is_not
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engines.buffers import Slab, leaves, size_of
from engines.onnx.binding import Binding, open_session
from mtad import block
from mtad.block import Begun, Context, Draft, Grown, Inputs
from mtad.distributions.candidates import Candidates
from mtad.draft.levels import Level
from mtad.draft.live import Live
from mtad.draft.tree import TokenTree
from mtad.errors import InvalidInput
from mtad.methods import Rule
from mtad.noise.host import Noise
from mtad.rows import Rows, Shape, choose_rows
from mtad.rules.accept import Accepted
from runtime.decoder.compiled.manifest import ARGUMENT, COMPILED, GRAPHS, grow_kind, read_graphs
from runtime.decoder.eager import BlockFunctions, Given, TorchFunctions, filtered_levels

SHAPES = 64
"""Block shapes whose bindings are kept. All have the same memory."""


class CompiledFunctions(TorchFunctions):
    """The graphs of `graphs/`. Owns their sessions, the memory they write to and, for each shape, bindings.

    A draft and its scoring may be of different shapes, so each of the two has memory of its own.

    Raises:
        InvalidInput: the graphs are missing or were not made from this version of `mtad`.
    """

    def __init__(self, folder: Path = GRAPHS) -> None:
        paths = read_graphs(folder)
        self._slabs = Slab(), Slab()
        self.session = cache(lambda name: open_session(paths[name], threads=1, shared=True))
        self._calls = lru_cache(SHAPES)(self._calls_of)

    def of(self, rows: int, shape: Shape, length: int) -> BlockFunctions:
        return self._calls(rows, shape, length)

    def _calls_of(self, rows: int, shape: Shape, length: int) -> _ShapeCalls:
        if shape.candidates < shape.width:
            raise InvalidInput("beam_width", shape.width, "the vocabulary is smaller; give at most its size")
        return _ShapeCalls(self.session, shape, *self._slabs)


class _ShapeCalls(BlockFunctions):
    """The calls of one block shape, in order, each on its part of the memory."""

    def __init__(self, session: Callable[[str], Any], shape: Shape, drafting: Slab, scoring: Slab) -> None:
        super().__init__(shape)
        self._session = session
        self._drafting, self._scoring = _Memory(drafting), _Memory(scoring)
        self._calls: dict[tuple[str, int], _Call] = {}
        self._levels: _Levels | None = None
        self._draft: Draft | None = None

    def begin(self, context: Context, rows: Rows) -> Begun:
        begun: Begun = self._run("begin", (context, rows), lambda: self._drafting.like(block.begin(context, rows)))
        return begun

    def grow(self, depth: int, given: Given, live: Live | None = None) -> Grown:
        if live is not None or False not in self._shape.tables:
            return super().grow(depth, given, live)

        def memory() -> Grown:
            like = block.grow(*given, self._shape.forms)
            if self._levels is None:
                self._levels = self._drafting.like(_Levels.of(like, self._shape.draft_len))
            return self._levels.at(depth - 1, *self._drafting.like((like.inputs, like.above)))

        kind = grow_kind(self._shape.forms, given[0].tokens.shape[1])
        grown: Grown = self._run(f"grow_{kind}", given, memory, depth)
        if True not in self._shape.tables:
            return grown
        other = block.grow(*given, self._shape.forms, tables=(True,))
        level, inputs = choose_rows(given[-1].tabulated, (other.level, other.inputs), (grown.level, grown.inputs))
        return Grown(level, grown.first + other.first, inputs, grown.above + other.above)

    def finish(self, levels: Sequence[Grown], rows: Rows) -> Draft:
        if self._shape.live or True in self._shape.tables:
            return super().finish(levels, rows)
        if self._levels is None:  # a draft that stopped early was grown as one of another shape
            self._levels = self._drafting.like(_Levels.of(levels[0], len(levels)))
        if levels[0].level.tokens.data_ptr() != self._levels.level.tokens.data_ptr():
            self._levels.take(levels)

        def memory() -> tuple[TokenTree, Tensor]:
            tree, origin, *_ = BlockFunctions.finish(self, levels, rows)
            laid_out: tuple[TokenTree, Tensor] = self._drafting.like((tree, origin))
            return laid_out

        kind = ("best" if self._shape.score_width == 1 else "mixed") if self._shape.selects else "whole"
        tree, origin = self._run(f"finish_{kind}", (self._levels.level, rows), memory)
        if self._draft is None:
            self._draft = Draft(tree, origin, self._levels.first)
        return self._draft._replace(above=filtered_levels(levels)) if self._shape.children else self._draft

    def arrange(self, tree: TokenTree | None, context: Context, rows: Rows) -> Inputs:
        kind = "root" if tree is None else "chain" if tree.width == 1 else "tree"
        arguments = tree, context, rows
        inputs: Inputs = self._run(f"arrange_{kind}", arguments, lambda: self._scoring.like(block.arrange(*arguments)))
        return inputs

    def decide(
        self, draft: Draft | None, adjusted: Tensor, logits: Tensor, noise: Noise, committed: Tensor, rows: Rows
    ) -> Accepted:
        if True in self._shape.tables:
            tabulated = _of_kind(draft, -1) if draft else None
            other = block.decide(tabulated, adjusted, logits, noise, committed, rows, self._shape.rules, (True,))
            if False not in self._shape.tables:
                return other
            draft = _of_kind(draft, 0) if draft else None

        def under(rule: Rule | None) -> Accepted:
            """The outcome under one rule, for all rows."""
            if rule is not None and rule not in COMPILED:
                return block.decide(draft, adjusted, logits, noise, committed, rows, (rule,))
            plain = draft._replace(above=(), live=None) if draft and (draft.above or draft.live) else draft
            arguments = plain, adjusted, logits, noise.accept, noise.bonus, committed, rows
            name = "decide_root" if draft is None else f"decide_{rule}_{'chain' if draft.tree.width == 1 else 'tree'}"

            def like() -> Accepted:
                return block.decide(draft, adjusted, logits, noise, committed, rows, () if rule is None else (rule,))

            decided: Accepted = self._run(name, arguments, lambda: self._scoring.like(like()))
            return decided

        accepted, *others = map(under, (self._shape.rules if draft else ()) or (None,))
        for number, theirs in enumerate(others, 1):
            accepted = choose_rows(rows.rule == number, theirs, accepted)
        return choose_rows(rows.tabulated, other, accepted) if True in self._shape.tables else accepted

    def _run(self, name: str, arguments: tuple[Any, ...], memory: Callable[[], Any], at: int = 0) -> Any:
        """What a graph gives, in memory that is laid out at its first call."""
        call = self._calls.get((name, at))
        if call is None:
            call = self._calls[name, at] = _Call(self._session(name), memory(), self._shape.draft_len)
        call(*arguments)
        return call.outcome


def _of_kind(draft: Draft, number: int) -> Draft:
    """The draft with one kind of distributions, lists or tables."""
    return draft._replace(q=(draft.q[number],), above=tuple((level[number],) for level in draft.above))


class _Memory:
    """The part of a slab that one shape's calls have, from its beginning on."""

    def __init__(self, slab: Slab) -> None:
        self._slab, self._end = slab, 0

    def like(self, tensors: Any) -> Any:
        start = self._end
        self._end += size_of(tensors)
        return self._slab.like(tensors, start)


class _Levels(NamedTuple):
    """Memory of a draft's levels, stacked: what each `grow` writes a slice of and `finish` reads whole."""

    level: Level
    first: tuple[Candidates]

    @classmethod
    def of(cls, grown: Grown, count: int) -> _Levels:
        """The shapes of `count` levels like `grown`."""

        def stacked(x: Tensor) -> Tensor:
            return torch.empty(count, *x.shape, dtype=x.dtype, device="meta")

        return cls(Level(*map(stacked, grown.level)), (Candidates(*map(stacked, grown.first[0])),))

    def at(self, index: int, inputs: Inputs, above: tuple[Candidates, ...]) -> Grown:
        """One level's memory, and that of what is not stacked."""
        first = (Candidates(*(x[index] for x in self.first[0])),)
        return Grown(Level(*(x[index] for x in self.level)), first, inputs, above)

    def take(self, levels: Sequence[Grown]) -> None:
        for index, grown in enumerate(levels):
            for ours, theirs in zip((*self.level, *self.first[0]), (*grown.level, *grown.first[0]), strict=True):
                ours[index] = theirs


class _Call:
    """One function on its own memory, `outcome`. Arguments are bound again only where they are other tensors."""

    def __init__(self, session: Any, outcome: Any, levels: int) -> None:
        self.outcome = outcome
        self._binding, self._levels = Binding(session), levels
        self._inputs = [(x.name, int(x.name.removeprefix(ARGUMENT)), len(x.shape)) for x in session.get_inputs()]
        self._arguments: tuple[Any, ...] = ()
        for output, tensor in zip(session.get_outputs(), leaves(outcome), strict=True):
            self._binding.output(output.name, tensor)

    def __call__(self, *arguments: Any) -> None:
        bound = self._arguments
        if not bound or any(map(is_not, arguments, bound)):
            tensors = leaves(arguments)
            for name, number, rank in self._inputs:
                tensor = tensors[number]
                self._binding.input(name, tensor, self._by_level(tensor) if rank > tensor.dim() else None)
            self._arguments = arguments
        self._binding.run()

    def _by_level(self, tensor: Tensor) -> tuple[int, ...]:
        """The shape of [R, N, ..] with its nodes by levels and slots, as a graph takes them."""
        levels = max(self._levels, 1)
        return tensor.shape[0], levels, tensor.shape[1] // levels, *tensor.shape[2:]
