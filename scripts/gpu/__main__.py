"""Is everything right on this GPU, and how fast? One command, no network, nothing built that can be skipped.

    scripts/gpu_check.sh                             on a GPU; at most eight minutes
    scripts/gpu_check.sh --device cpu --sizes tiny   the same code on a CPU, within a minute

Stages run one after another in a process that is replaced if it dies, hangs or breaks the GPU; each has a time limit,
and what it found is in the report at once. What cannot run is skipped, and why is said. Models are made on the GPU of
random weights; the trained demo pair is the only checkpoint.

* memory: bytes a copy moves a second. attention: the Triton kernels against float64.
* agreement: texts of every method, and of mixed batches of odd sizes, with CUDA graphs and without.
* precision: logits in float16 and bfloat16 against float32.
* steps: a step's time against its floor. blocks: a block's and its parts'. baselines: the same tokens, Hugging Face.
* energy: joules a token, by the GPU's own counter. onnxruntime: its CUDA provider, if it is installed.

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

LIMITS = {
    "environment": 20.0,
    "memory": 20.0,
    "attention": 90.0,
    "agreement": 110.0,
    "precision": 30.0,
    "steps 68M": 30.0,
    "steps 1B": 40.0,
    "steps 8B": 60.0,
    "blocks 1B + 68M": 70.0,
    "blocks 8B + 1B": 90.0,
    "energy demo": 60.0,
    "energy 8B": 70.0,
    "baselines 1B": 120.0,
    "baselines 8B": 120.0,
    "onnxruntime": 60.0,
}
"""Seconds a stage may take, in the order they run; the limit of all together is what ends most runs."""
TINY = ("environment", "memory", "attention", "agreement", "precision", "onnxruntime")
"""Stages whose name has no size."""


def stage_names(sizes: str) -> list[str]:
    """The stages of a size, in order."""
    if sizes == "full":
        return list(LIMITS)
    timed = ["steps tinier", "steps tiny", "blocks tiny + tinier", "energy demo", "energy tiny", "baselines tiny"]
    return [*TINY[:-1], *timed, TINY[-1]]


def work_of(name: str) -> Callable[..., None]:
    """The function of a stage."""
    from scripts.gpu import correct, energy, place, speed

    kind, _, sizes = name.partition(" ")
    if kind == "steps":
        return partial(speed.steps, sizes)
    if kind == "blocks":
        target, _, auxiliary = sizes.partition(" + ")
        return partial(speed.blocks, (target, auxiliary))
    if kind == "baselines":
        return partial(speed.baselines, sizes)
    if kind == "energy":
        return energy.demo if sizes == "demo" else partial(energy.made, sizes)
    plain: dict[str, Callable[..., None]] = {
        "environment": place.environment,
        "memory": speed.memory,
        "attention": correct.attention,
        "agreement": correct.agreement,
        "precision": correct.precision,
        "onnxruntime": place.onnxruntime,
    }
    return plain[kind]


def run_stages(path: Path, device: str, sizes: str, names: list[str]) -> int:
    """Run stages in this process; a worker's exit code."""
    import torch

    from engines.pytorch.hook import quiet_transformers
    from runtime.server.energy import EnergyMeter
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
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, or cpu (default %(default)s)")
    parser.add_argument("--sizes", choices=("full", "tiny"), default="full", help="(default %(default)s)")
    parser.add_argument("--stages", nargs="+", metavar="NAME", help="of these alone (default: all)")
    parser.add_argument("--minutes", type=float, default=8.0, help="for all stages (default %(default)s)")
    parser.add_argument("--report", type=Path, default=Path("build/gpu-check.json"), help="(default %(default)s)")
    parser.add_argument("--worker", nargs="+", metavar="NAME", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        sys.exit(run_stages(options.report, options.device, options.sizes, options.worker))
    from scripts.machine import machine

    names, device = stage_names(options.sizes), Placement(options.device).device
    for name in options.stages or ():
        if name not in names:
            raise InvalidInput("stages", name, f"choose of {', '.join(names)}")
    options.report.parent.mkdir(parents=True, exist_ok=True)
    facts = {
        "command": " ".join(["scripts/gpu_check.sh", *sys.argv[1:]]),
        "device": device,
        "sizes": options.sizes,
        "machine": machine(),
    }
    Report(options.report, facts).save()
    worker = [sys.executable, "-m", "scripts.gpu", "--report", str(options.report)]
    worker += ["--device", device, "--sizes", options.sizes, "--worker"]
    limits = {name: LIMITS.get(name, 60.0) for name in names if name in (options.stages or names)}
    report = Supervisor(worker, options.report, limits, 60 * options.minutes).run()
    failed = [(stage, check) for stage, check in report.checks if not check.passed]
    print(report.table())
    print("\nnothing failed" if report.right else f"\nFAILED: {len(failed)} comparisons; see the stages above")
    print(os.fspath(options.report))
    sys.exit(0 if report.right else 1)


if __name__ == "__main__":
    main()
