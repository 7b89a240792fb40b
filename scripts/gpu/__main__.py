"""Is everything right on this GPU, and how fast? Three parts of at most nine minutes. No network, nothing is built.

    scripts/gpu_check.sh A                           on a GPU: is it right, and how far from what memory allows
    scripts/gpu_check.sh B                           a larger pair: trained, then methods compared at equal quality
    scripts/gpu_check.sh C                           what it has to be compared with, and energy
    scripts/gpu_check.sh A --device cpu --sizes tiny   the same code on a CPU, within a minute

Each part writes part-a.json, .. into --folder, anew after every figure. It runs from a checkout and needs torch and
transformers; a package that is missing is a note, or a stage that is skipped and says why. The trained demo pair is
the only checkpoint; other models are made on the GPU of random weights.

A and C: stages run one after another in a process that is replaced if it dies, hangs or breaks the GPU; each has a time
limit.

* memory: bytes a copy moves a second. attention: the Triton kernels against float64.
* agreement: texts of every captured method, and of mixed batches of odd sizes, with CUDA graphs and by the functions of
  the host; adaptive drafts; graphs recorded in advance. precision: logits in float16 and
  bfloat16 against float32.
* steps: a step's time against its floor. blocks: a block's. profile: a block's launches, its largest
  kernels, and what its graphs take. baselines: the same tokens, Hugging Face.
* energy: joules a token, by the GPU's own counter. onnxruntime: its CUDA provider, if it is installed.

B is `python -m scripts.gpu.large_pair`, whose options it takes as well. Its weights stay in build/large-pair: where the
time was too short, the same command goes on.

Prints a table and, as its last line, the report's path; exit code 0 if nothing failed, 1 otherwise. On a GPU: not
executed.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from engines.placement import Placement
from mtad.errors import InvalidInput
from runtime.commands.entry import Parser, command
from scripts.gpu.report import Found, Report, Skip
from scripts.gpu.supervisor import BROKEN, Supervisor

MINUTES = 8.8
"""Of a part: where a command may run ten minutes, the rest is for its start and its end."""

PARTS = {
    "A": {
        "environment": 20.0,
        "memory": 20.0,
        "agreement float32": 100.0,
        "agreement bfloat16": 80.0,
        "precision": 30.0,
        "steps 8B": 60.0,
        "profile 8B + 1B": 60.0,
        "blocks 8B + 1B": 80.0,
        "attention": 60.0,
        "steps 1B": 30.0,
    },
    "C": {
        "environment": 20.0,
        "baselines 8B": 120.0,
        "energy 8B": 110.0,
        "baselines 1B": 100.0,
        "energy demo": 60.0,
        "blocks 1B + 68M": 60.0,
        "steps 68M": 30.0,
        "onnxruntime": 40.0,
    },
}
"""Seconds a stage may take, in the order they run."""
TINY = {"8B": "tiny", "1B": "tiny", "68M": "tinier", "8B + 1B": "tiny + tinier", "1B + 68M": "tiny + tinier"}
"""What stands for a size where `--sizes tiny` is given."""


def limits_of(part: str, sizes: str) -> dict[str, float]:
    """The stages of a part at a size, and the seconds each may take."""
    if sizes == "full":
        return PARTS[part]
    words = ((name.partition(" "), limit) for name, limit in PARTS[part].items())
    return {f"{kind}{space}{TINY.get(size, size)}": limit for (kind, space, size), limit in words}


def work_of(name: str) -> Callable[..., None]:
    """The function of a stage."""
    from scripts.gpu import baselines, blocks, correct, energy, place, speed

    kind, _, sizes = name.partition(" ")
    if kind in ("blocks", "profile"):
        target, _, auxiliary = sizes.partition(" + ")
        return partial(getattr(blocks, kind), (target, auxiliary))
    works: dict[str, Callable[..., None]] = {
        "environment": place.environment,
        "memory": speed.memory,
        "attention": correct.attention,
        "agreement": partial(correct.agreement, sizes),
        "precision": correct.precision,
        "steps": partial(speed.steps, sizes),
        "baselines": partial(baselines.baselines, sizes),
        "energy": energy.demo if sizes == "demo" else partial(energy.made, sizes),
        "onnxruntime": place.onnxruntime,
    }
    return works[kind]


def run_stages(path: Path, device: str, sizes: str, names: list[str]) -> int:
    """Run stages in this process; a worker's exit code."""
    import torch

    from engines.quiet import quiet_transformers
    from scripts.energy import EnergyMeter
    from scripts.gpu.setup import SIZES, Setup, freed
    from scripts.gpu.timing import Timer

    quiet_transformers()
    torch.set_num_threads(1 if device == "cpu" else torch.get_num_threads())
    setup = Setup(device, SIZES[sizes], Timer.of(device), EnergyMeter())
    for name in names:
        report = Report(path)
        started = time.time()
        report.stage(name, state="running", started=started)
        state, why = "done", None
        try:
            with freed(setup):
                work_of(name)(setup, Found(report, name))
        except Skip as reason:
            state, why = "skipped", str(reason)
        except Exception as error:
            logging.exception("stage %s", name)
            state, why = "failed", f"{type(error).__name__}: {error}"[:2000]
        report.stage(name, state=state, why=why, seconds=time.time() - started)
        if state == "failed" and not _answers(setup.device):
            return BROKEN
    return 0


