"""Commands of scripts on a page are ones that their parsers take."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from scripts.results import methods_table
from tests.support.pages import EVERY_PAGE, assert_parses, commands
from tests.support.paths import ROOT


def test_the_page_of_methods_has_the_one_table() -> None:
    page = (ROOT / "docs" / "methods.md").read_text()
    assert f"\n\n{methods_table()}\n" in page, "python -m scripts.results docs/methods.md"


@EVERY_PAGE
def test_every_option_that_a_page_gives_a_script_exists(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, *arguments in commands(page, "python -m scripts."):
        name = f"scripts.{module}"
        found = importlib.import_module(f"{name}.__main__" if (ROOT / name.replace(".", "/")).is_dir() else name)
        assert_parses(found.main, arguments, monkeypatch)
