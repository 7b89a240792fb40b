"""`mtad serve` in a process of its own, and environments for the clients that talk to it."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mtad.errors import Failed
from scripts.paths import ROOT

REQUIREMENTS = Path(__file__).with_name("requirements")
BUILD = ROOT / "build" / "clients"
MODEL = "demo"
"""The name that the pair is served under."""
START, ENDING = 600.0, 120.0
"""Seconds that our server may take until it answers, and any server until it has ended."""


@dataclass(frozen=True)
class Server:
    """A server's address, `http://host:port`, the id of its process, and the pair that it serves."""

    url: str
    pid: int
    pair: str = ""


@contextlib.contextmanager
def started(
    command: Sequence[str], seconds: float, ready: str = "/health", ends_cleanly: bool = False
) -> Iterator[tuple[str, int]]:
    """A server that runs while the block does: its address, `http://127.0.0.1:port`, and its process.

    Args:
        command: of the server, whose last argument, a free port, is added.
        seconds: that it may take until it answers.
        ready: where it is asked whether it is.
        ends_cleanly: whether its exit code, after it was asked to end, must be 0.

    Raises:
        Failed: it ends, does not answer in time, or does not end cleanly; with the end of what it said.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url, said, end = f"http://127.0.0.1:{port}", BUILD / "servers" / f"{port}.log", time.monotonic() + seconds
    said.parent.mkdir(parents=True, exist_ok=True)
    with said.open("wb") as log:
        process = subprocess.Popen([*command, str(port)], cwd=ROOT, stdout=log, stderr=log)

    def failed(problem: str) -> Failed:
        return Failed(f"{' '.join(command)} {problem}: {said.read_text(errors='replace')[-2000:]}")

    try:
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{url}{ready}", timeout=5).close()
                break
            if process.poll() is not None or time.monotonic() > end:
                raise failed("does not answer")
            time.sleep(0.1)
        yield url, process.pid
    finally:
        process.terminate()
        try:
            process.wait(ENDING)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if ends_cleanly and process.returncode:
        raise failed(f"ended with code {process.returncode}")


@contextlib.contextmanager
def served(pair: Path, *options: str) -> Iterator[Server]:
    """A server with these further options, ready for requests.

    Raises:
        Failed: it did not start, or did not end cleanly when it was asked to.
    """
    own = "--model", MODEL, "--chat-template", str(Path(__file__).with_name("chat.jinja"))
    command = [sys.executable, "-m", "runtime.commands.main", "serve", str(pair), *own, *options, "--port"]
    with started(command, START, "/health/ready", ends_cleanly=True) as (url, pid):
        yield Server(url, pid, str(pair))


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
