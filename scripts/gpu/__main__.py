"""Says what works on this NVIDIA GPU: correctness first, then speed and energy. Needs no network and builds nothing.

    python -m scripts.gpu                       at most 20 minutes, all into build/results/gpu.json
    python -m scripts.gpu --minutes 9           less time: what does not fit is not run
    python -m scripts.gpu --checks speed profile
    python -m scripts.gpu --device cpu --quick  the same code on a CPU, within a minute
    python -m scripts.gpu --estimate            no GPU: what a block should take, estimated

Each check runs in a process of its own: one that fails, dies or hangs takes no other with it. One whose library is
missing is skipped. docs/gpu.md says what each one does. Exit code 0 if nothing failed, 1 otherwise.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

from runtime.commands.entry import Parser, command
from scripts.gpu.estimate import table_rows
from scripts.gpu.run import run_check
from scripts.results import Rows, save, table

CAPTURED = "PyTorch on a GPU, whole blocks as CUDA graphs"
CHECKS = {
    "attention": ("attention kernels for GPUs (Triton)", "correct:attention", 150),
    "engine": ("fused decoder layers on a GPU (`engines/pytorch/fusion.py`)", "correct:engine", 150),
    "blocks": (CAPTURED, "correct:blocks", 300),
    "pages": ("pages of the PyTorch engine (`engines/cache/paged.py`)", "correct:pages", 120),
    "onnxruntime": ("ONNX Runtime, CUDA provider", "exported:exported", 150),
    "tensorrt-rtx": ("TensorRT-RTX: loading and running a plan", "exported:exported", 200),
    "tensorrt": ("TensorRT 10.15 and later: building, loading, running", "exported:exported", 300),
    "speed": (CAPTURED, "speed:speed", 240),
    "profile": (CAPTURED, "speed:profile", 120),
    "tensorrt-llm": ("TensorRT-LLM 1.2.1: building, loading, running a plan", "exported:exported", 300),
    "tensorrt-llm-worker": ("our acceptance in the one-model worker of 1.4.0rc1", "exported:tensorrt_llm", 300),
}
"""What row of docs/support.md each is about, its function, and the seconds that it may take; in the order they run."""


def tables(figures: Mapping[str, Any]) -> dict[str, Rows]:
    """`checks`, what came of each; and by the name of each check that made one, its own table."""
    verdicts = [("check", "row of docs/support.md", "result", "why", "s")]
    found: dict[str, Rows] = {"checks": verdicts}
    for name, one in figures["checks"].items():
        why = one["why"] or f"{len(one['compared'])} comparisons"
        verdicts.append((name, one["row"], one["state"], " ".join(why.split())[:160], f"{one['seconds']:.0f}"))
        if rows := one["rows"]:
            found[name] = [tuple(rows[0]), *(tuple(row.values()) for row in rows)]
    return found


@command
def main() -> None:
    own = Parser(prog="scripts.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    own.add_argument("--device", default="cuda", help="cuda, cuda:1, or cpu (default %(default)s)")
    own.add_argument("--checks", nargs="+", choices=CHECKS, default=list(CHECKS), help="(default: all)")
    own.add_argument("--minutes", type=float, default=20.0, help="for all of them (default %(default)s)")
    own.add_argument("--quick", action="store_true", help="do as little as shows that the checks work")
    own.add_argument("--results", type=Path, default=Path("build/results"), help="folder of gpu.json")
    own.add_argument("--estimate", action="store_true", help="print what a block should take, and run nothing")
    options = own.parse_args()
    if options.estimate:
        print(f"estimated, not measured: a block of mtad, 8B with 1B, one row\n\n{table(table_rows())}")
        return
    from engines.placement import Placement

    device, end = Placement(options.device).device, time.monotonic() + 60 * options.minutes
    if device == "cpu":
        import scripts.gpu.correct  # noqa: F401 - imported once, for all checks
    figures: dict[str, Any] = {"device": device, "quick": options.quick, "checks": {}}
    for name in (bar := tqdm(options.checks, unit="check")):
        bar.set_description(name)
        row, function, seconds = CHECKS[name]
        left = min(end - time.monotonic(), seconds)
        figures["checks"][name] = {"row": row, **run_check(name, function, device, options.quick, left)}
        save(options.results / "gpu.json", "scripts.gpu.__main__", figures)
    for name, rows in tables(figures).items():
        print(f"\n{name}\n\n{table(rows)}")
    print(f"\nPlease send {options.results / 'gpu.json'} and what was printed above, whatever the results are.")
    sys.exit(any(one["state"] in ("failed", "stopped") for one in figures["checks"].values()))


if __name__ == "__main__":
    main()
