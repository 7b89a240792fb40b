"""Where replicas report their figures once a second, and the gateway reads them. A Ray actor; no Ray in here."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

STALE_SECONDS = 5.0
"""A replica that has not reported for so long is not counted any more."""


@dataclass(frozen=True)
class ReplicaReport:
    """What one replica says."""

    replica: str
    host: str
    process: int
    generation: int
    ready: bool
    metrics: str


class Board:
    """The latest report of each replica, until it is stale."""

    def __init__(self) -> None:
        self._reports: dict[str, tuple[float, ReplicaReport]] = {}

    def put(self, report: ReplicaReport) -> None:
        self._reports[report.replica] = time.monotonic(), report

    def reports(self) -> list[ReplicaReport]:
        oldest = time.monotonic() - STALE_SECONDS
        self._reports = {id: known for id, known in self._reports.items() if known[0] > oldest}
        return [report for _, report in self._reports.values()]


class ClusterMetrics(Collector):
    """All replicas' metrics under one roof, each sample with a label `replica`, beside the gateway's own."""

    def __init__(self, reports: Iterable[ReplicaReport], own: Iterable[Metric]) -> None:
        self._reports, self._own = list(reports), list(own)

    def collect(self) -> Iterator[Metric]:
        yield from self._own
        known = GaugeMetricFamily("mtad_replica", "1; a replica", labels=("replica", "host", "pid", "generation"))
        families: dict[str, Metric] = {}
        for report in self._reports:
            known.add_metric((report.replica, report.host, str(report.process), str(report.generation)), 1)
            for family in text_string_to_metric_families(report.metrics):
                merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    merged.add_sample(sample.name, {"replica": report.replica, **sample.labels}, sample.value)
        yield known
        yield from families.values()
