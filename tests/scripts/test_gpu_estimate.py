"""What the page says is estimated is what the command prints, from the launches that were counted."""

from __future__ import annotations

import re

from scripts.gpu.estimate import KERNELS, table_rows
from scripts.results import table
from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "gpu.md").read_text()


def test_the_page_has_the_estimated_table_and_its_launches_are_those_that_were_counted() -> None:
    assert table(table_rows()) in PAGE
    counted = {name: int(after) for name, after in re.findall(r"^\| `(\w+)` \| \d+ \| (\d+) \|$", PAGE, re.MULTILINE)}
    assert counted == KERNELS
