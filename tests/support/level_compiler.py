"""Compiles the kernels that filter and draw for GPUs that need not be here; one JSON line each.

Run without TRITON_INTERPRET.
"""

from __future__ import annotations

import json
from typing import Any

from triton.compiler import ASTSource

from mtad.device import filter_kernels, level_kernels
from mtad.device.launches import CELLS, CHUNK, COLUMNS, TILE
from mtad.device.tables import BLOCK
from tests.support.attention_compiler import compile_source, resources

LEVEL = {"WIDTH": 4, "SLOTS": 4, "BEAMS": 4, "FIRST": False}
CASES: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("scan_tables", 90, {}),
    ("settle_tables", 120, {}),
    ("draw_level", 90, LEVEL | {"BEAMS": 1, "FIRST": True}),
    ("draw_level", 100, LEVEL | {"WIDTH": 16, "SLOTS": 16, "BEAMS": 16}),
)
"""Kernel, compute capability times 10, constants that are not a vocabulary's of 128,256 tokens."""
TYPES = {
    "*i64": "scratch last tokens ways step_tokens positions write_at committed draft_len width top_k",
    "*i1": "greedy drafted growing ended mask real_row is_end stops_at_eos",
    "*fp64": "log_q log_confidence",
    "i32": "row_stride position_stride size chunks level columns capacity",
}
KERNELS = (filter_kernels, level_kernels)
SINGLE = "positions level columns capacity row_stride position_stride chunks"


def compile_kernel(name: str, capability: int, constants: dict[str, Any]) -> dict[str, Any]:
    """Compile as a launch does whose pointers and sizes are multiples of 16."""
    kernel = next(getattr(m, name) for m in KERNELS if hasattr(m, name))
    every: dict[str, Any] = {"CHUNK": CHUNK, "CHUNKS": 32, "TILE": TILE, "BLOCK": BLOCK, "BLOCKS": 512, "LEVELS": 4}
    every |= constants
    every["COLUMNS"] = min(COLUMNS, CELLS // every.get("SLOTS", 1))
    kinds = {argument: kind for kind, names in TYPES.items() for argument in names.split()}
    kinds |= dict.fromkeys(every, "constexpr") | ({} if name == "draw_level" else {"positions": "i32"})
    signature = {argument: kinds.get(argument, "*fp32") for argument in kernel.arg_names}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, argument in enumerate(kernel.arg_names)
        if signature[argument].startswith("*") or (argument not in SINGLE.split() and not argument.isupper())
    }
    every = {key: value for key, value in every.items() if key in kernel.arg_names}
    count = 16 if name == "settle_tables" else 16 if constants.get("WIDTH", 1) > 16 else 8
    source = ASTSource(kernel, signature, every, aligned)
    compiled, seconds = compile_source(source, capability, {"num_warps": count})
    found = {"seconds": seconds, "shared": compiled.metadata.shared, "warps": count, **resources(compiled.asm["cubin"])}
    return {"name": name, "capability": capability, **constants, **found}


if __name__ == "__main__":
    for case in CASES:
        print(json.dumps(compile_kernel(*case)), flush=True)
