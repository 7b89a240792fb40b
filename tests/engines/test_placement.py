"""Where engines run."""

from __future__ import annotations

from pathlib import Path

import pytest

from engines.placement import cores


@pytest.mark.parametrize(("limit", "count"), [("max 100000", 8), ("250000 100000", 2), ("50000 100000", 1), (None, 8)])
def test_a_containers_limit_of_time_counts_as_cores(
    limit: str | None, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(path: Path) -> str:
        assert path == Path("/sys/fs/cgroup/cpu.max")
        if limit is None:
            raise FileNotFoundError(path)
        return limit

    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(8))
    monkeypatch.setattr(Path, "read_text", read)
    assert cores() == count
