"""Compile the functions of `mtad.block` to ONNX graphs for ONNX Runtime; they are part of the package.

    python -m export.onnx.block_functions

They know no model: any number of rows, levels, slots, candidates, columns and vocabulary entries will do. Standard
operators only.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import Tensor
from tqdm import tqdm

from engines.buffers import leaves
from engines.folder import write_folder
from export.onnx.graph import quiet
from mtad import block
from mtad.block import Begun, Context, Draft, Grown
from mtad.distribution import Candidates
from mtad.draft import Level, root, stack
from mtad.noise import Noise, draw_noise
from mtad.params import FORMS, DecodingParams, Form, Rule
from mtad.rows import Rows, Shape, block_shape, places, stack_rows
from runtime.commands.entry import Parser, command
from runtime.decoder.compiled.manifest import ARGUMENT, COMPILED, GRAPHS, grow_kind, write_manifest

OPSET = 22

ROWS, LEVELS, WIDTH, NARROW, CANDIDATES, LENGTH, VOCABULARY = 9, 5, 8, 3, 11, 64, 53
BRANCHING = (1, NARROW, 1, 1, 1)
STORED = (LEVELS - 1) * NARROW, 1 + (LEVELS - 1) * NARROW
"""Nodes that are scored of a mixed batch and of a branching draft: fewer than the padded tree has."""
NAMES = {
    ROWS: "rows",
    LEVELS: "levels",
    WIDTH: "width",
    NARROW: "narrow",
    CANDIDATES: "candidates",
    LENGTH: "length",
    VOCABULARY: "vocabulary",
    WIDTH * CANDIDATES: "pairs",
    **dict.fromkeys(STORED, "stored"),
    **{2 + nodes: "held" for nodes in STORED},
}
"""Sizes of the example a function is traced on. They all differ, so that a size names its dimension."""


class TracedBatch:
    """A batch to trace on; `first` and `others` are the parameters of one row and of the others."""

    def __init__(self, first: DecodingParams, others: DecodingParams) -> None:
        params = [first, *[others] * (ROWS - 1)]
        self.shape: Shape = block_shape(params, VOCABULARY)
        self.rows: Rows = stack_rows(params, self.shape, VOCABULARY, (0,))
        count = len(params)
        self.noise = draw_noise(params, [(row, 0) for row in range(count)], self.shape, VOCABULARY)
        committed = torch.arange(count) + 4
        self.context = Context(torch.zeros(count, 2, dtype=torch.int64), committed, torch.arange(LENGTH))
        self.target_logits = torch.randn(count, 1 + LEVELS * self.shape.score_width, VOCABULARY)
        self.begun: Begun = block.begin(self.context, self.rows)
        self.grown: list[Grown] = []
        above, sees = root(self.rows, self.shape), self.begun.sees
        for depth in range(1, self.shape.draft_len + 1):
            self.grow_arguments = (above, sees, *self._grow_arguments(depth, above.tokens.shape[1]))
            self.grown.append(partial(block.grow, forms=self.shape.forms)(*self.grow_arguments))
            above, sees = self.grown[-1].level, self.grown[-1].inputs.mask
        self.levels: Level = stack([grown.level for grown in self.grown])
        tree, origin = block.finish(self.levels, self.rows, self.shape.selects)
        q = Candidates(*(torch.stack(x) for x in zip(*(grown.first for grown in self.grown), strict=True)))
        self.draft = Draft(tree, origin, q)

    def _grow_arguments(self, depth: int, beams: int) -> tuple[Any, ...]:
        logits = torch.randn(len(self.context.committed), beams, VOCABULARY)
        noise = self.noise.levels[depth - 1]
        return logits, noise, places(self.rows, self.shape)[depth - 1], self.begun.holds, self.context, self.rows

    def decide_arguments(self, draft: Draft | None) -> tuple[Any, ...]:
        """Arguments to trace `mtad.block.decide` on."""
        logits = self.target_logits if draft else self.target_logits[:, :1]
        noise = self.noise
        return draft, logits, logits.clone(), noise.accept, noise.bonus, self.context.committed, self.rows


def functions() -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...], Shape]]:
    """Every function to compile: name, the function, arguments to trace it on, and the block's shape."""
    base = DecodingParams(method="mtad", draft_len=LEVELS, beam_width=WIDTH, top_k=CANDIDATES)
    narrow = DecodingParams(method="mmtad", draft_len=LEVELS - 1, beam_width=NARROW, top_k=CANDIDATES)
    branching = DecodingParams(method="specinfer", draft_len=LEVELS, branching=BRANCHING, top_k=CANDIDATES)
    best, mixed, branches = TracedBatch(base, base), TracedBatch(narrow, base), TracedBatch(branching, base)
    whole = TracedBatch(branching, branching)
    yield "begin", block.begin, (mixed.context, mixed.rows), mixed.shape
    chain = TracedBatch(*[replace(base, method="block")] * 2)
    yield f"grow_{grow_kind(['chain'], 1)}", partial(block.grow, forms=["chain"]), chain.grow_arguments, chain.shape
    every: tuple[tuple[TracedBatch, tuple[Form, ...]], ...]
    every = (mixed, ("beams",)), (mixed, ("chain", "beams")), (branches, FORMS)
    for example, forms in every:
        first = (root(example.rows, example.shape), example.begun.sees, *example._grow_arguments(1, 1))
        for arguments in (first, example.grow_arguments):
            name = f"grow_{grow_kind(forms, arguments[0].tokens.shape[1])}"
            yield name, partial(block.grow, forms=forms), arguments, example.shape
    for name, example in (("best", best), ("mixed", mixed), ("whole", whole)):
        finish = partial(block.finish, selects=example.shape.selects)
        yield f"finish_{name}", finish, (example.levels, example.rows), example.shape
    for name, example, tree in (
        ("root", best, None),
        ("chain", best, best.draft.tree),
        ("tree", mixed, mixed.draft.tree),
    ):
        yield f"arrange_{name}", block.arrange, (tree, example.context, example.rows), example.shape
    yield "decide_root", partial(_decide, ()), best.decide_arguments(None), best.shape
    for rule in COMPILED:
        for name, example in (("chain", best), ("tree", mixed)):
            arguments = example.decide_arguments(example.draft)
            yield f"decide_{rule}_{name}", partial(_decide, (rule,)), arguments, example.shape


