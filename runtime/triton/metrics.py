"""The HTTP server's metrics through Triton's own `/metrics`: gauges and counters, no histograms."""

from __future__ import annotations

from typing import Any

from runtime.async_llm import AsyncLLM
from runtime.server.metrics import Metrics


class TritonMetrics:
    """Copies the figures of `runtime.server.metrics` to Triton's metrics.

    Triton's metric objects are not safe for two threads at once (the server dies); one thread makes and updates them.
    """

    def __init__(self, engine: AsyncLLM, model: str, backend: Any) -> None:
        self._source = Metrics(engine, model)
        self._model, self._backend = model, backend
        self._families: dict[str, Any] = {}
        self._metrics: dict[tuple[str, tuple[tuple[str, str], ...]], tuple[Any, list[float]]] = {}

    def update(self) -> None:
        for family in self._source.collect():
            if family.type not in ("gauge", "counter"):
                continue
            for sample in family.samples:
                self._set(family.type, sample.name, family.documentation, sample.labels, sample.value)

    def _set(self, kind: str, name: str, words: str, labels: dict[str, str], value: float) -> None:
        labels = {"model": self._model, **labels}
        key = name, tuple(sorted(labels.items()))
        if name not in self._families:
            make = self._backend.MetricFamily
            kinds = {"gauge": make.GAUGE, "counter": make.COUNTER}
            self._families[name] = make(name=name, description=words, kind=kinds[kind])
        if key not in self._metrics:
            self._metrics[key] = self._families[name].Metric(labels=labels), [0.0]
        metric, last = self._metrics[key]
        if kind == "gauge":
            metric.set(value)
        elif value > last[0]:
            metric.increment(value - last[0])
        last[0] = value
