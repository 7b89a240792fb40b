"""Write the tables of a page from the JSON of evaluations.

    python -m scripts.evaluation.tables docs/paper.md

A table stands between `<!-- KIND NAME SET -->` and `<!-- end -->`. NAME is a file in `docs/results`, SET one of its
sets of prompts, and KIND `settings`, `comparison` (with speculative) or `gain`. For `peers` and `steps`, the files of
`mtad bench peers` and `mtad bench steps`, SET is a size or a sweep.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from mtad.errors import InvalidInput
from runtime.commands.entry import Parser, command
from scripts.bench.peers.report import table as peers_table
from scripts.bench.steps_report import table as steps_table
from scripts.evaluation import report
from scripts.paths import ROOT

RESULTS = ROOT / "docs" / "results"
BLOCK = re.compile(r"<!-- (\w+) ([\w-]+) ([\w-]+) -->\n.*?<!-- end -->", re.DOTALL)


def table(kind: str, name: str, own: str) -> str:
    """One table.

    Raises:
        InvalidInput: there is no such evaluation, set, or kind of table.
    """
    try:
        one = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["sets"][own]
        makers = {
            "settings": lambda: report.table(one["settings"]),
            "comparison": lambda: report.comparison(one["settings"], "speculative"),
            "gain": lambda: report.gain_table(one["gain"]),
            "peers": lambda: peers_table(one),
            "steps": lambda: steps_table(one),
        }
        made = makers[kind]()
    except (OSError, KeyError) as error:
        raise InvalidInput("table", f"{kind} {name} {own}", f"cannot be made: {error!r}") from None
    return re.sub(r"-{3,}", "---", re.sub(r" +\|", " |", made))


def write(text: str) -> str:
    """A page with its tables made anew."""
    return BLOCK.sub(lambda found: f"<!-- {' '.join(found.groups())} -->\n{table(*found.groups())}\n<!-- end -->", text)


@command
def main() -> None:
    own = Parser(prog="scripts.evaluation.tables", description=(__doc__ or "").splitlines()[0])
    own.add_argument("page", type=Path, help="Markdown file, rewritten in place")
    page = own.parse_args().page
    page.write_text(write(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
