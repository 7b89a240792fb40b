"""The gateway before several replicas, with replicas that do as they are told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from grpc import StatusCode
from grpc.aio import AioRpcError, Metadata
from prometheus_client.core import CounterMetricFamily, Metric
from ray.exceptions import ActorDiedError, ActorUnavailableError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from starlette.types import Message

from mtad.errors import InvalidInput
from runtime.cluster.board import STALE_SECONDS, Board, Report
from runtime.cluster.gateway import Gateway
from runtime.cluster.router import prefix_keys
from runtime.cluster.run import _check_resources
from runtime.server.middleware import Guard
from runtime.server.options import ClusterOptions, ServerOptions

START: Message = {"type": "http.response.start", "status": 200, "headers": []}
WHOLE: Message = {"type": "http.response.body", "body": b"whole"}
PART: Message = {"type": "http.response.body", "body": b"data: {}\n\n", "more_body": True}

FOREVER = None

Step = Message | Exception | None


class Replicas:
    """Stands for a Ray Serve handle: the n-th call does what the n-th script says; `FOREVER` in it is no answer.

    Attributes:
        silent: called when there is none.
    """

    def __init__(self, *scripts: list[Step]) -> None:
        self._scripts = list(scripts)
        self.silent: Callable[[], None] = lambda: None
        self.calls: list[tuple[dict[str, Any], bytes]] = []
        self.cancelled = 0

    def options(self, method_name: str, stream: bool) -> Replicas:
        assert method_name == "http"
        assert stream
        return self

    def remote(self, head: dict[str, Any], body: bytes, keys: list[bytes]) -> Answering:
        self.calls.append((head, body))
        return Answering(self, self._scripts[len(self.calls) - 1])


class Answering:
    """One call's answer."""

    def __init__(self, replicas: Replicas, script: list[Step]) -> None:
        self._replicas, self._script = replicas, script

    def cancel(self) -> None:
        self._replicas.cancelled += 1

    async def __aiter__(self) -> AsyncIterator[list[Message]]:
        yield []  # it is accepted
        for step in self._script:
            if isinstance(step, Exception):
                raise step
            if step is FOREVER:
                self._replicas.silent()
                await asyncio.Event().wait()
            else:
                yield [step]


DIED: Any = ActorDiedError()
UNREACHABLE: Any = DeploymentUnavailableError("replica")
CUT_OFF: Any = AioRpcError(StatusCode.CANCELLED, Metadata(), Metadata(), "the server stops")
NOT_ACCEPTED = RuntimeError("Unexpected error (UNAVAILABLE)")
"""Ray Serve's own, of a replica that died after it was sent the request and before it had accepted it."""


async def reports() -> list[Report]:
    board = Board()
    for name in "ab":
        counted: Metric = CounterMetricFamily("x", "words", value=3)
        board.put(({"replica": name, "host": "host", "pid": "1", "generation": "1"}, [counted], {"id": "m"}))
    return board.reports()


def ask(
    replicas: Replicas,
    path: str = "/v1/completions",
    seconds: float = 600.0,
    during: Callable[[Gateway, asyncio.Event], None] = lambda gateway, gone: None,
    keys: tuple[str, ...] = (),
    method: str = "POST",
    sending: Callable[[Gateway], None] = lambda gateway: None,
    stall_seconds: float = 60.0,
    headers: tuple[tuple[bytes, bytes], ...] = (),
) -> tuple[int, bytes, Gateway]:
    """One request through the gateway: status (0 without an answer), body; what happens while it is being sent."""
    sent: list[Message] = []

    async def run() -> Gateway:
        gateway = Gateway(replicas, seconds, stall_seconds, reports)
        app = Guard(gateway, ServerOptions("m", api_keys=keys), gateway.responded)
        gone, received = asyncio.Event(), False

        async def receive() -> Message:
            nonlocal received
            if not received:
                received = True
                sending(gateway)
                return {"type": "http.request", "body": b'{"prompt": "x"}', "more_body": False}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            sent.append(message)
            if "body" in message and not message.get("more_body", False):
                gone.set()  # as uvicorn has it

        scope = {"type": "http", "method": method, "path": path, "headers": headers, "query_string": b""}
        replicas.silent = lambda: during(gateway, gone)
        await app(scope, receive, send)
        return gateway

    gateway = asyncio.run(run())
    status = next((message["status"] for message in sent if "status" in message), 0)
    return status, b"".join(message.get("body", b"") for message in sent), gateway


