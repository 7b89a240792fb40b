"""`mtad serve` in a process of its own, for clients."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scripts.paths import ROOT

MODEL = "demo"
TEMPLATE = Path(__file__).with_name("chat.jinja")


@contextmanager
def served(pair: Path, *options: str) -> Iterator[str]:
    """The address of a server in a process of its own, with these further options."""
    with tempfile.NamedTemporaryFile("w+", suffix=".log") as lines:
        log = Path(lines.name)
        arguments = ["serve", str(pair), "--port", "0", "--rows", "16", "--model", MODEL]
        arguments += ["--chat-template", str(TEMPLATE), *options]
        start = "from runtime.commands.main import main; main()"
        process = subprocess.Popen([sys.executable, "-c", start, *arguments], cwd=ROOT, stderr=lines)
        try:
            while not (found := re.search(r"listening on (http://\S+)", log.read_text())):
                assert process.poll() is None, log.read_text()
                time.sleep(0.1)
            while not ready(found[1]):
                time.sleep(0.1)
            yield found[1]
        finally:
            process.terminate()
            process.wait()


def ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health/ready") as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
