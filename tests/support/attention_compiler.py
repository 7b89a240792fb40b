"""Compiles the Triton kernels for GPUs that need not be here; one JSON line each. Run without TRITON_INTERPRET."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engines.base import KV_PAGE
from engines.pytorch import attention_kernels, layer_kernels
from engines.pytorch.attention import CHUNK, MEMBERS, MIN_SPLIT_COLUMNS, padded, tile

ITEMSIZE = {"fp32": 4, "fp16": 2, "bf16": 2}
CASES = (
    ("attend_split", 80, "fp16", 128, 64),
    ("attend_split", 89, "bf16", 128, 1024),
    ("attend_split", 90, "bf16", 128, 16),
    ("attend_split", 90, "bf16", 128, 64),
    ("attend_split", 90, "fp32", 128, 16),
    ("combine_splits", 90, "bf16", 128, 16),
    ("store_columns", 80, "bf16", 128, 16),
    ("store_columns", 120, "fp16", 96, 16),
    ("rms_norm", 90, "bf16", 128, 16),
    ("gate", 120, "bf16", 128, 16),
)
"""Kernel, compute capability times 10, dtype, head size, queries of a row and KV head."""


def compile_kernel(
    name: str, capability: int, dtype: str, head_dim: int, queries: int, **changes: Any
) -> dict[str, Any]:
    """Compile as a launch does whose pointers and strides are multiples of 16; `changes` are constants."""
    module = attention_kernels if hasattr(attention_kernels, name) else layer_kernels
    kernel, size = getattr(module, name), tile(queries, head_dim, ITEMSIZE[dtype])
    head, columns = {"HEAD": head_dim, "WIDTH": padded(head_dim)}, {"QUERIES": size.queries, "COLUMNS": size.columns}
    flags = {"SOFTCAPPED": False, "WINDOWED": False, "SPLIT": True}
    constants: dict[str, Any] = {"GROUP": 4, "HEADS": 8, "MEMBERS": MEMBERS, "CHUNK": CHUNK, **head, **columns, **flags}
    constants |= {
        "PAGE": KV_PAGE,
        "SHORTEST": MIN_SPLIT_COLUMNS,
        "ROTARY": head_dim,
        "NORMED": True,
        "SIZE": 4096,
        "ACTIVATION": "gelu_tanh",
        "BLOCK": 1024,
    }
    constants |= {"WIDTH": 4096} if name == "rms_norm" else {}
    constants |= changes
    pointers = ("query", "key", "value", "keys", "values", "out", "rotated", "cos", "sin", "x", "weight")
    kinds = dict.fromkeys((*pointers, "query_weight", "key_weight"), f"*{dtype}")
    kinds |= {"mask": "*u8", "write_at": "*i64", "positions": "*i64", "page_table": "*i32"}
    kinds |= {"partial": "*fp32", "statistics": "*fp32"}
    kinds |= {
        "scale": "fp32",
        "softcap": "fp32",
        "eps": "fp32",
        "offset": "fp32",
        **dict.fromkeys(constants, "constexpr"),
    }
    signature = {argument: kinds.get(argument, "i32") for argument in kernel.arg_names}
    single = {"write_at", "write_at_row", "positions", "positions_row", "kv_heads", "steps", "splits", "window"}
    single |= {"page_table", "page_table_row", "pages", "scale", "softcap", "eps", "offset", "second", "third", "heads"}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, argument in enumerate(kernel.arg_names)
        if argument not in single and not argument.isupper()
    }
    constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
    options = {"num_warps": size.warps, "num_stages": size.stages} if name == "attend_split" else {}
    source = ASTSource(kernel, signature, constants, aligned)
    compiled, seconds = compile_source(source, capability, options)
    ptx = compiled.asm["ptx"]
    return {
        "name": name,
        "capability": capability,
        "dtype": dtype,
        "head_dim": head_dim,
        "queries": queries,
        "seconds": seconds,
        "shared": compiled.metadata.shared,
        "tensor_cores": len(re.findall(r"\b(?:wgmma\.mma_async|mma)\.sync", ptx)),
        "asynchronous": len(re.findall(r"cp\.async\.c[ag]", ptx)),
        "byte_loads": len(re.findall(r"ld\.global[.\w:]*\.b8\b", ptx)),
        **resources(compiled.asm["cubin"]),
    }


def compile_source(source: ASTSource, capability: int, options: dict[str, Any]) -> tuple[Any, float]:
    """A kernel compiled anew, and the seconds that took."""
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.always_compile = True
        began = time.perf_counter()
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return compiled, round(time.perf_counter() - began, 2)


def resources(cubin: bytes) -> dict[str, int]:
    """Registers of a thread, and bytes that it spills."""
    tool = triton.knobs.nvidia.cuobjdump.path
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        text = subprocess.run([tool, "--dump-resource-usage", file], capture_output=True, text=True, check=True).stdout
    return {
        name: int(re.search(rf"\b{key}:(\d+)", text)[1])  # type: ignore[index]
        for name, key in (("registers", "REG"), ("spilled", "STACK"))
    }


if __name__ == "__main__":
    for case in CASES:
        print(json.dumps(compile_kernel(*case)), flush=True)
