"""Deploying and updating replicas, on a Ray that does as it is told."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
from ray import serve

from mtad.errors import InvalidInput
from runtime.cluster import replica, run
from runtime.config import RuntimeConfig
from runtime.server.options import ClusterOptions, ServerOptions

OPTIONS, CLUSTER = ServerOptions("m"), ClusterOptions(1)


class FakeRay:
    """Stands for `ray` and `ray.serve`: deployments whose number is in `failing` do not start."""

    def __init__(self, failing: set[int]) -> None:
        self.failing, self.deployed, self.deleted = failing, list[tuple[str, str]](), list[str]()
        self.given: dict[str, Any] = {}
        self.reports: list[Any] = []
        self.names = list[str]()  # of other commands' actors

    def init(self, **given: Any) -> None:
        self.given = given

    def shutdown(self) -> None:
        pass

    def start(self, **_: Any) -> None:
        pass

    def nodes(self) -> list[dict[str, Any]]:
        lost = {"Alive": False, "Resources": {"CPU": 99.0}}
        return [
            {"Alive": True, "Resources": {"CPU": 8.0, "GPU": 1.5}},
            {"Alive": True, "Resources": {"CPU": 2.0}},
            lost,
        ]

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: "1" * 56)

    def remote(self, name: str, namespace: str, **_: Any) -> Any:
        def start() -> Any:
            if name in self.names:
                raise ValueError(f"The name {name} (namespace={namespace}) is already taken.")
            return SimpleNamespace(reports=SimpleNamespace(remote=lambda: None))

        return lambda board: SimpleNamespace(remote=start)

    def get(self, _: Any, timeout: float) -> list[Any]:
        return self.reports

    def delete(self, name: str) -> None:
        self.deleted.append(name)

    def status(self) -> Any:
        application = SimpleNamespace(deployments={"replica": SimpleNamespace(message="tried twice\nno weights")})
        return SimpleNamespace(applications={"m": application})

    def run(self, application: Any, **_: Any) -> str:
        deployment = application._bound_deployment
        self.deployed.append((deployment.version, deployment.init_args[0]))
        if len(self.deployed) in self.failing:
            raise RuntimeError("failed")
        return "handle"

    deployment = staticmethod(serve.deployment)


def use(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    monkeypatch.setattr(run, "ray", ray)
    monkeypatch.setattr(run, "serve", ray)
    free = {"a": {"CPU": 8.0, "GPU": 0.5}, "b": {"GPU": 0.5}}
    monkeypatch.setattr(run, "available_resources_per_node", lambda: free)
    monkeypatch.setattr(run, "read_spec", lambda folder: SimpleNamespace(rows=4))
    return ray


def test_a_refused_update_deploys_the_last_generation_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ray = use(FakeRay({2, 4, 5}), monkeypatch)
    link = tmp_path / "pair"
    link.symlink_to(tmp_path / "old")
    generations = run.Generations(link, RuntimeConfig(), OPTIONS, CLUSTER)
    assert generations.deploy() == "handle"
    link.unlink()
    link.symlink_to("new")
    with pytest.raises(InvalidInput, match="no weights; generation 1 serves"):
        generations.update()
    first, refused, again = ray.deployed
    assert first == again, "under the same version, so that replicas stay, and from the same folder"
    assert refused[0] != first[0]
    assert (first[1], refused[1]) == (str(tmp_path / "old"), str(tmp_path / "new"))
    with pytest.raises(InvalidInput, match="none that dies is replaced: no weights"):
        generations.update()
    generations.update()
    assert len({version for version, _ in ray.deployed}) == 4


def test_updates_asked_for_during_one_are_one_more(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, updates = SimpleQueue[int](), list[int]()
    gateway = SimpleNamespace(update_refused="")

    class Ended(BaseException):
        """Ends what goes on forever."""

    def update() -> None:
        updates.append(len(updates))
        if len(updates) == 1:
            for _ in range(3):
                asked.put(1)
            raise InvalidInput("pair", "x", "no weights")
        assert "no weights" in gateway.update_refused
        assert asked.empty()
        raise Ended

    asked.put(1)
    with pytest.raises(Ended):
        run.keep_updating(asked, SimpleNamespace(update=update), gateway)  # type: ignore[arg-type]
    assert len(updates) == 2


def test_an_update_without_room_for_one_more_replica_is_refused_before_it_begins(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ray = use(FakeRay(set()), monkeypatch)
    generations = run.Generations(tmp_path, RuntimeConfig(), OPTIONS, ClusterOptions(1, replica_gpus=1))
    with pytest.raises(InvalidInput, match="asked for; an update starts a replica before an old one goes"):
        generations.update()
    generations = run.Generations(tmp_path, RuntimeConfig(), OPTIONS, CLUSTER)
    generations.update()
    ray.reports = [({"replica": "a", "host": socket.gethostname(), "pid": str(os.getpid())}, [], {})]
    monkeypatch.setattr(run, "_kib", lambda path, name: {"RssAnon": 600 << 10, "MemAvailable": 500 << 10}[name])
    with pytest.raises(InvalidInput, match="holds 600 MiB, and 500 MiB are available; an update starts"):
        generations.update()
    assert len(ray.deployed) == 1


def test_nothing_is_deployed_while_the_command_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ray = use(FakeRay(set()), monkeypatch)
    generations = run.Generations(tmp_path, RuntimeConfig(), OPTIONS, CLUSTER)
    generations.closing = True
    with pytest.raises(InvalidInput, match="the command is ending"):
        generations.update()
    assert not ray.deployed


def test_a_first_deployment_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ray = use(FakeRay({1}), monkeypatch)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with socket.socket() as bound, pytest.raises(InvalidInput, match=r"no weights$"):
        run.serve_cluster(tmp_path, RuntimeConfig(), OPTIONS, CLUSTER, bound)
    assert ray.deleted == ["m", "m"], "first what a command that was killed has left"
    assert len(ray.deployed) == 1
    assert ray.given["address"] == "local", "whatever Ray runs on the machine"


def test_a_model_that_another_command_serves_is_refused_and_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ray = use(FakeRay(set()), monkeypatch)
    ray.names.append("m")
    with socket.socket() as bound, pytest.raises(InvalidInput, match="model = 'm': another command"):
        run.serve_cluster(tmp_path, RuntimeConfig(), OPTIONS, CLUSTER, bound)
    assert not ray.deleted + ray.deployed


@pytest.mark.parametrize(
    ("cluster", "device", "field"),
    [
        (ClusterOptions(1, replica_cpus=9), "cpu", "replica-cpus"),
        (ClusterOptions(6, replica_cpus=2), "cpu", "replica-cpus"),  # four on one machine and one on the other
        (ClusterOptions(2, replica_cpus=5, replica_gpus=0.5), "cuda", "replica-cpus"),
        (ClusterOptions(3, replica_cpus=2, replica_gpus=0.75), "cuda", "replica-gpus"),
        (ClusterOptions(2, replica_gpus=1), "cuda", "replica-gpus"),
        (ClusterOptions(1), "cuda", "replica-gpus"),  # all would share the first one
        (ClusterOptions(1, replica_gpus=1), "cuda:1", "device"),
    ],
)
def test_what_no_machine_of_the_cluster_has_is_refused_before_a_replica_starts(
    cluster: ClusterOptions, device: str, field: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ray = use(FakeRay(set()), monkeypatch)
    with socket.socket() as bound, pytest.raises(InvalidInput) as refused:
        run.serve_cluster(tmp_path, RuntimeConfig(device=device), OPTIONS, cluster, bound)
    assert refused.value.field == field
    assert not ray.deployed


def test_an_update_lets_old_replicas_end_their_requests() -> None:
    deployment = run._deployment(4, RuntimeConfig(), ServerOptions("m", request_seconds=900.0), CLUSTER)
    assert deployment._deployment_config.graceful_shutdown_timeout_s > 900


def test_a_replica_sends_together_what_has_come_and_shows_that_it_lives_while_nothing_does() -> None:
    silent = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for number in range(3):
            await send({"type": f"message {number}"})
        await silent.wait()
        await send({"type": "last"})

    async def ask() -> None:
        async for found in replica.Replica.http(living, {}, b"", []):
            sent.append([message["type"] for message in found])
            if len(sent) == 5:
                silent.set()

    living, sent = replica.Replica.__new__(replica.Replica), list[list[str]]()
    living._app, living._stall_after = app, 0.03  # type: ignore[assignment]
    living._engine = SimpleNamespace(cause=None)  # type: ignore[assignment]
    asyncio.run(ask())
    assert sent[:5] == [[], ["message 0", "message 1", "message 2"], [], [], []]
    assert [name for names in sent[5:] for name in names] == ["last"]


def test_a_replica_with_a_broken_engine_ends_before_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ended(BaseException):
        """The process ended."""

    def leave(code: int) -> None:
        assert code == 1
        raise Ended

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 503, "headers": []})

    async def ask() -> None:
        async for message in broken.http({}, b"", []):
            sent.append(message)

    monkeypatch.setattr("runtime.cluster.replica.os._exit", leave)
    broken, sent = replica.Replica.__new__(replica.Replica), list[Any]()
    broken._app, broken._stall_after = app, 3.0  # type: ignore[assignment]
    broken._engine = SimpleNamespace(cause=RuntimeError("a broken invariant"))  # type: ignore[assignment]
    with pytest.raises(Ended):
        asyncio.run(ask())
    assert not any(sent)


@pytest.mark.parametrize(
    "options",
    [
        {"replicas": 0},
        {"replicas": 2, "max_replicas": 1},
        {"replicas": 1, "replica_cpus": -1},
        {"replicas": 1, "replica_gpus": -1},
        {"replicas": 1, "stall_seconds": 0.5},
    ],
)
def test_a_wrong_option_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        ClusterOptions(**options)