@pytest.mark.parametrize("error", [UNREACHABLE, CUT_OFF, NOT_ACCEPTED])
def test_a_request_is_tried_elsewhere_until_a_byte_went_out(error: Exception) -> None:
    replicas = Replicas([START, error], [START, WHOLE])
    status, body, gateway = ask(replicas)
    assert (status, body) == (200, b"whole")
    assert [body for _, body in replicas.calls] == [b'{"prompt": "x"}'] * 2
    assert gateway._retries == 1


def test_a_request_that_two_replicas_died_under_is_not_tried_again() -> None:
    replicas = Replicas([DIED], [START, DIED])
    status, body, _ = ask(replicas)
    assert (status, json.loads(body)["error"]["code"]) == (500, "replica_died")
    assert len(replicas.calls) == 2


def test_two_replicas_that_cannot_be_reached_are_an_error() -> None:
    status, body, _ = ask(Replicas([DIED], [UNREACHABLE]))
    assert (status, json.loads(body)["error"]["code"]) == (503, "unavailable")


@pytest.mark.parametrize("error", [DIED, CUT_OFF])
def test_a_begun_stream_is_not_begun_again(error: Exception) -> None:
    replicas = Replicas([START, PART, PART, error])
    status, body, gateway = ask(replicas)
    *parts, last = body.decode().split("\n\n")[:-1]
    assert status == 200
    assert len(parts) == 2
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "replica_died"
    assert (len(replicas.calls), gateway._broken, gateway._retries) == (1, 1, 0)


@pytest.mark.parametrize("begun", [[], [START, PART]])
def test_a_replica_that_gives_no_sign_of_life_counts_as_dead(begun: list[Step]) -> None:
    replicas = Replicas([*begun, FOREVER], [START, WHOLE])
    status, body, gateway = ask(replicas, stall_seconds=0.01)
    assert (status, b"replica_died" in body, gateway._retries) == (200, bool(begun), int(not begun))
    assert replicas.cancelled == 1


def test_what_a_client_proves_itself_with_reaches_no_replica() -> None:
    replicas = Replicas([START, WHOLE])
    headers = ((b"authorization", b"Bearer key"), (b"cookie", b"a=b"), (b"x-other", b"c"))
    assert ask(replicas, keys=("key",), headers=headers)[0] == 200
    assert replicas.calls[0][0]["headers"] == [(b"x-other", b"c")]


def test_full_replicas_are_429_with_a_time_to_wait() -> None:
    status, body, _ = ask(Replicas([BackPressureError(num_queued_requests=1, max_queued_requests=1)]))
    assert (status, json.loads(body)["error"]["code"]) == (429, "queue_full")


def test_what_breaks_in_a_replica_is_not_tried_again() -> None:
    replicas = Replicas([START, ValueError("broken")])
    assert ask(replicas)[0] == 500
    assert len(replicas.calls) == 1


def test_a_request_whose_replica_died_is_not_refused_by_a_full_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.cluster.gateway.FULL_SECONDS", 0.0)
    full = BackPressureError(num_queued_requests=1, max_queued_requests=1)
    replicas = Replicas([DIED], [full], [full], [START, WHOLE])
    assert ask(replicas)[:2] == (200, b"whole")
    assert len(replicas.calls) == 4


def test_a_client_that_leaves_cancels_its_request() -> None:
    replicas = Replicas([START, PART, FOREVER])
    ask(replicas, during=lambda gateway, gone: gone.set())
    assert replicas.cancelled == 1


