"""The report of a check: one JSON file, written anew after everything that was found."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from scripts.gpu.checks import Check

VERSION = 1
"""Of the layout."""
ENDED = ("done", "failed", "skipped", "out of time")


class Skip(Exception):
    """A stage cannot run here; says why."""


class Report:
    """What was found so far.

    Args:
        path: of the file; what it holds is gone on with.
        facts: of the run: command, device, sizes, the machine.
        copy: a second file, written whenever the first one is.
    """

    def __init__(self, path: Path, facts: dict[str, Any] | None = None, copy: Path | None = None) -> None:
        self.path, self._copy = path, copy
        self.values: dict[str, Any] = {"version": VERSION, **(facts or {}), "stages": {}}
        if facts is None:
            self.values = json.loads(path.read_text(encoding="utf-8"))

    def save(self) -> None:
        """Write the file, in one step."""
        text = json.dumps(self.values, indent=1, allow_nan=False) + "\n"
        for path in filter(None, (self.path, self._copy)):
            temporary = path.with_name(f".{path.name}.{os.getpid()}")
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(path)

    def stage(self, name: str, **values: Any) -> dict[str, Any]:
        """What is known of a stage, with more of it."""
        stage: dict[str, Any] = self.values["stages"].setdefault(name, {})
        stage.update(values)
        self.save()
        return stage

    def ended(self, name: str) -> bool:
        """Whether a stage is over, whatever came of it."""
        return self.values["stages"].get(name, {}).get("state") in ENDED

    @property
    def checks(self) -> list[tuple[str, Check]]:
        """All comparisons made, with their stages."""
        stages = self.values["stages"].items()
        return [(name, _check(values)) for name, stage in stages for values in stage.get("checks", ())]

    @property
    def right(self) -> bool:
        """Whether nothing failed: no comparison, and no stage."""
        failed = [s for s in self.values["stages"].values() if s["state"] in ("failed", "out of time", "running")]
        return not failed and all(check.passed for _, check in self.checks)

    def table(self) -> str:
        """For people."""
        lines = []
        for name, stage in self.values["stages"].items():
            why = f": {stage['why']}" if stage.get("why") else ""
            lines.append(f"\n{name}: {stage['state']}{why} ({stage.get('seconds', 0):.0f} s)")
            lines += [f"  {_check(values)}" for values in stage.get("checks", ())]
            lines += [f"  {key}: {value}" for key, value in stage.get("facts", {}).items() if key != "packages"]
            rows = stage.get("rows", [])
            heads = list(dict.fromkeys(key for row in rows for key in row))
            cells = [heads] + [[_cell(row.get(key, "")) for key in heads] for row in rows]
            widths = [max(map(len, column)) for column in zip(*cells, strict=True)] if rows else []
            lines += ["  " + "  ".join(map(str.rjust, line, widths)) for line in cells if rows]
        return "\n".join(lines)


class Found:
    """Where a stage puts what it finds; each addition is written at once.

    Args:
        report: of the run.
        name: of the stage.
    """

    def __init__(self, report: Report, name: str) -> None:
        self._report, self._name = report, name

    def check(self, name: str, found: float, allowed: float, unit: str) -> None:
        """Record a comparison. JSON has no infinity and no NaN: both are written as null."""
        values = asdict(Check(name, found, allowed, unit))
        self._add(
            "checks", {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        )

    def row(self, **values: Any) -> None:
        """Record a line of the stage's table."""
        self._add("rows", values)

    def note(self, **values: Any) -> None:
        """Record anything else."""
        self._report.stage(self._name).setdefault("facts", {}).update(values)
        self._report.save()

    def _add(self, key: str, values: dict[str, Any]) -> None:
        self._report.stage(self._name).setdefault(key, []).append(values)
        self._report.save()


def _check(values: dict[str, Any]) -> Check:
    """A comparison as it was written."""
    found, allowed = values["found"], values["allowed"]
    return Check(
        values["name"],
        math.nan if found is None else found,
        math.inf if allowed is None else allowed,
        values["unit"],
    )


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
