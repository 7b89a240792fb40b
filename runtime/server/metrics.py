"""Prometheus metrics, read off the engine when they are scraped: they cost nothing between two scrapes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from runtime.async_llm import AsyncLLM
from runtime.output.stream import Piece
from runtime.scheduler.statistics import SECONDS, Histogram
from runtime.server.energy import EnergyMeter

PHASES = ("queue", "prefill", "draft", "score", "commit")


class BlockClock:
    """Seconds between the pieces of a choice, as the server hands them out."""

    def __init__(self) -> None:
        self.gaps = Histogram(SECONDS)

    def choices(self) -> ChoiceClock:
        """A clock for the choices of one request."""
        return ChoiceClock(self.gaps)


class ChoiceClock:
    """When each choice of one request had its last piece."""

    def __init__(self, gaps: Histogram) -> None:
        self._gaps, self._last = gaps, dict[int, float]()

    def see(self, piece: Piece) -> None:
        """A piece is about to be sent."""
        now = time.perf_counter()
        if piece.index in self._last:
            self._gaps.add(now - self._last[piece.index])
        self._last[piece.index] = now


class Metrics(Collector):
    """All metrics of one server.

    Args:
        engine: the engine.
        model: the name it is served under.
        meter: its energy.

    Attributes:
        blocks: time between two blocks; whoever sends pieces tells it.
    """

    def __init__(self, engine: AsyncLLM, model: str, meter: EnergyMeter) -> None:
        self._engine, self._model, self._meter = engine, model, meter
        self._responses: dict[tuple[str, int], int] = {}
        self.blocks = BlockClock()
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def responded(self, route: str, status: int) -> None:
        """Count a response."""
        self._responses[route, status] = self._responses.get((route, status), 0) + 1

    def render(self, accept: str) -> tuple[bytes, str]:
        """The text Prometheus reads, and its content type.

        Args:
            accept: the scraper's `Accept` header.
        """
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    def describe(self) -> Iterable[Metric]:
        """Nothing: names are known when scraped."""
        return []

    def collect(self) -> Iterator[Metric]:
        """What Prometheus is told."""
        loop = self._engine.llm.loop
        totals, scheduler, now = loop.totals, loop.scheduler, self._engine.statistics()
        yield _gauge("mtad_model", "1; what is served", {self._model: 1}, "model")
        yield _gauge("mtad_requests_running", "requests that hold a row", now["running"])
        yield _gauge("mtad_queue_length", "requests that wait for a row", now["waiting"])
        yield _gauge("mtad_queue_limit", "requests that may wait", scheduler.max_waiting)
        yield _gauge("mtad_kv_rows", "rows of the KV caches", self._engine.llm.pair.target.spec.rows)
        yield _gauge("mtad_kv_rows_used", "rows that hold a request", now["running"])
        yield _counter("mtad_requests", "ended requests, by how they ended", dict(totals.requests), "reason")
        responses = CounterMetricFamily("mtad_http_responses", "HTTP responses", labels=("route", "status"))
        for (route, status), count in list(self._responses.items()):
            responses.add_metric((route, str(status)), count)
        yield responses

        yield _counter("mtad_prompt_tokens", "prompt tokens of ended requests", totals.prompt_tokens)
        yield _counter("mtad_reused_prompt_tokens", "of them, those found in the prefix cache", totals.reused_tokens)
        yield _counter("mtad_generated_tokens", "new tokens", totals.tokens)
        yield _counter("mtad_drafted_tokens", "tokens drafted along one path", totals.drafted)
        yield _counter("mtad_accepted_tokens", "drafted tokens that became part of a text", totals.accepted)
        yield _counter("mtad_target_passes", "passes of the target, each of each row counted", totals.target_passes)
        yield _counter("mtad_blocks", "blocks, whatever their rows", totals.turns)
        yield _gauge("mtad_block_efficiency", "tokens a target pass, since the start", totals.block_efficiency)
        yield _gauge("mtad_acceptance_rate", "accepted / drafted tokens, since the start", totals.acceptance_rate)
        alarms = "drafts accepted almost never (low) or almost always (high), 32 in a row"
        if totals.unrecorded:
            reasons = dict(totals.unrecorded)
            yield _counter("mtad_unrecorded_blocks", "on a GPU, blocks that were no CUDA graph", reasons, "reason")
        yield _counter("mtad_acceptance_alarms", alarms, dict(totals.alarms), "kind")

        seconds = {phase: getattr(totals, f"{phase}_seconds") for phase in PHASES[1:]}
        seconds = {"queue": totals.queue.sum, **seconds}
        yield _counter("mtad_phase_seconds", "seconds by phase: waiting summed over requests", seconds, "phase")
        yield _histogram("mtad_queue_seconds", "from submission until a row was free", totals.queue)
        yield _histogram("mtad_time_to_first_token_seconds", "from submission to the first token", totals.first_token)
        yield _histogram("mtad_inter_block_seconds", "between the pieces of a choice", self.blocks.gaps)
        yield _histogram("mtad_time_per_token_seconds", "a request's mean after its first token", totals.per_token)
        yield _histogram("mtad_request_seconds", "from submission to the end", totals.total)
        yield _histogram("mtad_request_prompt_tokens", "prompt tokens a request", totals.prompt)
        yield _histogram("mtad_request_generated_tokens", "new tokens a request", totals.output)
        yield _histogram("mtad_accepted_length", "accepted tokens of a drafted block", totals.accepted_lengths)
        joules = self._meter.joules("gpu")
        if joules:
            yield _counter("mtad_energy_joules", "energy of each GPU since the first scrape", joules, "gpu")


Values = float | Mapping[str, float]


def _gauge(name: str, words: str, values: Values, label: str = "") -> Metric:
    family = GaugeMetricFamily(name, words, labels=(label,) if label else ())
    for key, value in values.items() if isinstance(values, Mapping) else (("", values),):
        family.add_metric((key,) if label else (), value)
    return family


def _counter(name: str, words: str, values: Values, label: str = "") -> Metric:
    """Prometheus adds `_total` to its name."""
    family = CounterMetricFamily(name, words, labels=(label,) if label else ())
    for key, value in values.items() if isinstance(values, Mapping) else (("", values),):
        family.add_metric((key,) if label else (), value)
    return family


def _histogram(name: str, words: str, values: Histogram) -> Metric:
    bounds = [*(str(float(bound)) for bound in values.bounds), "+Inf"]
    buckets = list(zip(bounds, accumulate(list(values.counts)), strict=True))
    return HistogramMetricFamily(name, words, buckets=buckets, sum_value=values.sum)
