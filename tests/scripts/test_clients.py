"""The clients' environments: exact versions, those that the documentation names, and nothing for a GPU."""

from __future__ import annotations

import re

import pytest

from scripts.clients.__main__ import HERE, PACKAGES, version
from scripts.paths import ROOT


@pytest.mark.parametrize("name", PACKAGES)
def test_every_requirement_is_an_exact_version_and_none_is_for_a_gpu(name: str) -> None:
    lines = (HERE / "requirements" / f"{name}.txt").read_text().splitlines()
    for line in lines:
        assert line.startswith("#") or re.fullmatch(r"[\w.-]+==[\w.+]+", line), line
        assert not re.match(r"nvidia-(?!ml-py)|triton", line, re.IGNORECASE), line
        assert not line.startswith("torch==") or line.endswith("+cpu"), line
    assert (HERE / "checks" / f"check_{name.replace('-', '_')}.py").is_file()


def test_the_documentation_names_the_versions_that_are_checked() -> None:
    table = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    for name, package in PACKAGES.items():
        assert f"| {package} | {version(name)} |" in table
