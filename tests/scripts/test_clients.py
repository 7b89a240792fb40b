"""Clients of other projects: the runner checks one that is installed here against a server."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mtad import LLM
from mtad.errors import Failed
from scripts.clients import __main__ as clients
from scripts.clients.served import MODEL, Server, started
from tests.support.live_server import live
from tests.support.waiting import own


@pytest.mark.slow
def test_a_client_gets_what_it_must_and_the_results_say_so(
    demo: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def served(*_: object) -> Iterator[Server]:
        with live(own(demo), model=MODEL) as server:
            yield Server(server.url, os.getpid())

    monkeypatch.setattr(clients, "served", served)
    monkeypatch.setattr(clients, "environment", lambda name: Path(sys.executable))
    monkeypatch.setattr(clients, "BUILD", tmp_path)
    monkeypatch.setattr(sys, "argv", ["clients", "openai", "--results", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        clients.main()
    assert ended.value.code == 0
    (found,) = json.loads((tmp_path / "clients.json").read_text())["figures"].values()
    assert (found[0], found[-1]) == ("openai", "passed")


def test_a_server_that_does_not_start_or_not_end_cleanly_is_told_with_what_it_said() -> None:
    says = [sys.executable, "-c", "import sys; print('no such pair'); sys.exit(3)"]
    with pytest.raises(Failed, match="does not answer: no such pair"), started(says, 60):
        pass
    other = [sys.executable, "-m", "http.server", "--bind", "127.0.0.1"]
    with started(other, 60, ready="/README.md") as (url, _):
        assert url.startswith("http://127.0.0.1:")
    with (
        pytest.raises(Failed, match=r"(?s)ended with code -15: .*/README\.md"),
        started(other, 60, "/README.md", ends_cleanly=True),
    ):
        pass
