"""Grammars are tried out in another process, `trial_process`, before this process compiles them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from subprocess import PIPE, Popen
from threading import Lock

from mtad.errors import Failed, InvalidInput
from runtime.constraints import trial_process
from runtime.constraints.follower import short


class TooSlow(InvalidInput):
    """A grammar's trial did not end in its time."""


class Trials:
    """Runs the trials of all threads, one by one, in a process that is started when needed, and again if it has ended.

    Args:
        settings: `tokenizer`, `vocab_size` and `eos`, as `llguidance.LLTokenizer` takes them; `seconds` of the
            processor's time that a trial may take; `gives_way`, whether it runs only where no other thread would.
    """

    def __init__(self, **settings: object) -> None:
        self._settings, self._running, self._closed = settings, Lock(), False
        self._process: Popen[str] | None = None

    def run(self, field: str, text: str) -> tuple[int, list[str]]:
        """Try a grammar; returns the bytes of memory it took, and what is wrong with it.

        Raises:
            InvalidInput: its trial broke a limit; `TooSlow` if it is that of time.
            Failed: `close` was called, or no process stays that could do it.
        """
        with self._running:
            # the process may have been ended from outside, which is no fault of the grammar's
            answer = self._ask(field, text) or self._ask(field, text)
        if not answer:
            raise Failed("the process that grammars are tried out in does not stay; its own messages say more")
        found = json.loads(answer)
        if died := found.get("died"):
            broken = {
                -signal.SIGPROF: f"longer than {self._settings['seconds']} s",
                -signal.SIGSEGV: f"more than {trial_process.STACK >> 20} MiB of stack, nested or chained too deeply",
            }.get(died, f"more than {trial_process.MEMORY >> 20} MiB of memory ({died})")
            error = TooSlow if died == -signal.SIGPROF else InvalidInput
            raise error(field, short(text), f"compiling it takes {broken}; give a simpler one")
        return found["bytes"], found["problems"]

    def close(self) -> None:
        """End the process with the trial that it runs, and run no more; from any thread."""
        self._closed, process = True, self._process
        if process and process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)

    def _ask(self, field: str, text: str) -> str:
        """One line of the process, which is started if need be; empty if it has ended."""
        if self._closed:
            raise Failed("grammars are no longer tried out")
        messages: list[dict[str, object]] = [{"field": field, "text": text}]
        if self._process is None:
            command = [sys.executable, "-P", trial_process.__file__]
            # of the same session, in which alone its low priority counts (sched(7), autogroups)
            self._process = Popen(command, stdin=PIPE, stdout=PIPE, text=True, process_group=0)
            messages.insert(0, self._settings)
        with contextlib.suppress(BrokenPipeError):
            for message in messages:
                print(json.dumps(message), file=self._process.stdin, flush=True)
            assert self._process.stdout
            if answer := self._process.stdout.readline():
                return answer
        self._process.communicate()
        self._process = None
        return ""
