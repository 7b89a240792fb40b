"""What a client's checks found, as one line of JSON each. The standard library alone: it runs in every environment."""

from __future__ import annotations

import json
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

URL, MODEL, TOKENIZER, WORK = sys.argv[1:5]
"""The server's address, the model's name there, the folder of its tokenizer, and one to work in."""
PROMPT = "def add(first, second):\n"


def check(what: str) -> Callable[[Callable[[], Any]], None]:
    """Run a check at once; it passes if it raises nothing."""

    def run(function: Callable[[], Any]) -> None:
        problem = ""
        try:
            function()
        except Exception as error:
            traceback.print_exc()
            problem = f"{type(error).__name__}: {error}"[:500]
        print(json.dumps({"checked": what, "passed": not problem} | ({"problem": problem} if problem else {})))

    return run


def command(name: str, *arguments: str) -> None:
    """Run a command of this environment; its output goes to standard error."""
    script = Path(sys.prefix) / "bin" / name
    subprocess.run([str(script), *arguments], check=True, stdout=sys.stderr, cwd=WORK)
