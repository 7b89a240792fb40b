"""`AsyncLLM`: the same loop in a thread of its own, for servers. Requests are awaited, streamed and cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

from mtad.errors import Failed, InvalidInput
from mtad.params import DecodingParams
from runtime.config import RuntimeConfig
from runtime.llm import LLM
from runtime.output.stream import Choice, Inbox, OutputDelta, Stream
from runtime.pair import Pair
from runtime.prompts import Prompt, several
from runtime.resting import RestingThread, Turn
from runtime.scheduler.request import Request, RequestFailed

log = logging.getLogger(__name__)

T = TypeVar("T")

LONG_TEXT, LONG_WORD = 64 * 1024, 128
"""Characters, or token ids, that take some 20 ms to be tokenized or looked through; as how many a bad word counts."""


STOP_SECONDS = 30.0
"""For an engine to end its step when everything is cancelled; one that hangs keeps no process from ending."""


class EngineStopped(RuntimeError):
    """The engine takes no requests: it is draining, was closed, or broke down (the cause is chained)."""


class AsyncLLM:
    """A pair of engines that serves many requests at once, in a thread of its own.

    Use as `async with AsyncLLM(pair) as engine`; leaving the block waits for what was submitted, leaving it by an
    exception cancels it. Methods may be called from any event loop; the loop is never blocked by the engine.

    Args:
        llm: an `LLM` for this engine alone, or what one is made from.
        config: how it runs, if the `LLM` is made here.

    Attributes:
        llm: the LLM; its loop belongs to the engine's thread.
        state: `new`, `open`, `draining`, `cancelling` or `stopped`.
        cause: what stopped the engine, if it did not stop because it was closed.
        turn: of the threads that rest beside the engine's.
    """

    def __init__(self, llm: LLM | Pair | Path | str, config: RuntimeConfig | None = None) -> None:
        if isinstance(llm, LLM) and config is not None:
            raise InvalidInput("config", "a RuntimeConfig", "the LLM exists already; give the configuration to LLM")
        self.llm = llm if isinstance(llm, LLM) else LLM(llm, config)
        self.state = "new"
        self.cause: BaseException | None = None
        self._changed = threading.Condition()  # guards `state`: nothing is queued once it is not open
        self._cancelled = deque[Request]()  # added to without the lock
        self.turn = Turn()
        self._long_texts = RestingThread(self.turn)
        self._prepared, self._give_up = False, math.inf
        self._thread = threading.Thread(target=self._run, name="mtad-engine", daemon=True)

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        await self.close(drain=error is None)

    def start(self) -> None:
        """Start the engine's thread."""
        with self._changed:
            if self.state != "new":
                raise EngineStopped(f"cannot be started: it is {self.state}")
            self.state = "open"
        self._thread.start()

    async def submit(
        self, prompt: Prompt, params: DecodingParams | None = None, priority: int = 0, **others: Any
    ) -> Stream:
        """Queue a prompt.

        Args:
            prompt: text or token ids.
            params: None takes the pair's defaults.
            priority: larger ones are admitted first; then those of the client served least, then those that came first.
            others: `client`, `cache_salt` and `fit`, see `LLM.requests`.

        Raises:
            InvalidInput: prompt or parameters are unusable, or can never fit.
            QueueFull: too many wait; its `retry_after` says when to try again.
            EngineStopped: it takes no requests (any more).
        """
        return await self.submit_many([prompt], params, priority, **others)

    async def submit_many(
        self, prompts: Sequence[Prompt], params: DecodingParams | None = None, priority: int = 0, **others: Any
    ) -> Stream:
        """Queue several prompts with the same parameters, all or none, as one stream.

        The choices of the first prompt come first: choice i of prompt p has the index `p * n + i`.

        Raises:
            InvalidInput: as in `submit`, or there is no prompt.
            QueueFull, EngineStopped: as in `submit`.
        """
        prompts = several(prompts)
        if not prompts:
            raise InvalidInput("prompt", list(prompts), "give at least one")
        self._check_open()
        try:
            grammar = await self.llm.compiled(params)
        except Failed:
            self._check_open()
            raise
        size = sum(len(prompt) for prompt in prompts if isinstance(prompt, Sequence))  # what is none is refused there
        size += LONG_WORD * len((params or self.llm.pair.defaults).bad_words)
        others |= {"priority": priority, "grammar": grammar}

        def make_requests() -> list[Request]:
            return [request for prompt in prompts for request in self.llm.requests(prompt, params, **others)]

        requests = await self.in_thread(size, make_requests)
        stream = Stream(requests, self._cancel)
        for index, request in enumerate(requests):
            request.choice = Choice(stream.inbox, index)
        with self._changed:
            self._check_open()
            self.llm.loop.scheduler.submit(*requests)
            self._changed.notify()
        return stream

    async def in_thread(self, size: int, function: Callable[..., T], *arguments: Any) -> T:
        """Run in a thread what takes time with prompts of so many characters.

        Long texts wait for each other, with rests between them, and short ones do not wait for them.
        """
        run = self._long_texts.run if size > LONG_TEXT else asyncio.to_thread
        return await run(function, *arguments)

    def statistics(self) -> dict[str, Any]:
        """Running totals, and the requests that hold a row and that wait just now."""
        running, waiting = self.llm.loop.scheduler.counts
        return {"running": running, "waiting": waiting, **self.llm.loop.totals.to_dict()}

    async def close(self, drain: bool = True) -> None:
        """Take no more requests, and stop when those submitted have ended.

        Args:
            drain: wait for them; else cancel them.
        """
        with self._changed:
            if self.state == "new":
                self.state = "stopped"
            if self.state == "stopped":
                return
            self.state = "draining" if drain and self.state != "cancelling" else "cancelling"
            self._changed.notify()
        self.llm.grammars.close()
        if self.state == "cancelling":
            self._give_up = min(self._give_up, time.monotonic() + STOP_SECONDS)
        while self._thread.is_alive() and time.monotonic() < self._give_up:
            await asyncio.sleep(0.01)
        if self._thread.is_alive():
            log.critical("the engine does not stop; it is left behind")

    @property
    def ready(self) -> bool:
        """Whether it takes requests, and is prepared for them."""
        return self.state == "open" and self._prepared

    def _check_open(self) -> None:
        if self.state != "open":
            raise EngineStopped(f"takes no requests: it is {self.state}") from self.cause

    def _cancel(self, requests: Sequence[Request]) -> None:
        """Takes no lock: garbage is collected in any thread, even in one that holds the scheduler's lock.

        Nor is the engine woken: it never sleeps while a queued request has not ended. Others are ignored.
        """
        self._cancelled.extend(request for request in requests if request.finish_reason is None)

    # Everything below runs in the engine's thread.

    def _run(self) -> None:
        loop = self.llm.loop
        try:
            with contextlib.suppress(InvalidInput):  # whoever asks for a grammar is told
                self.llm.grammars.prepare()
            self._prepared = True
            while self._receive():
                self._deliver(loop.step())
        except BaseException as error:  # a broken invariant: nothing can be trusted any more
            log.critical("the engine stopped", exc_info=error)
            with self._changed:
                self.state, self.cause = "stopped", error
            left = [*loop.scheduler.requests, *loop.ended]
            for request in left:
                if request.finish_reason is None:
                    request.finish_reason, request.error = "error", RequestFailed(f"the engine stopped: {error}")
            self._deliver(left)

    def _receive(self) -> bool:
        """Wait for something to do, and cancel what is to be cancelled; False when there is nothing left to do."""
        loop = self.llm.loop
        if loop.idle:
            with self._changed:
                while not self._cancelled and loop.idle:
                    if self.state != "open":
                        self.state = "stopped"
                        return False
                    self._changed.wait()
        cancelled = [self._cancelled.popleft() for _ in range(len(self._cancelled))]
        if self.state == "cancelling":
            cancelled = [*loop.scheduler.requests]
        if cancelled:  # which looks through the whole queue
            loop.cancel(cancelled)
        return True

    def _deliver(self, ended: list[Request]) -> None:
        deltas: dict[asyncio.AbstractEventLoop, list[tuple[Request, Inbox, OutputDelta]]] = {}
        for request in dict.fromkeys((*self.llm.loop.scheduler.running, *ended)):
            choice = request.choice
            if choice and (delta := choice.delta(request)):
                deltas.setdefault(choice.inbox.loop, []).append((request, choice.inbox, delta))
        for event_loop, batch in deltas.items():
            try:
                event_loop.call_soon_threadsafe(_put, batch)
            except RuntimeError:  # that event loop is closed
                self.llm.loop.cancel([request for request, _, _ in batch])


def _put(batch: list[tuple[Request, Inbox, OutputDelta]]) -> None:
    for _, inbox, delta in batch:
        inbox.put(delta)
