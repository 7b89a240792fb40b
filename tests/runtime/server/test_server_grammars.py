"""Grammars of strangers behind HTTP: who sends one waits for it, and nobody else does."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import pytest
from openai import APIError, BadRequestError

from runtime import LLM
from runtime.constraints.trials import Stopped, Trial, Trials
from scripts.soak import attacks
from tests.support.live_server import MODEL, LiveServer, ask, live
from tests.support.waiting import PATIENCE, own, until

HELD = "never compiled"

pytestmark = pytest.mark.slow


@pytest.fixture
def trying(monkeypatch: pytest.MonkeyPatch) -> list[Trial]:
    """Trials of one expression take until they are stopped; those that run."""
    running: list[Trial] = []
    run = Trials.run

    def held(self: Trials, trial: Trial, field: str, text: str, *others: Any) -> Any:
        if text != HELD:
            return run(self, trial, field, text, *others)
        running.append(trial)
        until(lambda: trial.stopped)
        running.remove(trial)
        raise Stopped

    monkeypatch.setattr(Trials, "run", held)
    return running


def serves(server: LiveServer) -> None:
    """Others get their answers, grammars or not."""
    for others in ({}, {"regex": "[ab]{4}"}):
        assert ask(server, prompt="S", max_tokens=4, **others)[0] == 200


def test_a_compilation_has_the_time_of_a_request(plain: LLM, trying: list[Trial]) -> None:
    with live(own(plain), request_seconds=2.0) as server:
        status, answer = ask(server, prompt="S", regex=HELD)
        assert (status, answer["error"]["code"]) == (504, "timeout")
        until(lambda: not trying)
        serves(server)


def test_hanging_up_ends_a_compilation_and_nobody_waits_for_it(plain: LLM, trying: list[Trial]) -> None:
    body = b'{"model": "%s", "prompt": "S", "regex": "%s"}' % (MODEL.encode(), HELD.encode())
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += b"content-length: %d\r\n\r\n"
    with live(own(plain)) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as connection:
            connection.sendall(head % len(body) + body)
            until(lambda: bool(trying))
            serves(server)
        until(lambda: not trying)


def test_draining_does_not_wait_for_a_compilation(plain: LLM, trying: list[Trial]) -> None:
    found: list[int] = []
    with live(own(plain), drain_seconds=PATIENCE) as server:
        waiting = threading.Thread(target=lambda: found.append(ask(server, prompt="S", regex=HELD)[0]))
        waiting.start()
        until(lambda: bool(trying))
        began = time.monotonic()
        server.drain()
        server.wait()
        waiting.join(PATIENCE)
        assert time.monotonic() - began < PATIENCE / 2
    assert found == [503]


ATTACKS = {
    name: body
    for name, body in attacks.attacks().items()
    if not name.startswith("large expression") or name.endswith(" 0")
}


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_is_answered_to_its_sender_alone(name: str, server: LiveServer) -> None:
    body = {"max_tokens": 60, **ATTACKS[name]}
    body["max_tokens"] = min(body["max_tokens"], 60)
    if "min_tokens" in body:
        body["min_tokens"] = min(body["min_tokens"], 60)
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
