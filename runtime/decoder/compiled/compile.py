"""Compile the functions of `mtad.block` to ONNX graphs for ONNX Runtime; they are part of the package.

    python -m runtime.decoder.compiled.compile

They know no model: any number of rows, levels, slots, candidates, columns and vocabulary entries will do. Standard
operators only.
"""

from __future__ import annotations

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
from torch.utils._pytree import tree_map_only
from tqdm import tqdm

from engines.buffers import leaves
from engines.folder import write_folder
from engines.quiet import quiet
from mtad import block
from mtad.block import Context, Draft, Grown
from mtad.draft.levels import Level, stack
from mtad.methods import FORMS, Form, Rule
from mtad.noise.host import Noise
from mtad.params import DecodingParams
from mtad.rows import Shape
from runtime.decoder.batch_builder import BatchBuilder
from runtime.decoder.compiled.manifest import ARGUMENT, COMPILED, GRAPHS, grow_kind, write_manifest
from runtime.decoder.eager import BlockFunctions, Given

OPSET = 22

ROWS, LEVELS, WIDTH, NARROW, CANDIDATES, LENGTH, VOCABULARY = 9, 5, 8, 4, 11, 64, 53
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
"""Sizes of the example a function is traced on. They all differ, so that a size names its dimension; none of them is
LEVELS * WIDTH or LEVELS * NARROW, the nodes of a tree."""


class TracedBatch:
    """A batch to trace on; `first` and `others` are the parameters of one row and of the others."""

    def __init__(self, first: DecodingParams, others: DecodingParams) -> None:
        tails, committed, keys = [(0, 0)] * ROWS, [4 + row for row in range(ROWS)], [(row, 0) for row in range(ROWS)]
        self.batch = BatchBuilder(VOCABULARY, (0,)).build([first, *[others] * (ROWS - 1)], tails, committed, keys)
        self.shape, self.rows = self.batch.shape, self.batch.rows
        self.context = Context(self.batch.last_two, self.batch.committed, torch.arange(LENGTH))
        self.target_logits = torch.randn(ROWS, 1 + LEVELS * self.shape.score_width, VOCABULARY)
        functions = BlockFunctions(self.shape)
        begun, grown = functions.begin(self.context, self.rows), list[Grown]()
        above, sees, self.grow_arguments = self.batch.root, begun.sees, list[Given]()
        for depth, place in enumerate(self.batch.places, 1):
            logits, noise = torch.randn(ROWS, above.tokens.shape[1], VOCABULARY), self.batch.noise.levels[depth - 1]
            self.grow_arguments.append((above, sees, logits, noise, place, begun.holds, self.context, self.rows))
            grown.append(functions.grow(depth, self.grow_arguments[-1]))
            above, sees = grown[-1].level, grown[-1].inputs.mask
        self.levels: Level = stack([level.level for level in grown])
        self.draft = functions.finish(grown, self.rows)

    def decide_arguments(self, draft: Draft | None) -> tuple[Any, ...]:
        """Arguments to trace `mtad.block.decide` on."""
        logits = self.target_logits if draft else self.target_logits[:, :1]
        noise = self.batch.noise
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
    every: tuple[tuple[TracedBatch, tuple[Form, ...]], ...]
    every = (chain, ("chain",)), (mixed, ("beams",)), (mixed, ("chain", "beams")), (branches, FORMS)
    for example, forms in every:
        grow = partial(block.grow, forms=forms)
        levels = {grow_kind(forms, arguments[0].tokens.shape[1]): arguments for arguments in example.grow_arguments}
        for kind, arguments in levels.items():
            yield f"grow_{kind}", grow, arguments, example.shape
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


def _decide(rules: tuple[Rule, ...], draft: Draft | None, *tensors: Any) -> Any:
    """`mtad.block.decide` for rows of one rule, on tensors alone."""
    adjusted, logits, accept, bonus, committed, rows = tensors
    return block.decide(draft, adjusted, logits, Noise((), accept, bonus, accept[:, :0]), committed, rows, rules)


class _Flat(torch.nn.Module):
    """A function of nested tuples as one of a list; an axis of nodes comes as two, levels and slots."""

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...], split: list[bool]) -> None:
        super().__init__()
        self.function, self.arguments, self.split = function, arguments, split

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        joined = [x.flatten(1, 2) if split else x for x, split in zip(tensors, self.split, strict=True)]
        given = iter(joined)
        return leaves(self.function(*tree_map_only(Tensor, lambda _: next(given), self.arguments)))


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


def main() -> None:
    """Compile all functions into the package."""
    write_functions(GRAPHS)
    print(GRAPHS)


if __name__ == "__main__":
    main()
