"""Keys, limits, cancellation, drain and failure of the HTTP server."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from openai import APIError, AuthenticationError, BadRequestError, InternalServerError, RateLimitError
from starlette.testclient import TestClient

from mtad import LLM, AsyncLLM
from mtad.errors import InvalidInput
from runtime.commands.serve import read_keys
from runtime.server.app import create_app
from runtime.server.options import ServerOptions
from runtime.server.service import Service
from tests.support.live_server import MODEL, call, connected, gated, live, received
from tests.support.waiting import PATIENCE, Deadlines, break_steps, own, until

BEGIN = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
LONG: dict[str, Any] = {
    "model": MODEL,
    "prompt": "S",
    "max_tokens": 150,
    "extra_body": {"ignore_eos": True, "method": "sample"},
}


def test_keys_guard_what_costs_something(plain: LLM) -> None:
    with live(own(plain), api_keys=("first-key", "second-key"), max_body_bytes=2000) as server:
        for key in ("first-key", "second-key"):
            client = server.client.with_options(api_key=key)
            assert client.completions.create(model=MODEL, prompt="S", max_tokens=1).choices
        for key in ("first-kez", "first-ke", "first-keyy", "x"):
            with pytest.raises(AuthenticationError):
                server.client.with_options(api_key=key).models.list()
        for header in ({}, {"authorization": "first-key"}, {"authorization": "Basic first-key"}):
            for path in ("/v1/models", "/v1/completions", "/v1/nothing"):
                status, headers, answer = call(server, "GET", path, **header)
                assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
                assert headers["www-authenticate"] == "Bearer"
        for path in ("/health", "/health/live", "/health/ready", "/metrics", "/"):
            assert call(server, "GET", path)[0] == 200

        large = {"model": MODEL, "prompt": "x" * 2000}
        status, _, answer = call(server, "POST", "/v1/completions", large, authorization="Bearer first-key")
        assert (status, answer["error"]["code"]) == (413, "body_too_large")
        begin = BEGIN + b"authorization: Bearer first-key\r\n"
        chunked = b"transfer-encoding: chunked\r\n\r\n" + (b"400\r\n" + b"x" * 1024 + b"\r\n") * 3
        with connected(server, begin + chunked) as connection:
            assert b" 413 " in received(connection).split(b"\r\n")[0], "also if it does not say how long it is"
        trailer = b"transfer-encoding: chunked\r\nconnection: close\r\n\r\n0\r\nauthorization: Bearer first-key\r\n\r\n"
        with connected(server, BEGIN + trailer) as connection:
            assert b" 401 " in received(connection).split(b"\r\n")[0], "what comes behind a body is no header"


@pytest.mark.parametrize(("root", "path"), [("/llm", "/llm/v1/models"), ("/v", "/v1/models"), ("", "/v1/models")])
def test_keys_guard_an_application_that_is_mounted_below_a_path(plain: LLM, root: str, path: str) -> None:
    app = create_app(Service(AsyncLLM(own(plain)), ServerOptions("m", api_keys=("secret",))))
    client = TestClient(app, base_url="http://127.0.0.1", root_path=root)
    assert client.get(path).status_code == 401
    assert client.get(path, headers={"authorization": "Bearer secret"}).status_code == 200


def test_a_body_that_is_too_slow_is_refused(plain: LLM) -> None:
    with live(own(plain), body_seconds=0.3) as server:
        for late in (b"", b'{"model"'):
            with connected(server, BEGIN + b"content-length: 100\r\n\r\n" + late) as connection:
                assert b" 408 " in received(connection).split(b"\r\n")[0]


def test_keys_come_from_options_file_and_environment(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\n\nthree\n four \n")
    assert read_keys(["one"], file, "two") == ("one", "two", "three", "four")
    assert read_keys([], None, None) == ()
    file.write_text("# nothing\n")
    for path, problem in ((file, "holds no key"), (tmp_path / "none", "cannot be read")):
        with pytest.raises(InvalidInput, match=problem):
            read_keys([], path, None)


@pytest.mark.parametrize(
    "bad", [{"model": ""}, {"api_keys": ("ü",)}, {"api_keys": ("",)}, {"max_body_bytes": 0}, {"request_seconds": -1}]
)
def test_bad_options_are_refused_and_keys_never_shown(bad: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput) as caught:
        ServerOptions(**{"model": "m", **bad})
    assert "ü" not in str(caught.value)


def test_a_full_queue_is_429_and_says_when_to_try_again(plain: LLM) -> None:
    with gated(own(plain, max_waiting=2)) as (server, gate):
        rows = plain.pair.target.spec.rows
        streams: list[Any] = []

        def flood() -> None:
            while len(streams) < rows + 6:
                streams.append(server.client.completions.create(stream=True, **LONG))

        with pytest.raises(RateLimitError) as caught:
            flood()
        assert 1 + 2 <= len(streams) <= rows + 2
        assert [call(server, "GET", f"/health{kind}")[0] for kind in ("", "/live", "/ready")] == [200] * 3
        headers, error = caught.value.response.headers, caught.value
        assert error.code == "queue_full"
        assert int(headers["retry-after"]) >= 1
        assert 0 < int(headers["retry-after-ms"]) <= 1000 * int(headers["retry-after"])
        with pytest.raises(BadRequestError, match="max_waiting"):
            server.client.completions.create(model=MODEL, prompt="S", n=3)
        for stream in streams:
            stream.close()
        gate.open()
        patient = server.client.with_options(max_retries=50)
        assert patient.completions.create(model=MODEL, prompt="S", max_tokens=1).choices, "a client that waits gets in"


@pytest.mark.parametrize("stream", [True, False])
def test_a_dropped_connection_frees_its_row_by_the_next_block(stream: bool, plain: LLM) -> None:
    llm = own(plain)
    totals, scheduler = llm.loop.totals, llm.loop.scheduler
    body = {"model": MODEL, "prompt": "S", "max_tokens": 150, "ignore_eos": True, "method": "sample", "stream": stream}
    data = json.dumps(body).encode()
    with gated(llm) as (server, gate):
        with connected(server, BEGIN + b"content-length: %d\r\n\r\n" % len(data) + data) as connection:
            gate.let(3)
            until(lambda: bool(scheduler.running) and scheduler.running[0].blocks == 3)
            (request,) = scheduler.running
            if stream:
                assert b"data: {" in received(connection, b"data: {"), "the server hung up"
            until(lambda: gate.holds)
        until(lambda: server.leaving == 1)
        gate.let(1)  # the pass that it is in
        until(lambda: totals.requests["cancelled"] == 1)
        assert request.finish_reason == "cancelled"
        assert request.blocks == 4
        assert not scheduler.running


def test_a_client_that_leaves_while_its_prompt_is_made_an_echo_is_not_served(
    plain: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, begun, left = own(plain), threading.Event(), threading.Event()

    def echoes(*_: Any) -> list[Any]:
        begun.set()
        assert left.wait(PATIENCE)
        return []

    monkeypatch.setattr("runtime.server.service.Service._echoes", echoes)
    with gated(llm) as (server, gate):
        body = json.dumps({"model": MODEL, "prompt": "S", "echo": True, "max_tokens": 150, "ignore_eos": True}).encode()
        with connected(server, BEGIN + b"content-length: %d\r\n\r\n" % len(body) + body):
            assert begun.wait(PATIENCE)
            until(lambda: gate.holds)
        try:
            until(lambda: server.leaving == 1)
        finally:
            left.set()
            gate.open()
        until(lambda: llm.loop.totals.requests["cancelled"] == 1)


def test_a_request_that_takes_too_long_is_cancelled(plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, deadlines = own(plain), Deadlines()
    monkeypatch.setattr("runtime.server.streaming.asyncio", deadlines)
    with gated(llm, request_seconds=0.3) as (server, gate):

        def end_once_it_runs() -> None:
            until(lambda: server.statistics["running"] == 1)
            deadlines.end()

        ending = threading.Thread(target=end_once_it_runs)
        ending.start()
        with pytest.raises(InternalServerError) as caught:
            server.client.completions.create(**LONG)
        ending.join()
        assert caught.value.status_code == 504
        assert caught.value.code == "timeout"
        assert caught.value.response.headers["x-should-retry"] == "false", "the next one would take as long"
        gate.let(2)  # the pass it was in, and one of the next request
        stream = server.client.completions.create(stream=True, **LONG)
        assert next(stream).choices
        deadlines.end()
        with pytest.raises(APIError, match=r"not finished after 0\.3 s"):
            list(stream)
        gate.open()
        until(lambda: llm.loop.totals.requests["cancelled"] == 2)


def test_time_is_counted_from_a_requests_arrival(plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it waited for before it was queued, such as a grammar, is not given back."""
    llm, deadlines, queued = own(plain), Deadlines(), list[float]()
    monkeypatch.setattr("runtime.server.streaming.asyncio", deadlines)
    with live(llm, request_seconds=9.0) as server:
        submit = server.engine.submit_many

        async def late(*args: Any, **others: Any) -> Any:
            queued.append(asyncio.get_running_loop().time())
            await asyncio.sleep(0.05)
            return await submit(*args, **others)

        monkeypatch.setattr(server.engine, "submit_many", late)
        assert server.client.completions.create(model=MODEL, prompt="S", max_tokens=2).choices
    assert deadlines.at[0] <= queued[0] + 9.0


