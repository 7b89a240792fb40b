"""The engine behind the Triton model: one `AsyncLLM` and one event loop in a thread; requests come from another."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from runtime.async_llm import AsyncLLM
from runtime.output.stream import Stream
from runtime.server.chat import prompt_text
from runtime.server.errors import ApiError, api_error, cancelled, timed_out
from runtime.triton.request import Array, TritonRequest, read
from runtime.triton.response import TritonResponse

if TYPE_CHECKING:  # it needs Triton
    from runtime.triton.model import TritonSender

log = logging.getLogger(__name__)

WATCH_SECONDS = 0.05
"""How often Triton is asked whether clients have given up; a cancelled row is free at most one block later."""
TICK_SECONDS = 1.0


class TritonService:
    """Serves requests with one engine; all of them share its batch.

    Args:
        engine: not started yet; the service starts and stops it.
        request_seconds: after which a request is cancelled, > 0.
        tick: called in the service's thread about once a second, and must not take long.
    """

    def __init__(self, engine: AsyncLLM, request_seconds: float, tick: Callable[[], None] = lambda: None) -> None:
        self.engine, self._seconds, self._tick = engine, request_seconds, tick
        self._open: dict[asyncio.Task[None], TritonSender] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="mtad-triton", daemon=True)

    def start(self) -> None:
        self.engine.start()
        self._watcher = self._loop.create_task(self._watch())
        self._thread.start()

    def submit(self, tensors: dict[str, Array], sender: TritonSender) -> None:
        """Serve a request, in the service's thread; returns at once."""
        self._loop.call_soon_threadsafe(self._begin, tensors, sender)

    def refuse(self, error: BaseException, sender: TritonSender) -> None:
        self._loop.call_soon_threadsafe(sender.fail, api_error(error))

    def stop(self) -> None:
        """Cancel what still runs, and stop thread and engine."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        self._watcher.cancel()
        await self.engine.close(drain=False)
        with contextlib.suppress(asyncio.CancelledError):
            await self._watcher
        await asyncio.gather(*self._open, return_exceptions=True)

    def _begin(self, tensors: dict[str, Array], sender: TritonSender) -> None:
        task = self._loop.create_task(self._serve(tensors, sender))
        self._open[task] = sender
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        sender = self._open.pop(task)
        if task.cancelled():  # before it had begun: Triton waits for a last response all the same
            sender.fail(_given_up())
        elif task.exception():
            log.error("a response could not be sent", exc_info=task.exception())

    async def _watch(self) -> None:
        ticked = 0.0
        while True:
            begun = time.monotonic()
            for task, sender in list(self._open.items()):
                if sender.cancelled:
                    task.cancel()
            if begun >= ticked + TICK_SECONDS:
                ticked = begun
                try:
                    self._tick()
                except Exception as error:
                    log.error("figures were not brought up to date", exc_info=error)
            await asyncio.sleep(max(WATCH_SECONDS, 10 * (time.monotonic() - begun)))  # 30 us a request, each time

    async def _serve(self, tensors: dict[str, Array], sender: TritonSender) -> None:
        names: dict[str, str] = {}
        try:
            async with asyncio.timeout(self._seconds) as limit:
                pair = self.engine.llm.pair
                request = read(tensors, pair.defaults, pair.eos)
                names.update(request.names)
                stream = await self.engine.submit(request.prompt, request.params, request.settings.priority)
                await self._answer(request, stream, sender)
        except asyncio.CancelledError:  # the client gave up
            sender.fail(_given_up())
        except TimeoutError as error:
            sender.fail(timed_out(self._seconds) if limit.expired() else api_error(error))
        except Exception as error:
            sender.fail(api_error(error, names))

    async def _answer(self, request: TritonRequest, stream: Stream, sender: TritonSender) -> None:
        """Send what the stream brings; it is cancelled if that ends early."""
        settings = request.settings
        tokenizer = self.engine.llm.pair.tokenizer
        echo = "" if settings.exclude_input_in_output else prompt_text(tokenizer, request.prompt)
        response = TritonResponse(settings, stream.requests, echo)
        try:
            while taken := await stream.take():
                for delta in taken:
                    if delta.finish_reason == "cancelled":
                        raise cancelled()
                    if settings.stream:
                        sender.send(response.tensors([delta]), last=stream.ended and delta is taken[-1])
            if not settings.stream:
                sender.send(response.tensors(stream.whole()), last=True)
        finally:
            stream.cancel()


def _given_up() -> ApiError:
    return ApiError(499, "cancelled by the client", code="cancelled")
