"""CUDA graphs without CUDA: a recorder whose recordings are run again, and what CUDA's own recorder uses of torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from engines.capture import Recorder, Work


class FakeRecorder(Recorder):
    """Keeps account of what a real one would do.

    Attributes:
        recorded: recordings made.
        replayed: how often one of them was launched.
        inside: whether work goes to the recorder's stream.
        waits: how often the host waited.
    """

    captures = True

    def __init__(self) -> None:
        super().__init__("cpu")
        self.recorded, self.replayed, self.inside, self.waits = 0, 0, False, 0

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
        self.waits += 1


class FakeTorchCuda:
    """In the place of what `engines.capture` uses of `torch.cuda`.

    Attributes:
        problem: of the end of every capture; None for none.
        captures: begun so far.
        mode: of torch's checks for waits.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, problem: str | None = None) -> None:
        self.problem, self.captures, self.mode = problem, 0, "default"
        stream = Mock(**{"return_value.synchronize.side_effect": self.wait})
        for name, value in {
            "Stream": stream,
            "current_stream": stream,
            "stream": lambda stream: nullcontext(),
            "graph_pool_handle": Mock(),
            "CUDAGraph": Mock(),
            "graph": self._capture,
            "get_sync_debug_mode": lambda: self.mode,
            "set_sync_debug_mode": self._set_mode,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)

    def wait(self) -> None:
        """An operation that waits for the device."""
        if self.mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation")

    def _set_mode(self, mode: str) -> None:
        self.mode = mode

    @contextmanager
    def _capture(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        self.captures += 1
        yield
        if self.problem:
            raise RuntimeError(self.problem)
