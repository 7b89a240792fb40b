"""Compiles the kernels that filter and draw for GPUs that need not be here; one JSON line each.

    python -m tests.support.level_compiler        each kernel for some capabilities, as the tests do
    python -m tests.support.level_compiler all    each for all, and the levels that spill registers

Run without TRITON_INTERPRET.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import product
from typing import Any

from triton.compiler import ASTSource

from mtad.rows import BLOCK, LISTED
from runtime.decoder.cuda_graph import draw_kernels, list_kernels, noise_kernels, table_kernels
from runtime.decoder.cuda_graph.fused import CELLS, CHUNK, COLUMNS, NUMBERS, TILE, warps
from tests.support.attention_compiler import compile_source, resources

LEVEL = {"LISTS": True, "TABLES": True, "CHILDREN": 0, "LIVE": False, "WIDTH": 4, "SLOTS": 4, "BEAMS": 4}
CASES: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("scan_lists", 80, {}),
    ("scan_lists", 120, {}),
    ("settle_lists", 89, {}),
    ("scan_tables", 90, {}),
    ("settle_tables", 80, {}),
    ("settle_tables", 90, {}),
    ("settle_tables", 120, {}),
    ("hash_numbers", 90, {}),
    ("draw_level", 80, LEVEL),
    ("draw_level", 90, LEVEL | {"TABLES": False}),
    ("draw_level", 90, LEVEL | {"WIDTH": 16, "SLOTS": 16, "BEAMS": 16}),
    ("draw_level", 100, LEVEL | {"CHILDREN": 4, "LIVE": True}),
    ("draw_level", 80, LEVEL | {"CHILDREN": 4, "WIDTH": 8, "SLOTS": 8, "BEAMS": 8}),
    ("draw_level", 120, LEVEL | {"LISTS": False, "WIDTH": 1, "SLOTS": 1, "BEAMS": 1}),
)
"""Kernel, compute capability times 10, constants that are not a vocabulary's of 128,256 tokens."""
CAPABILITIES = (80, 89, 90, 100, 120)
SPILLING = tuple(
    ("draw_level", LEVEL | {"CHILDREN": children, "WIDTH": width, "SLOTS": width, "BEAMS": width})
    for children, width in ((4, 16), (4, 32), (0, 64))
)
"""Levels that do not fit into registers where they are drawn from tables."""
TYPES = {
    "*i64": "keys ids scratch last tokens parents paths write_at above_paths holds committed behind form"
    " branch_at live_tokens live_lengths states uniforms list_slots table_slots",
    "*i1": "tabulated greedy drafted growing ended mask above_growing above_ended sees ends_here ends stops_at_eos"
    " replacement",
    "i32": "count lists tables list_size table_size"
    " positions row_stride position_stride size chunks candidates level beams columns",
}
KERNELS = (list_kernels, table_kernels, draw_kernels, noise_kernels)
SINGLE = "count lists tables list_size table_size positions level beams columns uniform_row gumbel_row table_row"
SINGLE += " row_stride position_stride chunks"


def compile_kernel(name: str, capability: int, constants: dict[str, Any]) -> dict[str, Any]:
    """Compile as a launch does whose pointers and sizes are multiples of 16."""
    kernel = next(getattr(m, name) for m in KERNELS if hasattr(m, name))
    every: dict[str, Any] = {"LIST": LISTED, "CHUNK": CHUNK, "CHUNKS": 32, "TILE": TILE, "BLOCK": BLOCK, "BLOCKS": 512}
    every |= {"LEVELS": 4, "DEPTHS": 4, "COLUMNS": COLUMNS, "NUMBERS": NUMBERS} | constants
    every["COLUMNS"] = min(COLUMNS, CELLS // every.get("SLOTS", 1))
    kinds = {argument: kind for kind, names in TYPES.items() for argument in names.split()}
    kinds |= dict.fromkeys(("uniform_row", "gumbel_row", "table_row"), "i32") | dict.fromkeys(every, "constexpr")
    if name == "draw_level":
        kinds["positions"] = "*i64"
    else:
        kinds["top_k"] = "*i64"
    signature = {argument: kinds.get(argument, "*fp32") for argument in kernel.arg_names}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, argument in enumerate(kernel.arg_names)
        if signature[argument].startswith("*") or (argument not in SINGLE.split() and not argument.isupper())
    }
    every = {key: value for key, value in every.items() if key in kernel.arg_names}
    count = 16 if name == "settle_tables" else warps(constants["WIDTH"]) if name == "draw_level" else 8
    source = ASTSource(kernel, signature, every, aligned)
    compiled, seconds = compile_source(source, capability, {"num_warps": count})
    found = {"seconds": seconds, "shared": compiled.metadata.shared, "warps": count, **resources(compiled.asm["cubin"])}
    return {"name": name, "capability": capability, **constants, **found}


def every_case() -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Each kernel of `CASES` for each capability, and the levels that spill."""
    kernels = {str(case[::2]): case[::2] for case in CASES}
    for (name, constants), capability in product((*kernels.values(), *SPILLING), CAPABILITIES):
        yield name, capability, constants


if __name__ == "__main__":
    for case in every_case() if sys.argv[1:] == ["all"] else CASES:
        print(json.dumps(compile_kernel(*case)), flush=True)
