"""What one stranger sends never hurts another: bodies, heads, connections, clients that do not read."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from uvicorn.protocols.http.h11_impl import H11Protocol

from mtad import LLM
from runtime.server.bodies import MAX_VALUES
from runtime.server.middleware import BODIES_AT_ONCE
from tests.support.hostile_bytes import bodies, heads
from tests.support.live_server import MODEL, LiveServer, ask, call, connected, gated, live, received
from tests.support.waiting import PATIENCE, own, until

AT_ONCE = 1.0
"""Seconds of this process's time within which health is answered, whatever else it was sent; bodies once took 17."""
BODIES = bodies(MODEL)
HEADS = heads(MODEL, 400_000)
HEALTH = b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"

pytestmark = pytest.mark.slow


def post(body: bytes, **headers: str) -> bytes:
    fields = {"host": "127.0.0.1", "content-type": "application/json", "content-length": str(len(body)), **headers}
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in fields.items()]
    return "\r\n".join(["POST /v1/completions HTTP/1.1", *lines, "", ""]).encode() + body


@contextlib.contextmanager
def health_of(server: LiveServer) -> Iterator[list[float]]:
    """Asks for health all the time, over one connection; how long each answer came after the one before, see `AT_ONCE`.

    Who holds the interpreter keeps this thread from asking as well; the last answer is asked for when all is over.
    """
    taken, ended = list[float](), threading.Event()

    def ask_again(began: float) -> None:
        with connected(server) as connection:
            last = False
            while not last:
                last = ended.wait(0.002)
                connection.sendall(HEALTH)
                assert b" 200 " in received(connection, upto=b"}")
                taken.append(time.process_time() - began)
                began += taken[-1]

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask_again, time.process_time())
        try:
            yield taken
        finally:
            ended.set()
        asking.result()


@pytest.mark.parametrize("name", BODIES)
def test_health_is_answered_at_once_while_a_large_body_is_refused(name: str, server: LiveServer) -> None:
    body = BODIES[name]
    path = "/v1/chat/completions" if b'"messages"' in body[:60] else "/v1/completions"
    with health_of(server) as taken:
        status, _, answer = call(server, "POST", path, body)
    assert 400 <= status < 500
    assert len(answer["error"]["message"]) < 1000
    assert max(taken) < AT_ONCE


def test_as_many_values_as_are_allowed_are_read_without_holding_others_up(server: LiveServer) -> None:
    prompts = [[5] * 100] * (MAX_VALUES // 101 - 1)
    with health_of(server) as taken:
        status, answer = ask(server, prompt=prompts)
    assert (status, answer["error"]["param"]) == (400, "prompt")
    assert "choices per request" in answer["error"]["message"]
    assert max(taken) < AT_ONCE


def test_bodies_in_chunks_of_a_byte_hold_up_nobody(server: LiveServer) -> None:
    sent = post(b"", transfer_encoding="chunked").replace(b"content-length: 0\r\n", b"")
    with health_of(server) as taken, contextlib.ExitStack() as stack:
        connections = [stack.enter_context(connected(server)) for _ in range(8)]
        for connection in connections:
            connection.sendall(sent + b"1\r\na\r\n" * 8_000 + b"0\r\n\r\n")
        for connection in connections:
            assert b" 400 " in received(connection, upto=b"\r\n\r\n")
    assert max(taken) < AT_ONCE


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.engine.llm, "_longest_token", 3)
    room = server.engine.llm.loop.scheduler.room_for_tokens
    status, answer = ask(server, prompt="x" * (3 * room + 1))
    assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, "context_length_exceeded", "prompt")
    assert f"{3 * room + 1} characters" in answer["error"]["message"]
    message = [{"role": "user", "content": "x" * (3 * room + 1)}]
    status, _, answer = call(server, "POST", "/v1/chat/completions", {"model": MODEL, "messages": message})
    assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, "context_length_exceeded", "messages")


def test_no_token_is_longer_than_the_longest(plain: LLM) -> None:
    text = "".join(plain.pair.tokenizer.get_vocab())[:3000]
    assert len(text) <= plain._longest_token * len(plain.tokenize(text))


@pytest.mark.parametrize("name", HEADS)
def test_what_comes_before_and_behind_a_body_is_limited(name: str, plain: LLM) -> None:
    begin, filling, end = HEADS[name]
    with gated(own(plain)) as (server, gate), connected(server) as connection:
        with contextlib.suppress(ConnectionError):  # which is what closing does while more is on its way
            connection.sendall(begin)
            for start in range(0, len(filling), 20_000):
                connection.sendall(filling[start : start + 20_000])
                time.sleep(0.002)
            connection.sendall(end)
        if not name.endswith("behind a request"):  # what comes behind one is not read before it is answered
            until(lambda: not server.server.server_state.connections)
        gate.open()
        until(lambda: not server.server.server_state.connections)
        until(lambda: server.statistics["running"] + server.statistics["waiting"] == 0)


def test_who_sends_ahead_and_leaves_leaves_nothing_running(plain: LLM, caplog: pytest.LogCaptureFixture) -> None:
    llm = own(plain)
    body = json.dumps({"model": MODEL, "prompt": "S", "max_tokens": 100, "ignore_eos": True, "stream": True}).encode()
    with gated(llm) as (server, gate):
        with connected(server, post(body) + HEALTH):
            gate.let(2)
            until(lambda: gate.holds)  # between two passes a request would leave before anyone can see it leave
        until(lambda: server.leaving == 1)
        gate.open()
        until(lambda: llm.loop.totals.requests["cancelled"] == 1)
    assert "unexpected" not in caplog.text