def test_draining_finishes_what_was_accepted_and_refuses_the_rest(plain: LLM) -> None:
    with gated(own(plain), drain_seconds=PATIENCE) as (server, gate):
        assert call(server, "GET", "/health/ready")[0] == 200
        stream = server.client.completions.create(stream=True, **LONG)
        server.drain()
        until(lambda: server.engine.state == "draining")
        status, headers, answer = call(server, "POST", "/v1/completions", {"model": MODEL, "prompt": "S"})
        assert (status, answer["error"]["code"], headers["connection"]) == (503, "unavailable", "close")
        status, _, answer = call(server, "GET", "/health/ready")
        assert (status, answer["status"]) == (503, "draining")
        assert call(server, "GET", "/health/live")[0] == 200, "it must not be killed for draining"
        gate.open()
        *_, last = stream
        assert last.choices[0].finish_reason == "length"
        server.wait()
        with pytest.raises(ConnectionRefusedError):
            call(server, "GET", "/health/live")


@pytest.mark.parametrize("twice", [True, False])
def test_what_does_not_end_while_draining_is_cancelled(twice: bool, plain: LLM) -> None:
    with gated(own(plain), drain_seconds=PATIENCE if twice else 0.2) as (server, gate):
        stream = server.client.completions.create(stream=True, **LONG)
        gate.let(1)
        next(stream)
        until(lambda: gate.holds)
        server.drain()
        if twice:
            server.drain()
        until(lambda: server.engine.state == "cancelling")
        gate.open()
        with pytest.raises(APIError, match="shutting down"):
            list(stream)
        server.wait()


