"""The runs with strangers, made-up requests and killed replicas: what they look for is found when it is there."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from schemathesis import GenerationMode

from mtad.params import DecodingParams
from runtime import LLM
from scripts.soak import crowd, fuzz, replicas
from scripts.soak.strangers import summarise
from tests.support.live_server import MODEL, LiveServer

LIMITS = SimpleNamespace(health=100.0, gap=250.0, leak_limit=5.0)
PARAMS = {"max_tokens": 12, "ignore_eos": True, "seed": 3}


def report(**seen: Any) -> dict[str, Any]:
    figures = {"health": [0.01], "firsts": [0.1], "gaps": [0.05], "ended": {"right": 7900}, "lost": [], "wrong": []}
    return summarise({**figures, "answers": {"a": {"400": 1}}, **seen}, seen.get("memory", flat()), LIMITS)


def flat(rise: float = 0.0) -> list[tuple[int, float]]:
    """Readings that rise by so many MiB per 1,000 requests."""
    return [(100 * at, 500 + 0.1 * rise * at + 0.2 * (at % 2)) for at in range(80)]


@pytest.mark.parametrize(
    ("seen", "failed"),
    [
        ({}, []),
        ({"lost": ["x"]}, ["lost"]),
        ({"wrong": ["x"]}, ["wrong"]),
        ({"answers": {"a": {"400": 5, "500": 1}}}, ["attacks"]),
        ({"health": [0.01, 0.2]}, ["health"]),
        ({"gaps": [0.01, 0.3]}, ["gap"]),
        ({"memory": flat(6.0)}, ["memory"]),
        ({"memory": flat()[:3]}, ["memory"]),
    ],
)
def test_each_thing_that_must_hold_fails_the_run(seen: dict[str, Any], failed: list[str]) -> None:
    assert report(**seen)["failed"] == failed


def test_requests_that_were_turned_away_count_as_answered() -> None:
    memory = report(memory=flat(6.0), ended={"right": 7900, "turned away": 7900})["memory_mib"]
    assert memory["slope_per_1000_answered"] == pytest.approx(memory["slope_per_1000_taken"] / 2, rel=1e-3)


@pytest.mark.slow
def test_a_crowd_gets_its_answers_and_notices_one_that_is_not(
    server: LiveServer, plain: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crowd, "attacks", lambda: {"no float32": {"top_p": 1e-300}})
    monkeypatch.setattr(crowd, "bodies", lambda: {"brackets": b"[" * 1000})
    monkeypatch.setattr(crowd, "heads", lambda _: {})
    params = DecodingParams.from_dict(dict(PARAMS), plain.pair.defaults)
    jobs: list[Any] = [({"model": MODEL, "prompt": "SELECT", **PARAMS}, plain.generate("SELECT", params)[0].text)]
    seen = asyncio.run(crowd.crowd(server.port, jobs, connections=4, seconds=1.5, strangers=2))
    assert seen.ended["right"] > 0
    assert not seen.lost + seen.wrong
    assert seen.gaps
    assert seen.health
    assert set(seen.answers["no float32"]) == set(seen.answers["brackets"]) == {400}
    seen = asyncio.run(
        crowd.crowd(server.port, [(jobs[0][0], "another text")], connections=1, seconds=0.3, strangers=0)
    )
    assert seen.wrong
    seen = asyncio.run(
        crowd.crowd(server.port, [({**jobs[0][0], "temperature": -1}, "")], connections=1, seconds=0.1, strangers=0)
    )
    assert seen.lost


@pytest.mark.slow
def test_made_up_parameters_and_requests_are_answered(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz, "MODEL", MODEL)
    statuses, wrong = fuzz.fuzz_parameters(server.url, 60, 1)
    assert not wrong
    assert {200, 400} <= set(statuses["parameters"])
    for mode in GenerationMode:
        statuses, wrong = fuzz.fuzz_schema(server.url, 60, 1, mode)
        assert not wrong
        assert sum(seen.total() for seen in statuses.values()) >= 40


def test_what_is_answered_with_500_or_not_at_all_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([(500, "x"), (0, "refused"), (200, "y"), (429, "")])
    monkeypatch.setattr(fuzz, "send", lambda url, body: next(answers))
    monkeypatch.setattr(fuzz, "THREADS", 1)
    statuses, wrong = fuzz.fuzz_parameters("", 4, 0)
    assert statuses["parameters"].total() == 4
    assert len(wrong) == 2


@pytest.mark.slow
def test_clients_of_replicas_tell_lost_from_broken(server: LiveServer, plain: LLM) -> None:
    params = DecodingParams.from_dict(dict(PARAMS), plain.pair.defaults)
    text, seen = plain.generate("SELECT", params)[0].text, replicas.Seen()
    body = {"model": MODEL, "prompt": "SELECT", **PARAMS}
    for stream in (False, True):
        replicas.ask(server.url, {**body, "stream": stream}, text, seen)
    assert (seen.ended["right"], seen.begun, seen.problems) == (2, 0, [])
    replicas.ask(server.url, {**body, "stream": True}, "another text", seen)
    replicas.ask(server.url, {**body, "temperature": -1, "stream": False}, text, seen)
    replicas.ask("http://127.0.0.1:1", {**body, "stream": False}, text, seen)
    assert len(seen.problems) == 3
