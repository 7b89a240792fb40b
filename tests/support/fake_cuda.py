"""A recorder of CUDA graphs without CUDA: what is recorded is run again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from engines.graphs.capture import Work


class FakeRecorder:
    """Keeps account of what a real one would do.

    Attributes:
        recorded: recordings made.
        replayed: how often one of them was launched.
        inside: whether work goes to the recorder's stream.
    """

    def __init__(self) -> None:
        self.recorded, self.replayed, self.inside = 0, 0, False

    @contextmanager
    def ordered(self) -> Iterator[None]:
        assert not self.inside
        self.inside = True
        try:
            yield
        finally:
            self.inside = False

    def record(self, work: Work) -> Work:
        assert self.inside, "recorded on the caller's stream"
        work()
        self.recorded += 1

        def replay() -> None:
            assert self.inside, "launched on the caller's stream"
            self.replayed += 1
            work()

        return replay

    def wait(self) -> None:
        assert self.inside, "waited for the caller's stream"
