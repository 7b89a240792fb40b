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
        make = self._backend.MetricFamily
        kinds = {"gauge": make.GAUGE, "counter": make.COUNTER}
        for family in self._source.collect():
            for sample in family.samples if family.type in kinds else ():
                labels = {"model": self._model, **sample.labels}
                key = sample.name, tuple(sorted(labels.items()))
                if sample.name not in self._families:
                    own = make(name=sample.name, description=family.documentation, kind=kinds[family.type])
                    self._families[sample.name] = own
                if key not in self._metrics:
                    self._metrics[key] = self._families[sample.name].Metric(labels=labels), [0.0]
                metric, last = self._metrics[key]
                if family.type == "gauge":
                    metric.set(sample.value)
                elif sample.value > last[0]:
                    metric.increment(sample.value - last[0])
                last[0] = sample.value