def test_bodies_that_are_never_complete_do_not_fill_the_memory(plain: LLM) -> None:
    half = post(b"x" * 1000)[:-100]
    with live(own(plain), max_body_bytes=1000, body_seconds=PATIENCE) as server, contextlib.ExitStack() as slow:
        begun = [slow.enter_context(connected(server, half)) for _ in range(BODIES_AT_ONCE + 10)]
        assert b" 503 " in received(begun[-1])
        begun[0].sendall(b"x" * 100)
        assert b" 400 " in received(begun[0], b"invalid_json"), "those that were there are answered"
        for one in begun:
            one.close()
        until(lambda: not server.server.server_state.connections)
        assert ask(server, max_tokens=1)[0] == 200, "and what they held is free"


def test_a_client_that_does_not_read_does_not_delay_the_end(plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.server.uvicorn_server.FLUSH_SECONDS", 1)
    body = {"model": MODEL, "prompt": ["S"] * 60, "max_tokens": 150, "ignore_eos": True, "stream": True}
    with live(own(plain), drain_seconds=PATIENCE) as server, socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(("127.0.0.1", server.port))
        deaf.sendall(post(json.dumps(body | {"logprobs": 20, "top_k": 20}).encode()))

        def stuck() -> bool:
            connections = list(server.server.server_state.connections)
            return any(isinstance(one, H11Protocol) and one.flow.write_paused for one in connections)

        until(stuck)
        server.drain()
        began = time.perf_counter()
        server.wait()
        assert time.perf_counter() - began < PATIENCE / 4


def test_a_client_may_not_choose_its_priority_where_it_is_not_allowed(server: LiveServer, plain: LLM) -> None:
    status, answer = ask(server, priority=5)
    assert (status, answer["error"]["param"]) == (400, "priority")
    assert "--allow-priority" in answer["error"]["message"]
    assert ask(server, priority=0, max_tokens=1)[0] == 200
    with live(own(plain), allow_priority=True) as allowing:
        assert ask(allowing, priority=5, max_tokens=1)[0] == 200


def test_choices_are_limited(plain: LLM) -> None:
    with live(own(plain), max_choices=4) as server:
        for body, param in (({"n": 5}, "n"), ({"prompt": ["S"] * 5}, "prompt"), ({"prompt": ["S"] * 2, "n": 3}, "n")):
            status, answer = ask(server, **body)
            assert (status, answer["error"]["param"]) == (400, param)
            assert "--max-choices" in answer["error"]["message"]
        assert ask(server, n=4, max_tokens=1)[0] == 200


def test_a_client_with_many_choices_lets_others_in(plain: LLM) -> None:
    rows = plain.pair.target.spec.rows
    keys = {"authorization": "Bearer one"}, {"authorization": "Bearer two"}
    body: dict[str, Any] = {"model": MODEL, "prompt": "S", "max_tokens": 5, "ignore_eos": True, "method": "sample"}
    answers: list[str] = []

    def send(key: dict[str, str], **more: int) -> None:
        assert call(server, "POST", "/v1/completions", body | more, **key)[0] == 200
        answers.append(key["authorization"])

    with gated(own(plain, max_waiting=64), api_keys=("one", "two")) as (server, gate):
        many = threading.Thread(target=send, args=(keys[0],), kwargs={"n": 40})
        many.start()
        until(lambda: server.statistics["waiting"] >= 40 - rows - 1)
        few = threading.Thread(target=send, args=(keys[1],))
        few.start()
        until(lambda: server.statistics["running"] + server.statistics["waiting"] == 41)
        gate.open()
        few.join()
        many.join()
        assert answers == ["Bearer two", "Bearer one"]


def test_kept_prompts_are_a_keys_own_and_a_salts(plain: LLM) -> None:
    def cached(server: LiveServer, key: str, **more: str) -> int:
        body = {"model": MODEL, "prompt": [3 + i % 200 for i in range(100)], "max_tokens": 1, **more}
        answer = call(server, "POST", "/v1/completions", body, authorization=f"Bearer {key}")[2]
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    with live(own(plain), api_keys=("one", "two")) as server:
        assert [cached(server, key) for key in ("one", "one", "two", "two")] == [0, 64, 0, 64]
        assert [cached(server, "one", cache_salt="x") for _ in range(2)] == [0, 64]
    with live(own(plain)) as server:
        assert [cached(server, key) for key in ("one", "two")] == [0, 64], "without keys they are everybody's"
        assert [cached(server, "", cache_salt=salt) for salt in ("a", "b", "a")] == [0, 0, 64]


def test_a_page_whose_name_leads_here_is_refused_where_no_key_is_asked_for(server: LiveServer, plain: LLM) -> None:
    with live(own(plain), api_keys=("secret",)) as guarded:
        for host in ("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example"):
            status, _, answer = call(server, "GET", "/v1/models", host=host)
            assert (status, answer["error"]["code"]) == (403, "host_not_allowed"), host
            assert "--allowed-host" in answer["error"]["message"]
            assert call(server, "GET", "/health", host=host)[0] == 200, "a probe may have any name for it"
            assert call(guarded, "GET", "/v1/models", host=host, authorization="Bearer secret")[0] == 200


def test_names_of_the_server_are_let_in(plain: LLM) -> None:
    with live(own(plain), allowed_host=("mtad.example",)) as server:
        for host in ("127.0.0.1", "localhost:80", "[::1]:8000", "10.1.2.3:8000", "mtad.example", "Mtad.Example:8000"):
            assert call(server, "GET", "/v1/models", host=host)[0] == 200, host


def test_long_stop_strings_are_refused_all_together(server: LiveServer) -> None:
    assert ask(server, stop=["x" * 64] * 16, max_tokens=2)[0] == 200
    status, answer = ask(server, stop=["x" * 65] * 16)
    assert (status, answer["error"]["param"]) == (400, "stop")
