"""A loop whose blocks run as on a device, on mock engines, and requests with what each gets alone on the host."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from torch import Tensor

from engines.capture import Recorder
from mtad.methods import METHODS
from mtad.params import DecodingParams
from runtime.decoder.block import BlockInput
from runtime.decoder.cuda_graph.block_runner import CudaGraphRunner
from runtime.decoder.engine_role import EngineRole
from runtime.decoder.host_runner import HostRunner
from runtime.scheduler.request import Request
from tests.runtime.test_schedules import CAPACITY, alone, make_loop, pick_prompt, pick_values
from tests.support.integrity import check_loop
from tests.support.mock_engine import EOS, VOCAB, CapturableMock, MockEngine, mock_spec


class Device:
    """A loop whose blocks run as on a device, on mock engines.

    Attributes:
        auxiliary, target, recorder, blocks, loop: its parts.
    """

    def __init__(
        self,
        rows: int,
        recorder: Recorder,
        prefill: int = 64,
        prefix_tokens: int = 0,
        engine: Callable[..., MockEngine] = CapturableMock,
        most: int = 64,
    ) -> None:
        self.auxiliary, self.target = (engine(mock_spec(rows, CAPACITY), noise) for noise in (0.3, 0.0))
        roles = EngineRole(self.auxiliary, VOCAB, recorder), EngineRole(self.target, VOCAB, recorder)
        host = HostRunner(*roles, (EOS,))
        self.recorder = recorder
        self.blocks = CudaGraphRunner(host, (EOS,), recorder, most)
        self.loop = make_loop(roles, self.blocks, prefill, prefix_tokens, unrecorded=self.blocks.unrecorded)

    @property
    def of_the_host(self) -> tuple[Tensor, Tensor]:
        """The memory that the host writes, and that which it reads."""
        return self.blocks._arenas.sent.bytes(0), self.blocks._arenas.received.bytes(0)

    def generate(self, requests: Sequence[tuple[list[int], DecodingParams]], chance: random.Random) -> list[Request]:
        """Requests that join at random times."""
        left = list(reversed([Request(at, prompt, p, p.seed or 0) for at, (prompt, p) in enumerate(requests)]))
        added = left[::-1]
        while left or not self.loop.scheduler.idle:
            for _ in range(min(len(left), chance.choice([0, 1, 3]))):
                self.loop.scheduler.submit(left.pop())
            self.loop.step()
            check_loop(self.loop)
        return added


def fixed(values: dict[str, Any]) -> DecodingParams:
    return DecodingParams.from_dict({"draft_len": 4} | values)


@cache
def pool() -> list[tuple[list[int], DecodingParams, list[int], list[float]]]:
    """Requests of every captured method, and what each gets alone, on the host."""
    chance, entries = random.Random(1), []
    methods = [name for name, method in METHODS.items() if method.captured]
    for number in range(16):
        values = pick_values(chance) | {"method": methods[number % len(methods)]}
        prompt, params = pick_prompt(chance), fixed(values)
        request = alone(prompt, params)
        entries.append((prompt, params, request.tokens, request.log_probs))
    return entries


def input_of(params: Sequence[DecodingParams], committed: int = 9) -> BlockInput:
    """A block of rows that no request has."""
    rows = len(params)
    last_two, keys = [(3 + row, 5) for row in range(rows)], [(row, 0) for row in range(rows)]
    return BlockInput(params, last_two, [committed + row for row in range(rows)], keys, [None] * rows, [True] * rows)
