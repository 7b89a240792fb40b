"""Prometheus metrics, read off the engine when they are scraped: they cost nothing between two scrapes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

from prometheus_client import ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from starlette.responses import Response

from runtime.async_llm import AsyncLLM
from runtime.resting import RestingThread, Turn
from runtime.scheduler.statistics import LENGTHS, SECONDS, Histogram

PHASES = ("prefill", "draft", "score", "commit")


class Scrapes:
    """The texts that Prometheus reads. One takes some milliseconds of the interpreter: requests share it meanwhile."""

    def __init__(self, turn: Turn) -> None:
        self._thread = RestingThread(turn)
        self._made: asyncio.Future[Response] | None = None

    async def answer(self, families: Callable[[], list[Metric]]) -> Response:
        if self._made is None or self._made.done():
            self._made = asyncio.ensure_future(self._thread.run(_exposition, families))
        return await asyncio.shield(self._made)


def _exposition(families: Callable[[], list[Metric]]) -> Response:
    collected: Any = SimpleNamespace(collect=families)  # all that is asked of a registry
    return Response(generate_latest(collected), headers={"content-type": CONTENT_TYPE_PLAIN_0_0_4})


class Metrics:
    """All metrics of one server.

    Attributes:
        gaps: seconds between two deltas of a choice; the responders add to it.
    """

    def __init__(self, engine: AsyncLLM, model: str) -> None:
        self._engine, self._model = engine, model
        self._responses: Counter[tuple[str, str]] = Counter()
        self.gaps = Histogram(SECONDS)
        self._process = ProcessCollector(registry=None)

    def responded(self, route: str, status: int) -> None:
        self._responses[route, str(status)] += 1

    def families(self) -> list[Metric]:
        """All metrics, and those of the process."""
        return [*self.collect(), *self._process.collect()]

    def collect(self) -> Iterator[Metric]:
        loop = self._engine.llm.loop
        totals, scheduler, now = loop.totals, loop.scheduler, self._engine.statistics()
        yield _gauge("mtad_model", "1; what is served", {self._model: 1}, "model")
        yield _gauge("mtad_requests_running", "requests that hold a row", now["running"])
        yield _gauge("mtad_queue_length", "requests that wait for a row", now["waiting"])
        yield _gauge("mtad_queue_limit", "requests that may wait", scheduler.max_waiting)
        yield _gauge("mtad_kv_rows", "rows of the KV caches", self._engine.llm.pair.target.spec.rows)
        yield _counter("mtad_requests", "ended requests, by how they ended", dict(totals.requests), "reason")
        yield _counter("mtad_http_responses", "HTTP responses", dict(self._responses), "route", "status")
        yield _counter("mtad_prompt_tokens", "prompt tokens of ended requests", totals.prompt_tokens)
        yield _counter("mtad_reused_prompt_tokens", "of them, those found in the prefix cache", totals.reused_tokens)
        yield _counter("mtad_preemptions", "times that a request gave up its row for pages", totals.preemptions)
        yield _counter("mtad_generated_tokens", "new tokens", totals.tokens)
        yield _counter("mtad_drafted_tokens", "tokens drafted along one path", totals.drafted)
        yield _counter("mtad_accepted_tokens", "drafted tokens that became part of a text", totals.accepted)
        yield _counter("mtad_target_passes", "passes of the target, each of each row counted", totals.target_passes)
        yield _counter("mtad_thinking_tokens", "tokens of blocks that began in a thought", totals.thinking_tokens)
        yield _counter("mtad_thinking_passes", "passes that began in a thought", totals.thinking_passes)
        yield _counter("mtad_blocks", "blocks, whatever their rows", totals.turns)
        if totals.unrecorded:
            reasons = dict(totals.unrecorded)
            yield _counter("mtad_unrecorded_blocks", "on a GPU, blocks that were no CUDA graph", reasons, "reason")

        seconds = {"queue": totals.queue.sum} | {phase: getattr(totals, f"{phase}_seconds") for phase in PHASES}
        yield _counter("mtad_phase_seconds", "seconds by phase: waiting summed over requests", seconds, "phase")
        yield _histogram("mtad_queue_seconds", "from submission until a row was free", totals.queue)
        yield _histogram("mtad_time_to_first_token_seconds", "from submission to the first token", totals.first_token)
        yield _histogram("mtad_inter_block_seconds", "between two deltas of a choice", self.gaps)
        yield _histogram("mtad_time_per_token_seconds", "a request's mean after its first token", totals.per_token)
        yield _histogram("mtad_request_seconds", "from submission to the end", totals.total)
        yield _histogram("mtad_request_prompt_tokens", "prompt tokens per request", totals.prompt)
        yield _histogram("mtad_request_generated_tokens", "new tokens per request", totals.output)
        accepted = Histogram(LENGTHS)
        for length, blocks in enumerate(list(totals.accepted_lengths)):
            accepted.add(length, blocks)
        yield _histogram("mtad_accepted_length", "accepted tokens of a drafted block", accepted)


def _family(kind: Any, name: str, words: str, values: float | Mapping[Any, float], *labels: str) -> Metric:
    """One sample, or one per value of the labels; several labels are a tuple."""
    family: Metric = kind(name, words, labels=labels)
    for key, value in values.items() if isinstance(values, Mapping) else (((), values),):
        kind.add_metric(family, key if isinstance(key, tuple) else (key,), value)
    return family


_gauge = partial(_family, GaugeMetricFamily)
_counter = partial(_family, CounterMetricFamily)  # its names get the ending `_total`


def _histogram(name: str, words: str, values: Histogram) -> Metric:
    bounds = [*(str(float(bound)) for bound in values.bounds), "+Inf"]
    buckets = list(zip(bounds, accumulate(list(values.counts)), strict=True))
    return HistogramMetricFamily(name, words, buckets=buckets, sum_value=values.sum)
