"""Grammars of strangers are tried out elsewhere, by `trial_process`, before this process compiles them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Mapping
from threading import Lock

from mtad.errors import Failed, InvalidInput
from runtime.constraints import trial_process

_LONGEST = 2**20
"""Characters of a schema, expression or grammar."""


class TooSlow(InvalidInput):
    """A grammar's trial did not end in its time."""


class Stopped(RuntimeError):
    """Nobody waits for a trial any more."""


class Trial:
    """The trial of one grammar. Whoever no longer waits for it stops it, from any thread and at any time."""

    def __init__(self) -> None:
        self._lock, self.stopped = Lock(), False
        self._connection: socket.socket | None = None

    def stop(self) -> None:
        """End it, or see to it that it never begins."""
        with self._lock:
            self.stopped = True
            if self._connection is not None:
                with contextlib.suppress(OSError):  # it has ended by itself
                    self._connection.shutdown(socket.SHUT_RDWR)

    def ask(self, control: socket.socket, content: Mapping[str, object]) -> bytes:
        """Send a message; the answer, empty if there is none.

        Raises:
            OSError: nobody reads messages any more.
        """
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                socket.send_fds(control, [b"."], [theirs.fileno()])
            with self._lock:
                if self.stopped:
                    return b""
                self._connection = ours
            with contextlib.suppress(OSError), ours.makefile("rb") as answer:  # stopped, or the other end has gone
                ours.sendall(json.dumps(content).encode())
                ours.shutdown(socket.SHUT_WR)
                return answer.read()
        return b""


class Trials:
    """Runs trials in children of a process that is started when it is first needed, and again if it has ended.

    Safe to share between threads.

    Args:
        settings: `tokenizer`, `vocab_size` and `eos`, as `llguidance.LLTokenizer` takes them.
    """

    def __init__(self, settings: Mapping[str, object]) -> None:
        self._settings, self._lock = settings, Lock()
        self._process: _Process | None = None

    def run(
        self, trial: Trial, field: str, text: str, shown: str, seconds: float, wait: float | None = None
    ) -> tuple[int, list[str]]:
        """Try a grammar; returns the bytes of memory it took, and what is wrong with it.

        Args:
            field, text: see `trial_process.compile_grammar`.
            seconds: of the processor's time that it may take.
            wait: seconds that it may take in all once it has given way to others, which get the processor first.

        Raises:
            InvalidInput: its trial broke a limit.
            TooSlow: that of time.
            Stopped: the trial was stopped.
            Failed: no process stays that could do it.
        """
        if len(text) > _LONGEST:
            raise InvalidInput(field, shown, f"it has {len(text)} characters; give at most {_LONGEST}")
        asked = {"field": field, "text": text, "seconds": seconds, "wait": wait}
        answer = b"" if trial.stopped else self._ask(trial, asked)
        if trial.stopped:
            raise Stopped("nobody waits for this grammar any more")
        if not answer:
            raise Failed("the process that grammars are tried out in does not stay; its own messages say more")
        found = json.loads(answer)
        died = found.get("died")
        if died == -signal.SIGPROF:
            raise TooSlow(field, shown, f"compiling it takes longer than {seconds:g} s; give a simpler one")
        if died is not None:
            what = "is nested or chained too deeply" if died == -signal.SIGSEGV else f"takes too much memory ({died})"
            most = f"{trial_process.STACK >> 20} MiB of stack and {trial_process.MEMORY >> 20} MiB of memory"
            raise InvalidInput(field, shown, f"it {what}: compiling it may take {most}; give a simpler one")
        return found["bytes"], found["problems"]

    def close(self) -> None:
        """End the process, and with it all trials; the next one starts another."""
        with self._lock:
            process, self._process = self._process, None
        if process:
            process.close()

    def _ask(self, trial: Trial, content: Mapping[str, object]) -> bytes:
        answer = b""
        for _ in range(2):  # it may have been ended from outside, which is no fault of the grammar's
            with self._lock:
                process = self._process = self._process or _Process(self._settings)
            with contextlib.suppress(OSError):
                answer = trial.ask(process.control, content)
            if answer or trial.stopped:
                break
            with self._lock:
                if self._process is process:
                    self._process = None
            process.close()
        return answer


class _Process:
    """`trial_process`, and the socket that is its standard input. It ends when that is closed, however that happens."""

    def __init__(self, settings: Mapping[str, object]) -> None:
        self.control, theirs = socket.socketpair()
        command = [sys.executable, "-P", trial_process.__file__]
        # one arena: what threads' arenas reserve would count as memory taken
        environment = {**os.environ, "MALLOC_ARENA_MAX": "1"}
        with theirs:
            # not a session of its own: Linux gives each an equal share of the processor (sched(7), autogroups), however
            # low the priority of those in it
            popen = subprocess.Popen(command, stdin=theirs.fileno(), env=environment, process_group=0)
        self.pid, self.close = popen.pid, weakref.finalize(self, _end, self.control, popen)
        Trial().ask(self.control, settings)


def _end(control: socket.socket, popen: subprocess.Popen[bytes]) -> None:
    control.close()
    popen.wait()
