"""Loading what was compiled."""

from __future__ import annotations

from pathlib import Path

import filelock
import pytest

from runtime.decoder import host_runner
from runtime.decoder.host_runner import compile_rules


def test_who_loads_compiled_rules_waits_for_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host_runner, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(host_runner, "FileLock", lambda path: filelock.FileLock(path, timeout=0))
    (tmp_path / "compiled").touch()
    with filelock.FileLock(tmp_path / "compiling.lock"):
        compile_rules.__wrapped__()
    assert not caplog.records
