"""A worker as the comparison sees it: a process that is given jobs, timed, and not trusted."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mtad.errors import Failed
from scripts.bench.peers.protocol import Job
from scripts.paths import ROOT

QUIET = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "OPENVINO_TELEMETRY": "0",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Variables of the environment that keep the libraries from contacting other machines."""


class Worker:
    """One process. Every error names it, shows the end of what it wrote to standard error, and ends it.

    Args:
        name: of the system, for messages.
        command: the process.
        log: file for its standard error.
        seconds: longest time for it to open, and for an answer.

    Raises:
        Failed: it ended, did not answer in time, or answered something else than it was asked.
    """

    def __init__(self, name: str, command: Sequence[str], log: Path, seconds: float = 900) -> None:
        self.name, self._log, self._seconds = name, log, seconds
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, **QUIET},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def ready(self) -> dict[str, str]:
        """Wait until it can decode; returns versions of its packages."""
        versions: dict[str, str] = self._answer("ready")
        return versions

    def ask(self, job: Job) -> tuple[list[list[int]], float]:
        """Texts of the job's prompts, in their order, and the seconds from asking to the answer."""
        started = time.perf_counter()
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failed("has ended") from None
        answer = self._answer("texts")
        took = time.perf_counter() - started
        texts = dict(answer)
        if len(answer) != len(job["prompts"]) or set(texts) != set(range(len(job["prompts"]))):
            numbers = sorted(number for number, _ in answer)
            raise self._failed(f"answered the prompts {numbers}, not each of {len(job['prompts'])} once")
        for number, text in texts.items():
            if len(text) != job["tokens"]:
                raise self._failed(f"wrote {len(text)} tokens for prompt {number}, not {job['tokens']}")
        return [texts[number] for number in range(len(texts))], took

    def _answer(self, key: str) -> Any:
        try:
            line = self._lines.get(timeout=self._seconds)
        except queue.Empty:
            raise self._failed(f"has not answered for {self._seconds:g} seconds") from None
        if not line:
            raise self._failed(f"ended with code {self._process.wait()}")
        try:
            return json.loads(line)[key]
        except (ValueError, KeyError, TypeError):
            raise self._failed(f"answered {line[:200]!r}, which has no {key!r}") from None

    def _failed(self, problem: str) -> Failed:
        self.close()
        end = "\n".join(self._log.read_text(errors="replace").splitlines()[-12:])
        return Failed(f"{self.name} {problem}; the end of {self._log}:\n{end}")

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
