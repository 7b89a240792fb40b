"""The soak: a short one finds nothing wrong with a server, and each thing it looks for is found when it is there."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scripts.clients.served import Server
from scripts.paths import ROOT
from scripts.soak import wire
from scripts.soak.__main__ import growth, problems
from scripts.soak.attacks import ATTACKS


@pytest.mark.slow
def test_a_server_under_attack_gives_every_control_stream_its_text(demo_pair: Path, tmp_path: Path) -> None:
    command = ("-m", "scripts.soak", "--quick", "--pair", str(demo_pair), "--results", str(tmp_path))
    subprocess.run([sys.executable, *command], cwd=ROOT, check=False)
    figures = json.loads((tmp_path / "soak.json").read_text())["figures"]
    assert not [problem for problem in problems(figures) if "waited" not in problem], "how long depends on the machine"
    assert all(seen["ended"]["right"] > 0 for seen in figures["streams"].values())
    assert any(attack["given"] for attack in figures["attacks"].values())
    wrong: list[tuple[dict[str, Any], str, Any]] = [
        (figures["streams"]["alone"], "problems", ["wrong: 'a' instead of 'b'"]),
        *(
            (figures["streams"]["beside attacks"], name, figures["streams"]["alone"][name] + 1)
            for name in ("gap", "health")
        ),
        (figures["attacks"]["brackets"], "given", {"500": 1}),
        (figures, "files", [10, 100]),
        (figures, "left_over", ["mtad_requests_running 1.0"]),
    ]
    for place, name, value in wrong:
        known, place[name] = place[name], value
        found = problems(figures)
        assert sum("waited" not in problem for problem in found) == (name not in ("gap", "health")), name
        assert name != "gap" or "control stream waited" in str(found)
        assert name != "health" or "health waited" in str(found)
        place[name] = known
    figures["readings"]["beside attacks"] = [(0.0, 0.0, 0)] * 61
    assert any("not made; give more minutes" in problem for problem in problems(figures)), "in a longer one"


@pytest.mark.parametrize("later", [{2: 0.0, 3: 0.0}, {1: 0.0, 2: 0.0}, {2: 0.0}])
def test_a_replica_that_does_not_come_back_is_found(later: dict[int, float], monkeypatch: pytest.MonkeyPatch) -> None:
    known, struck = [{1: 4.0, 2: 1.0}], list[int]()
    monkeypatch.setattr(wire, "replicas", lambda _: known.pop() if known else later)
    monkeypatch.setattr("os.kill", lambda pid, _: struck.append(pid))
    monkeypatch.setattr(wire, "RECOVERY", 0.05)
    striking = wire.strike(signal.SIGKILL)(Server("", 0), 0)
    if later.keys() == {2, 3}:
        assert asyncio.run(striking) == 200  # type: ignore[arg-type]
    else:
        with pytest.raises(TimeoutError):
            asyncio.run(striking)  # type: ignore[arg-type]
    assert struck == [1]
    assert {attack.answers for attack in ATTACKS if attack.on_replicas} == {(200,)}


@pytest.mark.parametrize("leak", [0.0, 5.0])
def test_the_growth_of_memory_is_the_leak_within_its_error(leak: float) -> None:
    seconds, noise = np.arange(300.0), np.random.default_rng(0).normal(0, 0.3, 300)
    started = 40 * np.minimum(1, seconds / 60)
    slope, error = growth([(at, mib, 9) for at, mib in enumerate(600 + started + leak * seconds / 60 + noise)])
    assert abs(slope - leak) < 3 * error
    assert 0 < error < 0.1
