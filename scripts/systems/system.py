"""What a system is: prompts in, slices of time, tokens out."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from mtad.params import DecodingParams


@dataclass(frozen=True)
class Prompt:
    """One prompt: its number in the examples, and its token ids."""

    number: int
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Finished:
    """One answered prompt.

    Attributes:
        prompt: its number.
        tokens: new tokens up to the end of the text, a final end-of-sequence token included.
        first, whole: seconds from submission to the first token, and to the last one being there for the caller.
        first_tokens: tokens that were there with the first.
    """

    prompt: int
    tokens: list[int]
    first: float
    whole: float
    first_tokens: int = 1

    @property
    def per_token(self) -> float | None:
        """Seconds a token after the first; None for a single token."""
        return (self.whole - self.first) / (len(self.tokens) - 1) if len(self.tokens) > 1 else None


@dataclass(frozen=True)
class Slice:
    """What a system did in one slice: useful tokens, its wall-clock seconds, the requests that ended in it."""

    tokens: int
    seconds: float
    finished: list[Finished]


def useful(tokens: Sequence[int], eos: Sequence[int]) -> list[int]:
    """Tokens up to the first end-of-sequence token, itself included: what follows in a static batch is padding."""
    ends = [at for at, token in enumerate(tokens) if token in eos]
    return list(tokens[: ends[0] + 1] if ends else tokens)


class System(ABC):
    """One system under measurement."""

    name: str

    @abstractmethod
    def begin(self, prompts: Iterator[Prompt], load: int, params: DecodingParams) -> None:
        """Take up a stream of prompts, `load` in flight, and run until the system is warm; nothing of it is counted."""

    @abstractmethod
    def slice(self, seconds: float) -> Slice:
        """Run for `seconds`, or a little longer where requests cannot be interrupted."""

    @abstractmethod
    def end(self) -> None:
        """Let go of what is in flight."""

    @abstractmethod
    def run(self, prompts: Sequence[Prompt], load: int, params: DecodingParams) -> Slice:
        """Answer all prompts, at most `load` at a time; `finished` is in their order. Nothing may be in flight."""


class Batched(System):
    """A system that runs one batch of prompts from beginning to end."""

    largest: int | None = None
    """Largest batch it takes; None: any."""

    def begin(self, prompts: Iterator[Prompt], load: int, params: DecodingParams) -> None:
        """Decode one short batch."""
        self._prompts, self._params = prompts, params
        self._size = min(load, self.largest or load)
        self._run([next(prompts) for _ in range(self._size)], replace(params, max_tokens=8))

    def slice(self, seconds: float) -> Slice:
        """Whole batches, until `seconds` have gone by."""
        finished: list[Finished] = []
        started, took = time.perf_counter(), 0.0
        while took < seconds:
            finished += self._run([next(self._prompts) for _ in range(self._size)], self._params)
            took = time.perf_counter() - started
        return Slice(sum(len(one.tokens) for one in finished), took, finished)

    def end(self) -> None:
        """Nothing is to be done: nothing is left in flight."""

    def run(self, prompts: Sequence[Prompt], load: int, params: DecodingParams) -> Slice:
        size, started = min(load, self.largest or load), time.perf_counter()
        batches = [list(prompts[at : at + size]) for at in range(0, len(prompts), size)]
        finished = [one for batch in batches for one in self._run(batch, params)]
        return Slice(sum(len(one.tokens) for one in finished), time.perf_counter() - started, finished)

    @abstractmethod
    def _run(self, batch: list[Prompt], params: DecodingParams) -> list[Finished]: ...
