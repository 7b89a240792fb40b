"""Compiles the Triton kernels for GPUs that need not be here; one JSON line each. Run without TRITON_INTERPRET.

They are those of attention and layers, and those that filter and draw.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import triton
from triton._utils import find_paths_if
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engines.base import KV_PAGE
from engines.pytorch import attention_kernels, layer_kernels
from engines.pytorch.attention import CHUNK, MEMBERS, MIN_SPLIT_COLUMNS, padded, tile
from engines.pytorch.layer_ops import ADDED_TILES, GATED_TILES, NARROW, ProductTile
from mtad.device import cut_kernels, decision_kernels, filter_kernels, launches, level_kernels, tables
from mtad.device.tables import BLOCK

ITEMSIZE = {"fp32": 4, "fp16": 2, "bf16": 2}
CASES = (
    ("attend_split", 80, "fp16", 128, 64),
    ("attend_split", 89, "bf16", 128, 1024),
    ("attend_split", 90, "bf16", 128, 16),
    ("attend_split", 90, "fp32", 128, 16),
    ("combine_splits", 90, "bf16", 128, 16),
    ("store_columns", 80, "bf16", 128, 16),
    ("rms_norm", 90, "bf16", 128, 16),
    ("gate", 120, "bf16", 128, 16),
)
"""Kernel, compute capability times 10, dtype, head size, queries of a row and KV head."""
MEMORY = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 120: 99 * 1024}
"""Bytes of shared memory that a program may have, by compute capability."""
LEVEL = {"WIDTH": 4, "SLOTS": 4, "BEAMS": 4, "FIRST": False}
LEVEL_CASES: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("scan_tables", 90, {}),
    ("gather_candidates", 90, {}),
    ("settle_tables", 120, {}),
    ("weigh_blocks", 90, {}),
    ("spread", 120, {}),
    ("emit", 90, {"WEIGHED": False}),
    ("emit", 120, {"WEIGHED": True}),
    ("draw_level", 90, LEVEL | {"BEAMS": 1, "FIRST": True}),
    ("draw_level", 100, LEVEL | {"WIDTH": 16, "SLOTS": 16, "BEAMS": 16}),
)
"""Kernel, compute capability times 10, constants that are not a vocabulary's of 128,256 tokens."""
TYPES = {
    "*i64": "last tokens ways committed draft_len width top_k rule last_two places lengths longest paths node parents"
    " depths origins keys lows highs",
    "*i32": "candidates",
    "*i1": "greedy tree reads_draft drafted growing ended ends real is_end stops_at_eos finite ancestors",
    "*fp64": "log_q log_confidence threshold bounds draft accept bonus",
    "i32": "positions row_stride position_stride size chunks level columns capacity nodes wanted parents_row depths_row"
    " ancestors_row",
}
"""Of arguments, and of what is in tuples of them, by name; others are float32."""
STEP = "*i64", "*i64", "*i64", "*i1"
SINGLE = "positions level columns capacity chunks nodes wanted parents_row depths_row ancestors_row"


def compile_kernel(name: str, capability: int, dtype: str, head_dim: int, queries: int) -> dict[str, Any]:
    """Compile as a launch does whose pointers and strides are multiples of 16."""
    module = attention_kernels if hasattr(attention_kernels, name) else layer_kernels
    kernel, size = getattr(module, name), tile(queries, head_dim, ITEMSIZE[dtype])
    constants: dict[str, Any] = {"GROUP": 4, "HEADS": 8, "MEMBERS": MEMBERS, "PAGE": KV_PAGE, "CHUNK": CHUNK}
    constants |= {"HEAD": head_dim, "WIDTH": 4096 if name == "rms_norm" else padded(head_dim), "ROTARY": head_dim}
    constants |= {"QUERIES": size.queries, "COLUMNS": size.columns, "SHORTEST": MIN_SPLIT_COLUMNS, "SIZE": 4096}
    constants |= {"SOFTCAPPED": False, "WINDOWED": False, "SPLIT": True, "NORMED": True}
    constants |= {"ACTIVATION": "gelu_tanh", "BLOCK": 1024}
    pointers = ("query", "key", "value", "keys", "values", "out", "rotated", "cos", "sin", "x", "weight")
    kinds = dict.fromkeys(kernel.arg_names, "i32") | dict.fromkeys(("scale", "softcap", "eps", "offset"), "fp32")
    kinds |= dict.fromkeys((*pointers, "query_weight", "key_weight"), f"*{dtype}")
    kinds |= {"mask": "*u8", "write_at": "*i64", "positions": "*i64", "page_table": "*i32"}
    kinds |= {"partial": "*fp32", "statistics": "*fp32"}
    single = {"write_at", "write_at_row", "positions", "positions_row", "kv_heads", "steps", "splits", "window"}
    single |= {"page_table", "page_table_row", "pages", "scale", "softcap", "eps", "offset", "second", "third", "heads"}
    options = {"num_warps": size.warps, "num_stages": size.stages} if name == "attend_split" else {}
    return {"name": name, "dtype": dtype, **compiled(kernel, kinds, constants, single, capability, options)}


