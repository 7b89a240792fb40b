"""What the page says is estimated is what the command prints, from the launches that were counted."""

from __future__ import annotations

import re

import pytest

from scripts.gpu.estimate import KERNELS, PATHS, estimate, floor, table_rows
from scripts.results import table
from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "gpu.md").read_text()


def test_the_page_has_the_estimated_table_and_its_launches_are_those_that_were_counted() -> None:
    assert table(table_rows()) in PAGE
    counted = {name: int(after) for name, after in re.findall(r"^\| `(\w+)` \| \d+ \| (\d+) \|$", PAGE, re.MULTILINE)}
    assert counted == KERNELS


@pytest.mark.parametrize("device", ["H100", "Jetson Orin"])
def test_nothing_takes_less_than_reading_its_weights(device: str) -> None:
    assert all(estimate(path, device) > floor(device) for path in PATHS.values())
    assert floor("H100") == pytest.approx(7.8e-3, rel=0.01)  # 26 GB at 3.35 TB/s
