"""This package's own loop."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from mtad.params import DecodingParams
from runtime.llm import LLM
from runtime.scheduler.request import Request
from scripts.systems.system import Finished, Prompt, Slice, System


class InFlight(System):
    """This package's loop, through the synchronous `LLM.add` and `LLM.step`.

    Args:
        name: the method's name in tables.
        llm: an idle pair of engines with at least as many rows as are ever in flight, for this object alone.
    """

    def __init__(self, name: str, llm: LLM) -> None:
        self.name, self._llm, self.tokenizer = name, llm, llm.pair.tokenizer
        self._clock = 0.0
        self._seed = 0
        self._requests: dict[int, tuple[Request, Prompt, float]] = {}
        self._firsts: dict[int, float] = {}

    def begin(self, prompts: Iterator[Prompt], load: int, params: DecodingParams) -> None:
        """Start with texts of staggered lengths, so that requests do not end in step; go on until all of them ended."""
        self._prompts, self._params = prompts, params
        lengths = [max(1, params.max_tokens * (number + 1) // load) for number in range(load)]
        initial = [self._submit(next(prompts), self._clock, length) for length in lengths]
        started = time.perf_counter()
        while any(request.finish_reason is None for request in initial):
            self._turn(started)
        self._clock += time.perf_counter() - started

    def slice(self, seconds: float) -> Slice:
        started, took = time.perf_counter(), 0.0
        tokens, finished = 0, []
        while took < seconds:
            gained, ended = self._turn(started)
            tokens += gained
            finished += ended
            took = time.perf_counter() - started
        self._clock += took
        return Slice(tokens, took, finished)

    def end(self) -> None:
        self._llm.cancel(*(request for request, _, _ in self._requests.values()))
        self._llm.step()
        self._requests.clear()
        self._firsts.clear()

    def run(self, prompts: Sequence[Prompt], load: int, params: DecodingParams) -> Slice:
        """Decode all prompts; a request's seed is its prompt's number."""
        waiting, found = list(prompts)[::-1], {}
        started = time.perf_counter()
        while waiting or self._requests:
            while waiting and len(self._requests) < load:
                prompt = waiting.pop()
                self._add(prompt, replace(params, seed=prompt.number), self._clock + time.perf_counter() - started)
            for one in self._step(started)[1]:
                found[one.prompt] = one
        took = time.perf_counter() - started
        self._clock += took
        finished = [found[prompt.number] for prompt in prompts]
        return Slice(sum(len(one.tokens) for one in finished), took, finished)

    def _submit(self, prompt: Prompt, now: float, max_tokens: int | None = None) -> Request:
        self._seed += 1
        params = replace(self._params, seed=self._seed, max_tokens=max_tokens or self._params.max_tokens)
        return self._add(prompt, params, now)

    def _add(self, prompt: Prompt, params: DecodingParams, now: float) -> Request:
        request = self._llm.add(prompt.ids, params)
        self._requests[request.id] = request, prompt, now
        return request

    def _turn(self, started: float) -> tuple[int, list[Finished]]:
        """One step; each request that ended in it is replaced."""
        gained, finished = self._step(started)
        for _ in finished:
            self._submit(next(self._prompts), self._clock + time.perf_counter() - started)
        return gained, finished

    def _step(self, started: float) -> tuple[int, list[Finished]]:
        before = sum(len(request.tokens) for request, _, _ in self._requests.values())
        ended = self._llm.step()
        now = self._clock + time.perf_counter() - started
        gained = sum(len(request.tokens) for request, _, _ in self._requests.values()) - before
        for id, (request, _, _) in self._requests.items():
            if request.tokens:
                self._firsts.setdefault(id, now)
        finished = []
        for request in ended:
            self._llm.result(request)  # raises if it failed
            _, prompt, submitted = self._requests.pop(request.id)
            first = self._firsts.pop(request.id)
            finished.append(Finished(prompt.number, request.tokens, first - submitted, now - submitted))
        return gained, finished
