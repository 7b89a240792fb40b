"""Write the tables of a page: those of results from the JSON of evaluations, that of methods from `mtad.methods`.

    python -m scripts.evaluation.tables docs/paper.md

A table of results stands between `<!-- KIND NAME SET -->` and `<!-- end -->`. NAME is a file in `docs/results`, SET one
of its sets of prompts, and KIND `settings`, `comparison` (with speculative) or `gain`. For `peers` and `steps`, the
files of `mtad bench peers` and `mtad bench steps`, SET is a size or a sweep. Rows of removed methods are left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mtad.errors import InvalidInput
from mtad.methods import REMOVED, markdown
from runtime.commands.entry import Parser, command
from scripts.bench.peers.report import table as peers_table
from scripts.bench.steps_report import table as steps_table
from scripts.evaluation import report
from scripts.paths import ROOT

RESULTS = ROOT / "docs" / "results"
BLOCK = re.compile(r"<!-- (\w+) ([\w-]+) ([\w-]+) -->\n.*?<!-- end -->", re.DOTALL)
METHODS_TABLE = re.compile(r"^\| `method` \| draft .*\n(\|.*\n)+", re.MULTILINE)


def table(kind: str, name: str, own: str) -> str:
    """One table.

    Raises:
        InvalidInput: there is no such evaluation, set, or kind of table.
    """
    try:
        one = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["sets"][own]
        makers = {
            "settings": lambda: report.table(present(one["settings"])),
            "comparison": lambda: report.comparison(present(one["settings"]), "speculative"),
            "gain": lambda: report.gain_table(present(one["gain"])),
            "peers": lambda: peers_table(one),
            "steps": lambda: steps_table(one),
        }
        made = makers[kind]()
    except (OSError, KeyError) as error:
        raise InvalidInput("table", f"{kind} {name} {own}", f"cannot be made: {error!r}") from None
    return re.sub(r"-{3,}", "---", re.sub(r" +\|", " |", made))


def present(rows: Mapping[str, Any]) -> dict[str, Any]:
    """Rows by label, without those of methods that have left: their figures stay in the file."""
    return {label: row for label, row in rows.items() if re.split("[ -]", label)[0] not in REMOVED}


def write(text: str) -> str:
    """A page with its tables made anew."""
    text = METHODS_TABLE.sub(lambda _: markdown(), text)
    return BLOCK.sub(lambda found: f"<!-- {' '.join(found.groups())} -->\n{table(*found.groups())}\n<!-- end -->", text)


@command
def main() -> None:
    own = Parser(prog="scripts.evaluation.tables", description=(__doc__ or "").splitlines()[0])
    own.add_argument("pages", type=Path, nargs="+", help="Markdown files, rewritten in place")
    for page in own.parse_args().pages:
        page.write_text(write(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
