"""Starting replicas on Ray Serve, and the gateway before them."""

from __future__ import annotations

import logging
import math
import os
import re
import signal
import socket
import sys
import threading
from dataclasses import replace
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from uuid import uuid4

from engines.folder import read_spec
from mtad.errors import InvalidInput
from runtime.config import RuntimeConfig
from runtime.server.middleware import Guard
from runtime.server.options import ClusterOptions, ServerOptions
from runtime.server.uvicorn_server import serve as serve_http

ENVIRONMENT = {
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",  # one that hangs is killed at once, and its requests go elsewhere
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",  # not through Ray's object store
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",  # in a replica, not from one thread to another
    "GRPC_ENABLE_FORK_SUPPORT": "0",  # else gRPC warns at each fork
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(2**31 - 1),  # 4 MiB by default; bodies may be as long
}
"""Of this process, before Ray is imported, of Ray Serve's controller, and of the replicas."""
os.environ |= ENVIRONMENT
try:
    import ray
    from ray import serve
    from ray._private.state import available_resources_per_node
    from ray.serve.config import AutoscalingConfig, RequestRouterConfig
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from runtime.cluster.board import Board, Report
    from runtime.cluster.gateway import FULL_SECONDS, Gateway
    from runtime.cluster.replica import Replica
except ImportError as missing:
    raise InvalidInput("replicas", missing.name, "not installed; the extra cluster installs it") from None

log = logging.getLogger(__name__)

ONE_MORE = "an update starts a replica before an old one goes; make room, or start the command again"


def serve_cluster(
    pair: Path, config: RuntimeConfig, options: ServerOptions, cluster: ClusterOptions, sock: socket.socket, **logs: Any
) -> None:
    """Serve a pair with several replicas on a bound socket, until drained.

    Args:
        pair: pair folder, at the same path on each machine of the cluster.

    Raises:
        InvalidInput: the pair cannot be read, Ray cannot be reached or has too little for the replicas, another command
            serves the model on it, or they do not start.
    """
    read_spec(pair / "target")  # a damaged folder is refused before anything is started
    if config.device.startswith("cuda") and not cluster.replica_gpus:
        raise InvalidInput("replica-gpus", cluster.replica_gpus, "give what each replica has of a GPU, for example 1")
    if config.device not in ("cpu", "cuda", "cuda:0"):
        raise InvalidInput("device", config.device, "give cuda: Ray shows each replica its own GPUs alone")
    where: dict[str, Any] = {}
    if "RAY_ADDRESS" not in os.environ:
        cores = (os.cpu_count() or 1) + math.ceil(cluster.replica_cpus)  # room for one more while they are replaced
        where = {"address": "local", "include_dashboard": False, "num_cpus": cores}  # not one found on the machine
    # a signal to the process group is for this process, which drains, and not for Ray's, which inherit the mask
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        ray.init(**where)
    except (ConnectionError, ValueError) as error:
        raise InvalidInput("RAY_ADDRESS", os.environ.get("RAY_ADDRESS"), f"cannot be reached: {error}") from None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    try:
        _check_resources(cluster, [node["Resources"] for node in ray.nodes() if node["Alive"]])
        serve.start(proxy_location="Disabled", controller_options={"runtime_env": {"env_vars": ENVIRONMENT}})
        generations = Generations(pair, config, options, cluster)
        _delete(options.model)  # what a command that was killed has left
        asked = SimpleQueue[int]()  # a handler of signals may use no lock
        signal.signal(signal.SIGHUP, lambda number, _: asked.put(number))
        try:
            replicas, reports = generations.deploy(), generations.board.reports.remote
            gateway = Gateway(replicas, options.request_seconds, cluster.stall_seconds, reports)
            threading.Thread(target=keep_updating, args=(asked, generations, gateway), daemon=True).start()
            guarded = Guard(gateway, options, gateway.responded)
            serve_http(guarded, gateway, sock, options.drain_seconds, **logs)
        finally:  # a Ray cluster of one's own goes on
            generations.closing = True
            _delete(options.model)
    finally:
        ray.shutdown()