def test_a_failing_step_is_500_with_its_cause_and_the_next_request_runs(plain: LLM) -> None:
    llm = own(plain)
    break_steps(llm, "the device is gone")
    with live(llm) as server:
        with pytest.raises(InternalServerError, match="the device is gone") as caught:
            server.client.completions.create(model=MODEL, prompt="S", max_tokens=2)
        assert caught.value.code == "request_failed"
        assert server.client.completions.create(model=MODEL, prompt="S", max_tokens=2).choices
        break_steps(llm, "gone again")
        with pytest.raises(APIError, match="gone again"):
            list(server.client.completions.create(model=MODEL, prompt="S", max_tokens=2, stream=True))


def test_a_broken_engine_asks_to_be_restarted(plain: LLM) -> None:
    llm = own(plain)

    def broken() -> Any:
        raise AssertionError("rows are lost")

    vars(llm.loop)["step"] = broken
    with live(llm) as server:
        with pytest.raises(InternalServerError, match="rows are lost"):
            server.client.completions.create(model=MODEL, prompt="S")
        with pytest.raises(InternalServerError) as caught:
            server.client.completions.create(model=MODEL, prompt="S")
        assert caught.value.status_code == 503
        status, _, answer = call(server, "GET", "/health/live")
        assert (status, answer["cause"]) == (503, "rows are lost")
        assert call(server, "GET", "/health/ready")[0] == 503


def test_an_engine_that_prepares_itself_is_not_ready_yet(plain: LLM) -> None:
    llm, seen = LLM(plain.pair), 0
    vars(llm.grammars)["prepare"] = lambda: until(lambda: seen == 503)
    with live(llm) as server:
        status, _, answer = call(server, "GET", "/health")
        assert (status, answer["status"]) == (503, "starting")
        seen = 503
        until(lambda: call(server, "GET", "/health")[0] == 200)
