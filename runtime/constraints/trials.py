"""Trials in another process, `trial_process`: grammars before this process compiles them, and chat templates."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from subprocess import PIPE, Popen
from threading import Lock
from typing import Any, TypeVar

from mtad.errors import Failed, InvalidInput
from runtime.constraints import trial_process

T = TypeVar("T")


class TooSlow(InvalidInput):
    """A trial did not end in its time."""


class Trials:
    """Runs the trials of all threads, one by one, in a process that is started when needed, and again if it has ended.

    Args:
        doing: what a trial does, for its errors.
        settings: makes those of `trial_process.Compiler` or `trial_process.Renderer`, when the process is started.
        seconds: of the processor's time that a trial may take.
        gives_way: whether it runs only where no other thread would.
    """

    def __init__(self, doing: str, settings: Callable[[], dict[str, object]], seconds: float, gives_way: bool) -> None:
        self._doing, self._settings, self._running, self._closed = doing, settings, Lock(), False
        self.seconds, self.gives_way = seconds, gives_way
        self._process: Popen[str] | None = None

    def run(self, field: str, text: str) -> dict[str, Any]:
        """Run a trial; returns what was found, `problems` and the `bytes` of memory it took among it.

        Raises:
            InvalidInput: its trial broke a limit; `TooSlow` if it is that of time.
            Failed: `close` was called, or no process stays that could do it.
        """
        with self._running:
            # the process may have been ended from outside, which is no fault of the grammar's
            answer = self._ask(field, text) or self._ask(field, text)
        if not answer:
            raise Failed(f"the process for {self._doing} does not stay; its own messages say more")
        found: dict[str, Any] = json.loads(answer)
        if died := found.get("died"):
            broken = {
                -signal.SIGPROF: f"longer than {self.seconds} s",
                -signal.SIGSEGV: f"more than {trial_process.STACK >> 20} MiB of stack, nested or chained too deeply",
            }.get(died, f"more than {trial_process.MEMORY >> 20} MiB of memory ({died})")
            error = TooSlow if died == -signal.SIGPROF else InvalidInput
            raise error(field, text, f"{self._doing} takes {broken}; give a simpler one")
        return found

    def close(self) -> None:
        """End the process with the trial that it runs, and run no more; from any thread."""
        self._closed, process = True, self._process
        if process and process.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it may end meanwhile
                os.killpg(process.pid, signal.SIGKILL)

    def _ask(self, field: str, text: str) -> str:
        """One line of the process, which is started if need be; empty if it has ended."""
        if self._closed:
            raise Failed("nothing is tried out any more")
        messages: list[dict[str, object]] = [{"field": field, "text": text}]
        if self._process is None:
            command = [sys.executable, "-P", trial_process.__file__]
            messages.insert(0, self._settings() | {"seconds": self.seconds, "gives_way": self.gives_way})
            # of the same session, in which alone its low priority counts (sched(7), autogroups)
            self._process = Popen(command, stdin=PIPE, stdout=PIPE, text=True, process_group=0)
        try:
            with contextlib.suppress(BrokenPipeError):
                for message in messages:
                    print(json.dumps(message), file=self._process.stdin, flush=True)
                assert self._process.stdout
                if answer := self._process.stdout.readline():
                    return answer
        except BaseException:  # interrupted: its answer would be taken for that of the next trial
            process, self._process = self._process, None
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
        self._process.communicate()
        self._process = None
        return ""


class Pool:
    """Two processes: one for what is quick, and one for what was not.

    Args:
        doing, settings: as for `Trials`.
        gives_way: whether the second runs only where no other thread would, so that it may starve.
    """

    def __init__(self, doing: str, settings: Callable[[], dict[str, object]], gives_way: bool = True) -> None:
        self.quick = Trials(doing, settings, trial_process.QUICK_SECONDS, gives_way=False)
        self.slow = Trials(doing, settings, trial_process.SECONDS, gives_way)
        self._threads = ThreadPoolExecutor(1, "mtad-quick"), ThreadPoolExecutor(1, "mtad-slow")

    def run(self, work: Callable[[Trials], T]) -> T:
        """`work` with one of the processes, for which this thread waits."""
        try:
            return work(self.quick)
        except TooSlow:
            return work(self.slow)

    async def run_soon(self, work: Callable[[Trials], T]) -> T:
        """The same, for which nothing waits but this coroutine.

        Cancelling it takes it out of the queue, unless it has begun.
        """
        event_loop = asyncio.get_running_loop()
        try:
            return await event_loop.run_in_executor(self._threads[0], work, self.quick)
        except TooSlow:
            return await event_loop.run_in_executor(self._threads[1], work, self.slow)

    def close(self) -> None:
        """End both processes, and run no more; from any thread."""
        self.quick.close()
        self.slow.close()
