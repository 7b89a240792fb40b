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

    def init(self, **given: Any) -> None:
        self.given = given

    def shutdown(self) -> None:
        pass

    def start(self, **_: Any) -> None:
        pass

    def available_resources(self) -> dict[str, float]:
        return {"CPU": 8.0}

    cluster_resources = available_resources

    def remote(self, **_: Any) -> Any:
        return lambda board: SimpleNamespace(
            remote=lambda: SimpleNamespace(reports=SimpleNamespace(remote=lambda: None))
        )

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
    with pytest.raises(InvalidInput, match="0; an update starts a replica before an old one goes"):
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
    assert ray.deleted == ["m"]
    assert len(ray.deployed) == 1
    assert ray.given["address"] == "local", "whatever Ray runs on the machine"


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
    broken._app, broken._engine = app, SimpleNamespace(cause=RuntimeError("a broken invariant"))  # type: ignore[assignment]
    with pytest.raises(Ended):
        asyncio.run(ask())
    assert not sent


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
