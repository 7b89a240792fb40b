"""The pages of the documentation, and the commands they show."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from runtime.commands.entry import Parser
from tests.support.paths import ROOT

TOP = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "scripts/demo/README.md")]
PAGES = [*TOP, *sorted((ROOT / "docs").glob("*.md"))]
EVERY_PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def blocks(page: Path, language: str = "") -> list[str]:
    """The fenced blocks of a page, of one language or of all."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    return [text for name, text in found if language in ("", name)]


def commands(page: Path, start: str) -> Iterator[list[str]]:
    """The words of each command of a page whose first ones are `start`, without these and what runs it."""
    text = "".join(blocks(page, "bash") + blocks(page, "console"))
    for line in re.sub(r"^\$ |\\\n *", "", text, flags=re.MULTILINE).splitlines():
        for part in re.split(r" (?:\||&&) ", line):
            found = re.fullmatch(rf"(?:[A-Z_]+=\S+ |torchrun .*--no-python |\.venv/bin/)*{re.escape(start)}(.*)", part)
            if found:
                yield shlex.split(found[1], comments=True)


class Parsed(Exception):
    """A command line was understood."""


def assert_parses(main: Callable[[], None], arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The parser of a command takes such arguments; the command does nothing else."""
    parse = Parser.parse_args

    def only_parse(parser: Parser, args: Any = None, namespace: Any = None) -> Any:
        parse(parser, args, namespace)
        raise Parsed

    with monkeypatch.context() as patch:
        patch.setattr(Parser, "parse_args", only_parse)
        patch.setattr(sys, "argv", ["command", *arguments])
        with pytest.raises(Parsed):
            main()
