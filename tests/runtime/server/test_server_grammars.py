"""Grammars behind HTTP: only the client that sends a grammar waits for it."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from openai import APIError, BadRequestError

from mtad import LLM
from mtad.errors import Failed
from runtime.constraints import trial_process
from runtime.constraints.trials import TooSlow, Trials
from tests.support.hostile import BODIES
from tests.support.live_server import MODEL, LiveServer, ask, live
from tests.support.waiting import PATIENCE, Deadlines, own, until

HELD = "never compiled"

pytestmark = pytest.mark.slow


@pytest.fixture
def trying(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Slow trials of one expression take until they are ended; those that run."""
    running: list[str] = []
    run = Trials.run

    def held(self: Trials, field: str, text: str) -> Any:
        if text != HELD:
            return run(self, field, text)
        if self.seconds < trial_process.SECONDS:
            raise TooSlow(field, text, "held")
        running.append(text)
        until(lambda: self._closed)
        running.remove(text)
        raise Failed("ended")

    monkeypatch.setattr(Trials, "run", held)
    return running


def serves(server: LiveServer) -> None:
    """Others get their answers, grammars or not."""
    for others in ({}, {"regex": "[ab]{4}"}):
        assert ask(server, prompt="S", max_tokens=4, **others)[0] == 200


def test_a_compilation_has_the_time_of_a_request_and_only_its_sender_waits_for_it(
    plain: LLM, trying: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    deadlines = Deadlines()
    monkeypatch.setattr("runtime.server.streaming.asyncio", deadlines)
    with live(own(plain)) as server:
        asked = ThreadPoolExecutor(1).submit(ask, server, prompt="S", regex=HELD)
        until(lambda: bool(trying))
        serves(server)
        deadlines.end()
        status, answer = asked.result(PATIENCE)
        assert (status, answer["error"]["code"]) == (504, "timeout")
        serves(server)
    until(lambda: not trying)


def test_draining_does_not_wait_for_a_compilation(plain: LLM, trying: list[str]) -> None:
    with live(own(plain), drain_seconds=PATIENCE) as server:
        asked = ThreadPoolExecutor(1).submit(ask, server, prompt="S", regex=HELD)
        until(lambda: bool(trying))
        began = time.monotonic()
        server.drain()
        server.wait()
        assert asked.result(PATIENCE)[0] == 503
        assert time.monotonic() - began < PATIENCE / 2


@pytest.mark.parametrize("name", ["ambiguous grammar", "large expression"])
def test_an_attack_is_answered_to_its_sender_alone(name: str, server: LiveServer) -> None:
    body = {"max_tokens": 60, **BODIES[name]}
    usual = {"model": MODEL, "prompt": "S", "max_tokens": 100, "seed": 3}
    expected = server.client.completions.create(**usual).choices[0].text
    stream = server.client.completions.create(stream=True, **usual)
    text = next(stream).choices[0].text
    status, answer = ask(server, prompt="S", **body)
    assert status in (200, 400), answer
    assert status == 200 or answer["error"]["param"] in body
    assert text + "".join(chunk.choices[0].text for chunk in stream if chunk.choices) == expected
    serves(server)


def test_a_language_that_ends_before_min_tokens_is_a_mistake_of_its_sender(server: LiveServer) -> None:
    asked = {"model": MODEL, "prompt": "S", "max_tokens": 40, "extra_body": {"regex": "[ab]{2,3}", "min_tokens": 30}}
    with pytest.raises(BadRequestError, match="can only end after") as caught:
        server.client.completions.create(**asked)
    assert caught.value.param == "min_tokens"
    with pytest.raises(APIError, match="can only end after"):
        list(server.client.completions.create(stream=True, **asked))
