"""Clients of other projects: the runner checks one that is installed here against a server."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from scripts.clients import __main__ as clients


@pytest.mark.slow
def test_a_client_gets_what_it_must_and_the_results_say_so(
    demo_pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "environment", lambda name: Path(sys.executable))
    monkeypatch.setattr(clients, "BUILD", tmp_path)
    monkeypatch.setattr(sys, "argv", ["clients", "openai", "--pair", str(demo_pair), "--results", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        clients.main()
    assert ended.value.code == 0
    (found,) = json.loads((tmp_path / "clients.json").read_text())["figures"].values()
    assert (found[0], found[-1]) == ("openai", "passed")
