"""What comes back of a request while it runs: deltas of its output, and the stream that an event loop reads."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass

from runtime.scheduler.request import Output, Request, Result


@dataclass(frozen=True)
class OutputDelta(Output):
    """What one block added to one choice.

    Attributes:
        text: never part of a stop string, complete characters only. It may lag behind its tokens.
        finish_reason, statistics: on the choice's last delta, else None.
        index: the choice; counts on over the prompts of `submit_many`.
        offsets: where in the choice's whole text each of the new tokens begins, in characters.
        drafted, accepted: tokens drafted for it, and its leading tokens that are accepted drafts; what follows them is
            the target's own (the bonus token).
    """

    offsets: list[int]
    drafted: int
    accepted: int


@dataclass(eq=False)
class Choice:
    """How much of a request has gone to its stream; owned by the engine's thread."""

    inbox: Inbox
    index: int
    tokens: int = 0
    characters: int = 0
    drafted: int = 0
    accepted: int = 0

    def delta(self, request: Request) -> OutputDelta | None:
        """What is new since the last call; None if nothing is."""
        at = self.tokens
        ended = request.finish_reason is not None
        upto = len(request.text) if ended else request.stable
        if not ended and at == len(request.tokens) and self.characters >= upto:
            return None
        start, self.characters = self.characters, max(self.characters, upto)
        self.tokens = len(request.tokens)
        drafted, self.drafted = request.statistics.drafted - self.drafted, request.statistics.drafted
        accepted, self.accepted = request.statistics.accepted - self.accepted, request.statistics.accepted
        own = {"offsets": request.offsets[at:], "drafted": drafted, "accepted": accepted}
        return OutputDelta.of_part(request, self.index, at, start, upto, **own)


class Inbox:
    """What has come and was not taken yet. The engine keeps it, and not the stream, which its reader may drop."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.deltas: list[OutputDelta] = []
        self.reader: asyncio.Future[None] | None = None

    def put(self, delta: OutputDelta) -> None:
        """Add a delta and wake the reader. In the stream's event loop."""
        self.deltas.append(delta)
        if self.reader is not None and not self.reader.done():
            self.reader.set_result(None)


class Stream:
    """The output of what was submitted: `async for delta in stream`. Leaving the loop early cancels the requests.

    So does dropping it. Belongs to the event loop that makes it.
    """

    def __init__(self, requests: list[Request], cancel: Callable[[Sequence[Request]], None]) -> None:
        self.requests, self.inbox = requests, Inbox()
        self._cancel = weakref.finalize(self, cancel, requests)  # once, and whoever drops it wants no more of it
        self._cancel.atexit = False
        self._open = len(requests)  # choices whose last delta has not been taken

    async def take(self) -> list[OutputDelta]:
        """The deltas that have come and were not taken yet, at least one; none once every choice has ended.

        For one reader at a time.

        Raises:
            RequestFailed: something broke under a choice, whose deltas before were taken; the cause is chained.
        """
        inbox = self.inbox
        while self._open and not inbox.deltas:
            inbox.reader = inbox.loop.create_future()
            await inbox.reader
        failed = next((at for at, delta in enumerate(inbox.deltas) if delta.finish_reason == "error"), None)
        if failed == 0:
            Result.of(self.requests[inbox.deltas[0].index])  # raises
        taken, inbox.deltas = inbox.deltas[:failed], [] if failed is None else inbox.deltas[failed:]
        self._open -= sum(delta.finish_reason is not None for delta in taken)
        return taken

    async def __aiter__(self) -> AsyncGenerator[OutputDelta]:
        try:
            while taken := await self.take():
                for delta in taken:
                    yield delta
        finally:
            self.cancel()

    @property
    def ended(self) -> bool:
        """Whether every choice's last delta was taken."""
        return not self._open

    def whole(self) -> list[OutputDelta]:
        """All output of each choice as one delta, when every choice has ended."""
        deltas = [Choice(self.inbox, index).delta(request) for index, request in enumerate(self.requests)]
        return [delta for delta in deltas if delta]

    def cancel(self) -> None:
        """End all its choices; their rows are free by the next block. What was produced by then is still delivered."""
        self._cancel()

    async def results(self) -> list[Result]:
        """Wait for the end: the result of each choice. Being cancelled cancels the request.

        Raises:
            RequestFailed: something broke under it; the cause is chained.
        """
        async for _ in self:
            pass
        return [Result.of(request) for request in self.requests]

    async def result(self) -> Result:
        """The first choice of `results`."""
        return (await self.results())[0]
