"""Stages in a process of their own: one that dies, hangs or breaks the GPU takes no other with it."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from scripts.gpu.report import Report

BROKEN = 75
"""Exit code of a worker whose GPU answers no more: the stages that are left need a new process."""
POLL = 0.2
"""Seconds between two looks at a worker."""


class Supervisor:
    """Runs stages in worker processes, within a time for each and one for all.

    Args:
        command: of a worker, which the names of the stages are appended to; it keeps the report as it goes, and
            exits when all of them are over or with `BROKEN`.
        report: the file that the workers go on with.
        limits: seconds a stage may take, by name, in the order they run.
        seconds: for all of them.
    """

    def __init__(self, command: Sequence[str], report: Path, limits: Mapping[str, float], seconds: float) -> None:
        self._command, self._path, self._limits = list(command), report, dict(limits)
        self._end = time.monotonic() + seconds

    def run(self) -> Report:
        """Run all stages; returns the report."""
        while names := [name for name in self._limits if not Report(self._path).ended(name)]:
            if time.monotonic() >= self._end:
                self._close(names, "out of time", "the time for all stages was used up")
                break
            worker = subprocess.Popen([*self._command, *names])
            try:
                running, why = self._watch(worker)
            finally:
                worker.kill()
                worker.wait()
            if why:
                self._close([running or names[0]], "failed", why)
        return Report(self._path)

    def _watch(self, worker: subprocess.Popen[bytes]) -> tuple[str | None, str | None]:
        """Wait for a worker; the stage it was stopped or ended in, and why, if it did not end well."""
        while True:
            code = worker.poll()
            report = Report(self._path)
            running = next((n for n, s in report.values["stages"].items() if s["state"] == "running"), None)
            if code is not None:
                left = [name for name in self._limits if not report.ended(name)]
                if running or (left and code != BROKEN):
                    return running, f"its process ended with {code}"
                return None, None
            now = time.monotonic()
            if running and now >= min(self._end, self._started(report, running) + self._limits[running]):
                return running, f"stopped after {time.time() - report.values['stages'][running]['started']:.0f} s"
            if now >= self._end:
                return running, "the time for all stages was used up" if running else None
            time.sleep(POLL)

    @staticmethod
    def _started(report: Report, name: str) -> float:
        """When a stage began, on the monotonic clock."""
        return float(report.values["stages"][name]["started"] - time.time() + time.monotonic())

    def _close(self, names: Sequence[str], state: str, why: str) -> None:
        report = Report(self._path)
        for name in names:
            stage = report.values["stages"].get(name, {})
            seconds = time.time() - stage["started"] if "started" in stage else 0.0
            report.stage(name, state=state, why=why, seconds=seconds)
