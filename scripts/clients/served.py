"""`mtad serve` in a process of its own, and environments for the clients that talk to it."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mtad.errors import Failed
from scripts.paths import ROOT

REQUIREMENTS = Path(__file__).with_name("requirements")
BUILD = ROOT / "build" / "clients"
MODEL = "demo"
"""The name that the pair is served under."""


@dataclass(frozen=True)
class Server:
    """A server's address, `http://host:port`, the id of its process, and the pair that it serves."""

    url: str
    pid: int
    pair: str = ""


@contextlib.contextmanager
def served(pair: Path, *options: str) -> Iterator[Server]:
    """A server with these further options, ready for requests.

    Raises:
        Failed: it did not start, or did not end cleanly when it was asked to.
    """
    template = str(Path(__file__).with_name("chat.jinja"))
    command = [sys.executable, "-m", "runtime.commands.main", "serve", str(pair), "--port", "0", "--model", MODEL]
    with tempfile.NamedTemporaryFile("w+", suffix=".log") as log:
        process = subprocess.Popen([*command, "--chat-template", template, *options], cwd=ROOT, stderr=log)
        server = None
        try:
            while not server:
                time.sleep(0.1)
                found = re.search(r"listening on (http://\S+)", Path(log.name).read_text())
                if process.poll() is not None:
                    raise Failed(f"mtad serve did not start: {Path(log.name).read_text()}")
                with contextlib.suppress(OSError):
                    if found and urllib.request.urlopen(f"{found[1]}/health/ready").close() is None:
                        server = Server(found[1], process.pid, str(pair))
            yield server
        finally:
            process.terminate()
            process.wait()
        if process.returncode:
            raise Failed(f"mtad serve ended with code {process.returncode}: {Path(log.name).read_text()[-2000:]}")


def environment(name: str) -> Path:
    """The interpreter of a client's environment, which is made anew where its requirements have changed.

    They are exact versions, and installed without what those ask for beyond them: none brings a CUDA build of torch.
    """
    folder, requirements = BUILD / name, REQUIREMENTS / f"{name}.txt"
    stamp, python = folder / "installed.txt", folder / "bin" / "python"
    if not stamp.exists() or stamp.read_text() != requirements.read_text():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*install, "-r", str(requirements)], check=True)
        stamp.write_text(requirements.read_text())
    return python