@pytest.mark.parametrize("begun", [[], [START, PART]])
def test_a_request_beyond_its_time_is_cancelled_and_told_also_in_a_begun_stream(begun: list[Step]) -> None:
    replicas = Replicas([*begun, FOREVER])
    status, body, _ = ask(replicas, seconds=-0.8)  # a second more is the replica's
    assert (status, json.loads(body.split(b"data: ")[-1])["error"]["code"]) == (200 if begun else 504, "timeout")
    assert replicas.cancelled == 1


@pytest.mark.parametrize("begun", [[], [START, PART]])
def test_draining_refuses_new_requests_and_a_second_signal_ends_old_ones_and_says_so(begun: list[Step]) -> None:
    closing: list[asyncio.Future[None]] = []

    def close(gateway: Gateway, _: asyncio.Event) -> None:
        closing.append(asyncio.ensure_future(gateway.close(drain=False)))

    replicas = Replicas([*begun, FOREVER])
    status, body, gateway = ask(replicas, during=close)
    assert (status, json.loads(body.split(b"data: ")[-1])["error"]["code"]) == (200 if begun else 503, "cancelled")
    assert replicas.cancelled == 1
    assert gateway._draining


def test_a_request_whose_body_comes_while_it_drains_is_refused() -> None:
    def close(gateway: Gateway) -> None:
        gateway._draining = True

    replicas = Replicas([START, WHOLE])
    status, body, _ = ask(replicas, sending=close)
    assert (status, json.loads(body)["error"]["code"]) == (503, "unavailable")
    assert not replicas.calls


def test_models_are_a_replicas_and_are_listed_while_all_are_full() -> None:
    assert ask(Replicas([START, WHOLE]), "/v1/models/m", method="GET")[:2] == (200, b"whole")
    status, body, _ = ask(Replicas([FOREVER]), "/v1/models", method="GET")
    assert (status, json.loads(body)) == (200, {"object": "list", "data": [{"id": "m"}]})


def test_responses_are_counted_be_they_a_replicas_or_not() -> None:
    assert ask(Replicas([START, WHOLE]))[2]._responses == {200: 1}
    _, _, gateway = ask(Replicas([START, WHOLE]), keys=("key",))
    assert b'mtad_gateway_responses_total{status="401"} 1.0' in asyncio.run(gateway.scrape(None)).body  # type: ignore[arg-type]


def test_what_needs_no_key_takes_no_replicas_time() -> None:
    replicas = Replicas()
    for path, status in {"/": 200, "/docs": 200, "/openapi.json": 200, "/nowhere": 404}.items():
        assert ask(replicas, path, method="GET", keys=("secret",))[0] == status, path
    assert ask(replicas, "/docs", keys=("secret",))[0] == 405
    assert not replicas.calls


def test_health_metrics_and_keys_are_the_gateways_own() -> None:
    assert json.loads(ask(Replicas(), "/health", method="GET")[1]) == {"status": "ready", "replicas": 2}
    assert ask(Replicas(), "/health/live", method="GET")[0] == ask(Replicas(), "/ping")[0] == 200
    shown = ask(Replicas(), "/metrics", method="GET")[1].decode()
    assert 'mtad_replica{generation="1",host="host",pid="1",replica="a"} 1.0' in shown
    assert 'x_total{replica="a"} 3.0' in shown
    assert 'x_total{replica="b"} 3.0' in shown
    assert shown.count("# TYPE x_total counter") == 1
    replicas = Replicas([START, WHOLE])
    assert ask(replicas, keys=("secret",))[0] == 401
    assert not replicas.calls


def test_an_answer_that_has_ended_is_not_cancelled_at_its_replica() -> None:
    scripts: list[list[Step]] = [[START, WHOLE, FOREVER], [START, PART, WHOLE, FOREVER]]
    for script in scripts:
        replicas = Replicas(script)
        assert ask(replicas)[0] == 200
        assert not replicas.cancelled