def _decide(
    rules: tuple[Rule, ...],
    draft: Draft | None,
    adjusted: Tensor,
    logits: Tensor,
    accept: Tensor,
    bonus: Tensor,
    committed: Tensor,
    rows: Rows,
) -> Any:
    """`mtad.block.decide` for rows of one rule, on tensors alone."""
    noise = Noise((), accept, bonus, accept[:, :0])
    return block.decide(draft, adjusted, logits, noise, committed, rows, rules)


class _Flat(torch.nn.Module):
    """A function of nested tuples as one of a list; an axis of nodes comes as two, levels and slots."""

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...], split: list[bool]) -> None:
        super().__init__()
        self.function, self.arguments, self.split = function, arguments, split

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        joined = [x.flatten(1, 2) if split else x for x, split in zip(tensors, self.split, strict=True)]
        return leaves(self.function(*_rebuild(self.arguments, iter(joined))))


def _rebuild(like: Any, tensors: Iterator[Tensor]) -> Any:
    if isinstance(like, Tensor):
        return next(tensors)
    if like is None:
        return None
    parts = [_rebuild(part, tensors) for part in like]
    return type(like)(*parts) if hasattr(like, "_fields") else tuple(parts)


def compile_function(path: Path, function: Callable[..., Any], arguments: tuple[Any, ...], shape: Shape) -> None:
    """Write the graph of one function."""
    nodes = {LEVELS * width: width for width in (shape.width, shape.score_width) if width > 1}
    tensors, split = [], []
    for tensor in leaves(arguments):
        width = nodes.get(tensor.shape[1]) if tensor.dim() > 1 else None
        split.append(width is not None)
        tensors.append((tensor if width is None else torch.unflatten(tensor, 1, (LEVELS, width))).clone())
    dims: dict[int, Any] = {n: torch.export.Dim(name) for n, name in NAMES.items()}
    dims |= {1 + LEVELS: dims[LEVELS] + 1, **{1 + n: torch.export.Dim("scored") for n in nodes}}
    dims |= {2 + n: torch.export.Dim(f"held{n}") for n in (LEVELS, *nodes)}
    dynamic = [{i: dims[n] for i, n in enumerate(x.shape) if n in dims} for x in tensors]
    with quiet(), torch.no_grad():
        program = torch.export.export(
            _Flat(function, arguments, split),
            (tensors,),
            dynamic_shapes=(dynamic,),
            prefer_deferred_runtime_asserts_over_guards=True,
        )
        exported = torch.onnx.export(
            program,
            (tensors,),
            dynamo=True,
            opset_version=OPSET,
            verbose=False,
            input_names=[f"{ARGUMENT}{i}" for i in range(len(tensors))],
        )
        assert exported is not None
        exported.save(str(path))
    _tidy(path)


def _tidy(path: Path) -> None:
    """Drop arguments that are not used, and the exporter's notes on its own sources."""
    model = onnx.load(path)
    used = {name for node in model.graph.node for name in node.input}
    kept = [value for value in model.graph.input if value.name in used]
    del model.graph.input[:]
    model.graph.input.extend(kept)
    for node in model.graph.node:
        node.ClearField("metadata_props")
        node.ClearField("doc_string")
    del model.graph.value_info[:]
    for value in [*model.graph.input, *model.graph.output]:
        value.ClearField("metadata_props")
    del model.graph.metadata_props[:]
    del model.metadata_props[:]
    model.producer_name, model.producer_version = "mtad", ""
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, path)


def write_functions(folder: Path) -> None:
    """Compile every function into `folder`, and say what they were compiled from."""
    with write_folder(folder) as temporary:
        names = []
        for name, function, arguments, shape in tqdm(list(functions()), desc="compile", unit="graph", file=sys.stderr):
            compile_function(temporary / f"{name}.onnx", function, arguments, shape)
            names.append(name)
        versions = {package: version(package) for package in ("onnx", "onnxscript", "torch")}
        write_manifest(temporary, names, versions)


@command
def main() -> None:
    """Compile all functions into the package."""
    Parser(
        prog="export.onnx.block_functions", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    write_functions(GRAPHS)
    print(GRAPHS)


if __name__ == "__main__":
    main()