def _answers(device: str) -> bool:
    """Whether the device still computes: after some errors a process has none any more."""
    import torch

    try:
        return bool(torch.ones(1, device=device).item() == 1.0)
    except RuntimeError:
        return False


@command
def main() -> None:
    """Entry point of `scripts/gpu_check.sh`."""
    parser = Parser(prog="gpu_check.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("A", "B", "C"))
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, or cpu (default %(default)s)")
    parser.add_argument("--sizes", choices=("full", "tiny"), default="full", help="(default %(default)s)")
    parser.add_argument("--stages", nargs="+", metavar="NAME", help="of A or C, these alone (default: all)")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="for the part (default %(default)s)")
    folder = Path(os.environ.get("OUT", "build/gpu"))
    parser.add_argument("--folder", type=Path, default=folder, help="of the report (default: $OUT, or build/gpu)")
    parser.add_argument("--worker", nargs="+", metavar="NAME", help=argparse.SUPPRESS)
    options, more = parser.parse_known_args()
    path = options.folder / f"part-{options.part.lower()}.json"
    if options.worker:
        sys.exit(run_stages(path, options.device, options.sizes, options.worker))
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.part == "B":
        from scripts.gpu import large_pair

        tiny = ["--size", "tiny", "--minutes", "0.02", "--folder", "build/tiny-pair"]
        size = [] if options.sizes == "full" else tiny
        given = ["--device", options.device, "--call-minutes", str(options.minutes), "--copy", str(path)]
        sys.argv = ["large_pair", *given, *size, *more]
        return large_pair.main()
    if more:
        parser.error(f"unrecognized arguments: {' '.join(more)}")
    from scripts.machine import machine

    limits, device = limits_of(options.part, options.sizes), Placement(options.device).device
    for name in options.stages or ():
        if name not in limits:
            raise InvalidInput("stages", name, f"choose of {', '.join(limits)}")
    facts = {
        "command": " ".join(["scripts/gpu_check.sh", *sys.argv[1:]]),
        "device": device,
        "sizes": options.sizes,
        "machine": machine(),
    }
    Report(path, facts).save()
    worker = [sys.executable, "-m", "scripts.gpu", options.part, "--folder", str(options.folder)]
    worker += ["--device", device, "--sizes", options.sizes, "--worker"]
    limits = {name: limit for name, limit in limits.items() if name in (options.stages or limits)}
    report = Supervisor(worker, path, limits, 60 * options.minutes).run()
    failed = [(stage, check) for stage, check in report.checks if not check.passed]
    print(report.table())
    print("\nnothing failed" if report.right else f"\nFAILED: {len(failed)} comparisons; see the stages above")
    print(os.fspath(path))
    sys.exit(0 if report.right else 1)


if __name__ == "__main__":
    main()