def compile_product(tile: ProductTile, gated: bool, capability: int) -> dict[str, Any]:
    """Compile the product of few vectors with a matrix, by one of its tiles; `memory` is what that is taken to need."""
    kernel, block = layer_kernels.narrow_product, tile.outputs // 2 if gated else tile.outputs
    constants = {"SIZE": 4096, "OUTPUTS": 14336, "ACTIVATION": "silu" if gated else "", "NORMED": gated}
    constants |= {"VECTORS": NARROW, "BLOCK": block, "DEPTH": tile.inputs, "STAGES": tile.stages}
    kinds = dict.fromkeys(kernel.arg_names, "*bf16") | {"vectors": "i32", "eps": "fp32", "offset": "fp32"}
    made = compiled(kernel, kinds, constants, {"vectors", "eps", "offset"}, capability, {"num_warps": tile.warps})
    return {"name": "narrow_product", "memory": tile.memory, **made}


def compile_level(name: str, capability: int, constants: dict[str, Any]) -> dict[str, Any]:
    """Compile as a launch does whose pointers and sizes are multiples of 16."""
    modules = filter_kernels, cut_kernels, decision_kernels, level_kernels
    kernel = next(getattr(module, name) for module in modules if hasattr(module, name))
    sizes = {"CHUNK": launches.CHUNK, "CHUNKS": 32, "TILE": launches.CANDIDATES, "BLOCK": BLOCK, "BLOCKS": 512}
    every: dict[str, Any] = {**sizes, "DEPTHS": 8, "NODES": 16, "LEVELS": 4, **constants}
    every["COLUMNS"] = min(launches.COLUMNS, launches.CELLS // every.get("SLOTS", 1))
    known = {argument: kind for kind, names in TYPES.items() for argument in names.split()}
    kinds: dict[str, Any] = dict.fromkeys(kernel.arg_names, "*fp32") | known | {"step": STEP}
    for argument, annotation in kernel.fn.__annotations__.items():
        if hasattr(tables, annotation):
            own = getattr(tables, annotation)
            kinds[argument] = own(*(known.get(field, "*fp32") for field in own._fields))
    single = set(SINGLE.split())
    count = 16 if constants.get("WIDTH", 1) > 16 else 4 if name == "emit" else 8
    return {"name": name, **constants, **compiled(kernel, kinds, every, single, capability, {"num_warps": count})}


def compiled(
    kernel: Any,
    kinds: dict[str, Any],
    constants: dict[str, Any],
    single: set[str],
    capability: int,
    options: dict[str, Any],
) -> dict[str, Any]:
    """What becomes of a kernel that is compiled anew; arguments are multiples of 16, but for those of `single`.

    Args:
        kinds: each argument's type, a tuple of types for a tuple.
    """
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    signature = {name: "constexpr" if name in constants else kinds[name] for name in kernel.arg_names}
    of_16 = [place for place, name in enumerate(kernel.arg_names) if name not in single | constants.keys()]
    paths = find_paths_if(list(signature.values()), lambda path, kind: path[0] in of_16)
    source = ASTSource(kernel, signature, constants, {path: [["tt.divisibility", 16]] for path in paths})
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.always_compile = True
        began = time.perf_counter()
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        seconds = round(time.perf_counter() - began, 2)
    ptx = made.asm["ptx"]
    return {
        "capability": capability,
        "seconds": seconds,
        "shared": made.metadata.shared,
        "spilled": spilled(made.asm["cubin"]),
        "tensor_cores": len(re.findall(r"\b(?:wgmma\.mma_async|mma)\.sync", ptx)),
        "asynchronous": len(re.findall(r"cp\.async\.c[ag]", ptx)),
        "byte_loads": len(re.findall(r"ld\.global[.\w:]*\.b8\b", ptx)),
    }


def spilled(cubin: bytes) -> int:
    """Bytes of a thread's registers that it spills."""
    tool = triton.knobs.nvidia.cuobjdump.path
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        text = subprocess.run([tool, "--dump-resource-usage", file], capture_output=True, text=True, check=True).stdout
    return int(re.search(r"\bSTACK:(\d+)", text)[1])  # type: ignore[index]


if __name__ == "__main__":
    for case in CASES:
        print(json.dumps(compile_kernel(*case)), flush=True)
    for gated, tiles in ((False, ADDED_TILES), (True, GATED_TILES)):
        for one in tiles:
            for capability, memory in MEMORY.items():
                if one.memory <= memory:
                    print(json.dumps(compile_product(one, gated, capability)), flush=True)
    for level in LEVEL_CASES:
        print(json.dumps(compile_level(*level)), flush=True)
