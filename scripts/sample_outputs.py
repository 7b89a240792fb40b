"""Writes the sample outputs of docs/ anew, by running what stands above them.

    python -m scripts.sample_outputs [docs/export.md ...]

A block ```console begins with a command after "$ ", which goes on behind a line that ends with && or a backslash; the
rest is what it printed. A block ```text behind a block ```python is what the Python printed. A line "..." in either
stands for lines that are left out; as many lines before and after it are kept as there are now. build/demo-pair must be
there.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from scripts.paths import ROOT

CONSOLE = re.compile(
    r"(?P<head>^```console\n\$ (?P<code>(?:[^\n]*(?:&&|\\)\n)*[^\n]*)\n)(?P<text>.*?)(?=^```$)", re.M | re.S
)
PYTHON = re.compile(r"(?P<head>^```python\n(?P<code>[^`]*)^```\n\n```text\n)(?P<text>.*?)(?=^```$)", re.M | re.S)


def renew(page: str, run_shell: Callable[[str], str], run_python: Callable[[str], str]) -> str:
    """A page with the outputs that its commands print now."""
    page = CONSOLE.sub(lambda found: found["head"] + shorten(run_shell(found["code"]), found["text"]), page)
    return PYTHON.sub(lambda found: found["head"] + shorten(run_python(found["code"]), found["text"]), page)


def shorten(output: str, before: str) -> str:
    """An output with the same parts left out as in the text before."""
    lines, parts = output.strip("\n").splitlines(), before.rstrip("\n").split("\n...\n")
    if len(parts) == 1:
        return "\n".join(lines) + "\n"
    first, last = (len(parts[at].splitlines()) for at in (0, -1))
    return "\n".join([*lines[:first], "...", *lines[-last:]]) + "\n"


def run(*command: str) -> str:
    """What a command prints, in the repository, without the repository's own path."""
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return ran.stdout.replace(f"{ROOT}/", "") or sys.exit(f"{command}: {ran.stderr}")


def main() -> None:
    pages = [Path(name).absolute() for name in sys.argv[1:]] or sorted((ROOT / "docs").glob("*.md"))
    for page in pages:
        before = page.read_text()
        after = renew(before, lambda code: run("bash", "-c", code), lambda code: run(sys.executable, "-c", code))
        if after != before:
            page.write_text(after)
            print(f"{page.relative_to(ROOT)} renewed")


if __name__ == "__main__":
    main()
