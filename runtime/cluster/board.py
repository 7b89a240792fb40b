"""What the replicas report: in a process of its own, which needs nothing that an engine does."""

from __future__ import annotations

import time
from typing import Any

from prometheus_client.core import Metric

STALE_SECONDS = 5.0
"""A replica that has not reported for so long is not counted any more."""

Report = tuple[dict[str, str], list[Metric], dict[str, Any]]
"""What tells a replica from others, as labels, `replica` among them; its metrics; and its entry of `/v1/models`."""


class Board:
    """The latest report of each replica, until it is stale: a Ray actor, which the gateway reads.

    Ray Serve's own calls to a replica wait while it is full, which is when figures matter most.
    """

    def __init__(self) -> None:
        self._reports: dict[str, tuple[float, Report]] = {}

    def put(self, report: Report) -> None:
        self._reports[report[0]["replica"]] = time.monotonic(), report

    def reports(self) -> list[Report]:
        oldest = time.monotonic() - STALE_SECONDS
        self._reports = {id: known for id, known in self._reports.items() if known[0] > oldest}
        return [report for _, report in self._reports.values()]