def test_replicas_count_while_the_board_starts_again_however_long_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.cluster.gateway.FRESH_SECONDS", 0.0)
    now = [1000.0]
    boards: list[Any] = [ActorUnavailableError("it starts again", None), "hangs", []]
    monkeypatch.setattr("runtime.cluster.gateway.time", SimpleNamespace(monotonic=lambda: now[0]))

    async def broken() -> list[Report]:
        if isinstance(boards[0], Exception):
            raise boards[0]
        await asyncio.sleep(60 if boards[0] == "hangs" else 0)
        return []

    async def run() -> None:
        gateway = Gateway(Replicas(), 600.0, 60.0, reports)
        await gateway.ready(None)  # type: ignore[arg-type]
        gateway._reports = broken
        for board in list(boards):
            now[0] += STALE_SECONDS - 1
            assert json.loads((await gateway.ready(None)).body) == {"status": "ready", "replicas": 2}, board  # type: ignore[arg-type]
            assert b'replica="b"' in (await gateway.scrape(None)).body, board  # type: ignore[arg-type]
            assert gateway._asking
            await gateway._asking  # until it answers, or has not for long enough
            boards.pop(0)
        boards.append([])
        now[0] += STALE_SECONDS
        assert (await gateway.ready(None)).status_code == 503, "it is back, and no replica has reported"  # type: ignore[arg-type]

    asyncio.run(run())


def test_a_question_for_health_does_not_wait_for_the_board_while_reports_are_fresh() -> None:
    async def run() -> None:
        gateway = Gateway(Replicas(), 600.0, 60.0, reports)
        await gateway.ready(None)  # type: ignore[arg-type]
        gateway._reports, gateway._ask_at = asyncio.Event().wait, 0.0  # type: ignore[assignment]
        assert (await gateway.ready(None)).status_code == 200  # type: ignore[arg-type]
        assert gateway._asking
        assert not gateway._asking.done()

    asyncio.run(run())


def test_the_board_is_asked_twice_per_second_however_many_ask_for_health() -> None:
    asked = 0

    async def counted() -> list[Report]:
        nonlocal asked
        asked += 1
        await asyncio.sleep(0.01)
        return await reports()

    async def run() -> None:
        gateway = Gateway(Replicas(), 600.0, 60.0, counted)
        await gateway.ready(None)  # type: ignore[arg-type]
        await asyncio.gather(*(gateway.ready(None) for _ in range(100)))  # type: ignore[arg-type]

    asyncio.run(run())
    assert asked == 1


def test_more_than_the_machine_has_is_refused_rather_than_waited_for() -> None:
    _check_resources(ClusterOptions(replicas=2), [{"CPU": 2.0}])
    _check_resources(ClusterOptions(replicas=3, replica_cpus=0.1), [{"CPU": 0.3}])
    with pytest.raises(InvalidInput, match="replica-cpus"):
        _check_resources(ClusterOptions(replicas=3), [{"CPU": 2.0}])
    with pytest.raises(InvalidInput, match="replica-gpus"):
        _check_resources(ClusterOptions(1, replica_gpus=1.0), [{"CPU": 2.0}])
    with pytest.raises(InvalidInput, match="for 1 such"):  # the CPUs of one machine are of no use to another's GPUs
        _check_resources(ClusterOptions(2, replica_gpus=1.0), [{"CPU": 8.0}, {"CPU": 1.0, "GPU": 2.0}])


def test_a_prompt_leads_to_the_replica_that_keeps_it_for_the_same_client_only() -> None:
    def keys(key: str = "", **more: str) -> list[bytes]:
        return prefix_keys(json.dumps({"prompt": "x" * 1000, **more}).encode(), key)

    assert keys("one") == keys("one")
    assert not {*keys("one")} & {*keys("two"), *keys(), *keys("one", cache_salt="y")}