class Generations:
    """The replicas of a pair folder as it was when they were deployed, and of the one before where that is refused.

    Attributes:
        board: where replicas report.
        closing: whether the application is being deleted, so that nothing is to be deployed any more.
    """

    def __init__(self, pair: Path, config: RuntimeConfig, options: ServerOptions, cluster: ClusterOptions) -> None:
        self._pair, self._config, self._options, self._cluster = pair, config, options, cluster
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        given: dict[str, Any] = {"num_cpus": 0, "max_restarts": -1, "scheduling_strategy": here}
        try:  # it lives as long as the command
            self.board = ray.remote(name=options.model, namespace="mtad", **given)(Board).remote()
        except ValueError:
            problem = (
                "another command serves it on this Ray cluster, or Ray has not missed one that died; wait, or rename"
            )
            raise InvalidInput("model", options.model, problem) from None
        self.closing = False
        self._numbers, self._good, self._name = count(1), dict[str, Any](), uuid4().hex

    def deploy(self) -> Any:
        """Start the replicas, or replace them one after another; returns Ray Serve's handle when all are ready.

        Raises:
            InvalidInput: they do not start. Those of the last generation that did are the wanted ones again.
        """
        pair = self._pair.absolute()
        folder = pair.parent / pair.readlink() if pair.is_symlink() else pair  # a link may lead elsewhere later
        rows = self._config.rows or read_spec(folder / "target").rows  # of a new export, after a signal
        new: dict[str, Any] = {"rows": rows, "folder": str(folder), "generation": next(self._numbers)}
        try:
            replicas = self._run(**new)
        except RuntimeError as error:
            problem = f"its replicas do not start: {self._why()}{self._deploy_last()}"
            raise InvalidInput("pair", str(folder), problem) from error
        self._good = new
        return replicas

    def update(self) -> None:
        """Replace the replicas.

        Raises:
            InvalidInput: there is no room for one more beside them, or as `deploy`.
        """
        one = replace(self._cluster, replicas=1, max_replicas=None)
        _check_resources(one, list(available_resources_per_node().values()), ONE_MORE)
        _check_memory(ray.get(self.board.reports.remote(), timeout=10))
        self.deploy()

    def _deploy_last(self) -> str:
        """Ray Serve replaces no replica of a failed update, not even old ones; returns what is to be said of it."""
        if self.closing or not self._good:
            return ""
        try:
            self._run(**self._good)
        except RuntimeError:
            return f"; nor do the last ones again, so that none that dies is replaced: {self._why()}"
        return f"; generation {self._good['generation']} serves"

    def _run(self, rows: int, folder: str, generation: int) -> Any:
        if self.closing:
            raise InvalidInput("pair", folder, "the command is ending")
        inner = replace(self._options, api_keys=())  # the gateway asks for them
        given = folder, self._config, inner, self._cluster.stall_seconds, self.board, generation
        deployment = _deployment(rows, self._config, self._options, self._cluster)
        # with a version of ours, replicas of the last generation stay when it is deployed again
        deployment = deployment.options(version=f"{self._name} {generation}", _internal=True)
        return serve.run(deployment.bind(*given), name=self._options.model, route_prefix=None)

    def _why(self) -> str:
        """What Ray Serve's error does not say."""
        replicas = serve.status().applications[self._options.model].deployments["replica"]
        return str(replicas.message.strip().splitlines()[-1])


def keep_updating(asked: SimpleQueue[int], generations: Generations, gateway: Gateway) -> None:
    """One update after another; all that were asked for during one are one more."""
    while asked.get():
        while not asked.empty():
            asked.get()
        log.info("replacing the replicas, one after another")
        try:
            generations.update()
        except Exception as error:  # whatever is wrong with the folder
            gateway.update_refused = str(error)
            log.error("the pair folder is not taken, and the old replicas stay: %s", error)
        else:
            gateway.update_refused = ""
            log.info("all replicas are new")


def _delete(model: str) -> None:
    try:
        serve.delete(model)
    except TimeoutError:
        log.warning("a replica does not end; Ray Serve goes on ending it")


def _check_resources(cluster: ClusterOptions, machines: list[dict[str, float]], remedy: str = "give fewer") -> None:
    """Refuse what Ray would wait for without an end; a replica has all that it needs on one machine."""
    rooms = [cluster.replicas] * len(machines)
    for name, key in (("replica_cpus", "CPU"), ("replica_gpus", "GPU")):
        if each := getattr(cluster, name):
            rooms = [min(n, int(has.get(key, 0) / each + 1e-9)) for n, has in zip(rooms, machines, strict=True)]
            if (room := sum(rooms)) < cluster.replicas:
                problem = f"Ray has {key}s for {room} such replicas, and {cluster.replicas} are asked for; {remedy}"
                raise InvalidInput(name.replace("_", "-"), each, problem)


def _check_memory(reports: list[Report]) -> None:
    """Refuse an update where this machine has no memory for what one of the replicas on it holds, once more."""
    if sys.platform != "linux":
        return
    pids = [labels["pid"] for labels, *_ in reports if labels["host"] == socket.gethostname()]
    held = [_kib(status, "RssAnon") for pid in pids if (status := Path(f"/proc/{pid}/status")).exists()]
    needed, free = max(held, default=0), _kib(Path("/proc/meminfo"), "MemAvailable")
    if needed > free:
        problem = f"a replica holds {needed >> 10} MiB, and {free >> 10} MiB are available; {ONE_MORE}"
        raise InvalidInput("memory", None, problem)


def _kib(path: Path, name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", path.read_text(), re.MULTILINE)
    return int(found[1]) if found else 0


def _deployment(rows: int, config: RuntimeConfig, options: ServerOptions, cluster: ClusterOptions) -> Any:
    scaling = AutoscalingConfig(
        min_replicas=cluster.replicas,
        max_replicas=cluster.max_replicas or cluster.replicas,
        target_ongoing_requests=rows,  # more than that wait for a row
        metrics_interval_s=1.0,
        look_back_period_s=2.0,
        upscale_delay_s=2.0,
        downscale_delay_s=60.0,
    )
    return serve.deployment(
        Replica,
        name="replica",
        max_ongoing_requests=2 * rows,  # a full batch and its successors; the rest waits for any replica
        max_queued_requests=config.max_waiting,
        max_surge_percent=1,  # a new replica has answered a prompt before an old one goes
        max_constructor_retry_count=2,  # an update is refused at its second failure in a row, crashes included
        ray_actor_options={
            "num_cpus": cluster.replica_cpus,
            "num_gpus": cluster.replica_gpus,
            "runtime_env": {"env_vars": ENVIRONMENT},
        },
        request_router_config=RequestRouterConfig(
            request_router_class="runtime.cluster.router.PrefixRouter", max_backoff_s=FULL_SECONDS
        ),
        health_check_period_s=2.0,
        health_check_timeout_s=cluster.stall_seconds / 3,  # a replica that fails three checks in a row is replaced
        graceful_shutdown_wait_loop_s=0.2,
        graceful_shutdown_timeout_s=options.request_seconds + 1.0,  # an update ends no request
        autoscaling_config=scaling,
        logging_config={"enable_access_log": False},  # the gateway's process would print each line
    )
