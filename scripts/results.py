"""Results of measurements: one JSON file per run, and the pages' tables made from them.

    python -m scripts.results docs/results.md docs/paper.md     make the tables of these pages anew

A table stands between `<!-- NAME.json TABLE -->` and `<!-- end -->`: NAME.json lies in `docs/results`, its `made_by` is
the module that measured, and that module's `tables(figures)` gives the lines of its tables by name.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from engines.placement import cores, versions
from mtad.errors import InvalidInput
from mtad.methods import METHODS
from runtime.commands.entry import Parser, command
from scripts.paths import RESULTS, ROOT

Rows = Sequence[Sequence[str]]
"""Lines of a table, of equally many cells each; the first line is the heading."""

TABLE = re.compile(r"<!-- ([\w/-]+\.json) ([\w-]+) -->\n.*?<!-- end -->", re.DOTALL)
METHODS_TABLE = re.compile(r"^\| `method` \| draft .*\n(\|.*\n)+", re.MULTILINE)


def _commit() -> str | None:
    if not shutil.which("git"):
        return None
    command = ["git", "describe", "--always", "--dirty", "--exclude=*", "--abbrev=40"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip() or None


BEFORE: dict[str, Any] = {"commit": _commit(), "load_before": os.getloadavg()[0]}
"""As it was when the measuring program began: what it runs is of that commit, and the load is not its own."""


def table(rows: Rows) -> str:
    """Lines as a Markdown table."""
    heading, *others = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([heading, "|" + " --- |" * len(rows[0]), *others])


def methods_table() -> str:
    """The table as docs/methods.md shows it."""
    lines = ["| `method` | draft | scored | lossless | what it does | source |", "|---|---|---|---|---|---|"]
    for name, method in METHODS.items():
        scored = "tree" if method.tree else "path" if method.form else "-"
        source = f"`{method.source}`" if method.source.endswith(".md") else method.source or "-"
        cells = method.form or "none", scored, "yes" if method.lossless else "no", method.help, source
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def save(path: Path, made_by: str, figures: Mapping[str, Any]) -> None:
    """Write one run's figures, with what is needed to judge and to repeat it: command, machine, commit and date.

    Args:
        path: the JSON file; its folder is made.
        made_by: the module that measured, such as `scripts.bench.overhead`; it has `tables`.
        figures: what was measured. Numbers that JSON does not know (NaN, infinities) become null.
    """
    about = {
        "made_by": made_by,
        "command": shlex.join(["python", "-m", made_by.removesuffix(".__main__"), *sys.argv[1:]]),
        "commit": BEFORE["commit"],
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(_plain({**about, "figures": figures}), indent=1) + "\n", encoding="utf-8")


def machine() -> dict[str, Any]:
    """Processor, GPUs, load and versions."""
    names = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").is_file() else []
    model = next((line.split(":")[1].strip() for line in names if line.startswith("model name")), platform.processor())
    packages = "torch transformers numpy numba triton onnxruntime onnxruntime-gpu openvino tensorrt tensorrt-rtx"
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return {
        "processor": f"{model}, {platform.machine()}",
        "cores": cores(),
        "gpus": [f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, {gpu.major}.{gpu.minor}" for gpu in gpus],
        "load_before": BEFORE["load_before"],
        "versions": {"python": platform.python_version()} | versions(*packages.split()),
    }


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, (list, tuple)) else value


def tables(found: Mapping[str, Any]) -> dict[str, Rows]:
    """The tables of one run, as `save` has written it, by name."""
    made: dict[str, Rows] = importlib.import_module(found["made_by"]).tables(found["figures"])
    return made


def write_tables(text: str, results: Path = RESULTS) -> str:
    """A page with its tables made anew, that of the methods among them.

    Raises:
        InvalidInput: there is no such file, or no such table in it.
    """

    def made(place: re.Match[str]) -> str:
        file, name = place.groups()
        try:
            rows = tables(json.loads((results / file).read_text(encoding="utf-8")))[name]
        except (OSError, KeyError) as error:
            raise InvalidInput("table", f"{file} {name}", f"cannot be made: {error!r}") from None
        return f"<!-- {file} {name} -->\n{table(rows)}\n<!-- end -->"

    return TABLE.sub(made, METHODS_TABLE.sub(lambda _: methods_table(), text))


@command
def main() -> None:
    own = Parser(prog="scripts.results", description=(__doc__ or "").splitlines()[0])
    own.add_argument("pages", type=Path, nargs="+", help="Markdown files, rewritten in place")
    for page in own.parse_args().pages:
        page.write_text(write_tables(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
