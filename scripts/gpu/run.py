"""A check in a process of its own: what it is given, what takes its findings, and what becomes of one that dies."""

from __future__ import annotations

import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from runtime.config import use_torch
from runtime.scheduler.request import Result


class Skip(Exception):
    """A check cannot run here; says why."""


@dataclass(frozen=True)
class Run:
    """One run of a check.

    Attributes:
        check: its name.
        device: torch's name.
        quick: do as little as shows that the check works.
        findings: takes each finding at once, so that a check that dies has told what it found before.
    """

    check: str
    device: str
    quick: bool
    findings: Connection

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return self.device != "cpu"

    def compare(self, name: str, found: float, allowed: float, unit: str) -> None:
        """Report a comparison, which fails if `found` is not a number or exceeds `allowed`."""
        verdict = {"name": name, "found": found, "allowed": allowed, "unit": unit, "passed": found <= allowed}
        self.findings.send(("compared", verdict))

    def compare_texts(self, name: str, ours: Sequence[Result], theirs: Sequence[Result]) -> None:
        """Report how many texts differ: none may on a CPU, and one on a GPU, where batches of two sizes round apart."""
        differ = sum(a.token_ids != b.token_ids for a, b in zip(ours, theirs, strict=True))
        self.compare(f"{name}, {len(ours)} texts", differ, int(self.on_gpu), "texts differ")

    def row(self, **values: Any) -> None:
        """Report a line of the check's table."""
        self.findings.send(("rows", {k: f"{v:.4g}" if isinstance(v, float) else str(v) for k, v in values.items()}))


def run_check(check: str, function: str, device: str, quick: bool, seconds: float) -> dict[str, Any]:
    """What a check, `module:function` of this package, found in a process that lasts at most so many seconds."""
    found: dict[str, Any] = {"compared": [], "rows": [], "facts": {}, "seconds": 0.0}
    if seconds < 1:
        return {**found, "state": "not run", "why": "no time was left"}
    # a fork has what this process has imported, but a GPU that was looked at here cannot be used in one
    context: Any = get_context("fork" if device == "cpu" else "spawn")
    findings, own_end = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(function, Run(check, device, quick, own_end)))
    (state, why), began = ("stopped", f"after {seconds:.0f} s"), time.monotonic()
    process.start()
    own_end.close()
    try:
        while findings.poll(max(0.0, began + seconds - time.monotonic())):
            kind, value = findings.recv()
            if kind == "ended":
                state, why = value
                break
            found[kind] = {**found[kind], **value} if kind == "facts" else [*found[kind], value]
    except EOFError:
        process.join()
        state, why = "failed", f"its process ended with {process.exitcode}"
    finally:
        process.kill()
        process.join()
    wrong = [f"{one['name']}: {one['found']:.3g} {one['unit']}" for one in found["compared"] if not one["passed"]]
    if wrong and state == "passed":
        state, why = "failed", f"{len(wrong)} of {len(found['compared'])} comparisons, such as {wrong[0]}"
    return {**found, "state": state, "why": why, "seconds": time.monotonic() - began}


def _work(function: str, run: Run) -> None:
    """Run a check in this process, which is its own, and tell how it ended."""
    try:
        use_torch()
        module, _, name = function.partition(":")
        getattr(import_module(f"scripts.gpu.{module}"), name)(run)
        run.findings.send(("ended", ("passed", "")))
    except Skip as reason:
        run.findings.send(("ended", ("skipped", str(reason))))
    except Exception as error:
        traceback.print_exc()
        run.findings.send(("ended", ("failed", f"{type(error).__name__}: {error}"[:2000])))
