"""A worker as the comparison sees it: a process that is given jobs, timed, and not trusted."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mtad.errors import Failed
from scripts.paths import ROOT

# they keep the libraries from contacting other machines
QUIET = {"HF_HUB_OFFLINE": "1", "OPENVINO_TELEMETRY": "0", "DO_NOT_TRACK": "1", "TOKENIZERS_PARALLELISM": "false"}
PATIENCE = 1800  # seconds that a worker may take to open, which may convert checkpoints, and to answer


class Worker:
    """A process of `protocol`, ready for jobs.

    Raises:
        Failed: it ended, did not answer in time, or answered something else than it was asked; it is named, and the
            end of its log shown.
    """

    def __init__(self, name: str, command: Sequence[str], log: Path) -> None:
        self._name, self._log, pipe = name, log, subprocess.PIPE
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                command, cwd=ROOT, env={**os.environ, **QUIET}, stdin=pipe, stdout=pipe, stderr=errors, text=True
            )
        self.versions: dict[str, str] = self._answer("ready")

    def ask(self, job: dict[str, Any]) -> tuple[list[list[int]], float]:
        """Texts of the job's prompts, in their order, and the seconds from asking to the answer."""
        assert self._process.stdin is not None
        started = time.perf_counter()
        try:
            print(json.dumps(job), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise self._failed(f"ended with code {self._process.wait()}") from None
        texts = self._answer("texts")
        took = time.perf_counter() - started
        found, wanted = sorted((number, len(text)) for number, text in texts), [job["tokens"]] * len(job["prompts"])
        if found != list(enumerate(wanted)):
            raise self._failed(f"was asked for {job['tokens']} tokens for each prompt, and wrote, by prompt, {found}")
        return [text for _, text in sorted(texts)], took

    def _answer(self, key: str) -> Any:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], PATIENCE)[0]:
            raise self._failed(f"has not answered for {PATIENCE} seconds")
        if not (line := self._process.stdout.readline()):
            raise self._failed(f"ended with code {self._process.wait()}")
        return json.loads(line)[key]

    def _failed(self, problem: str) -> Failed:
        self.close()
        end = "\n".join(self._log.read_text(errors="replace").splitlines()[-12:])
        return Failed(f"{self._name} {problem}; the end of {self._log}:\n{end}")

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(BrokenPipeError):  # of a job that it has not read
            self._process.stdin.close()
