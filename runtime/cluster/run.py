"""Starting replicas on Ray Serve, and the gateway before them."""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import threading
from collections.abc import Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from engines.folder import read_spec
from mtad.errors import InvalidInput
from runtime.config import RuntimeConfig
from runtime.server.middleware import Guard
from runtime.server.options import ClusterOptions, ServerOptions
from runtime.server.uvicorn_server import serve as serve_http

try:
    import ray
    from ray import serve
    from ray.serve.config import AutoscalingConfig, ControllerOptions, RequestRouterConfig

    from runtime.cluster.board import Board
    from runtime.cluster.gateway import Gateway
    from runtime.cluster.replica import Replica
except ImportError as missing:
    raise InvalidInput("replicas", missing.name, "not installed; pip install 'mtad[cluster]'") from None

log = logging.getLogger(__name__)

CONTROLLER = {"env_vars": {"RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1"}}
"""Of Ray Serve's controller: a replica that hangs is killed at once, so that its requests are tried elsewhere."""


def serve_cluster(
    pair: Path, config: RuntimeConfig, options: ServerOptions, cluster: ClusterOptions, sock: socket.socket, **logs: Any
) -> None:
    """Serve a pair with several replicas on a bound socket, until drained.

    Args:
        pair: pair folder, at the same path on each machine of the cluster.

    Raises:
        InvalidInput: the pair cannot be read, Ray cannot be reached or has too little for the replicas, or they do not
            start.
    """
    read_spec(pair / "target")  # a damaged folder is refused before anything is started
    where: dict[str, Any] = {"address": cluster.ray_address}
    if cluster.ray_address is None and "RAY_ADDRESS" not in os.environ:
        cores = (os.cpu_count() or 1) + math.ceil(cluster.replica_cpus)  # room for one more while they are replaced
        where = {"include_dashboard": False, "num_cpus": cores}
    try:
        ray.init(**where)
    except (ConnectionError, ValueError) as error:
        raise InvalidInput("ray-address", cluster.ray_address, f"cannot be reached: {error}") from None
    board, generations = ray.remote(num_cpus=0, max_restarts=-1)(Board).remote(), count(1)

    def deploy() -> Any:
        """Start the replicas, or replace them one after another; returns when all are ready."""
        rows = config.rows or read_spec(pair / "target").rows  # of a new export, after a signal
        inner = replace(options, api_keys=())  # the gateway asks for them
        given = str(pair.absolute()), config, inner, cluster.stall_seconds, board, next(generations)
        application = _deployment(rows, config, options, cluster).bind(*given)
        try:
            return serve.run(application, name=options.model, route_prefix=None)
        except RuntimeError as error:  # which does not say why
            why = serve.status().applications[options.model].deployments["replica"].message.strip().splitlines()[-1]
            raise InvalidInput("pair", str(pair), f"its replicas do not start: {why}") from error

    def update() -> None:
        log.info("replacing the replicas, one after another")
        try:
            _check_resources(replace(cluster, replicas=1, max_replicas=None), ray.available_resources())
            deploy()
        except Exception as error:  # whatever is wrong with the folder
            gateway.update_refused = str(error)
            log.error("the pair folder is not taken, and the old replicas stay: %s", error)
        else:
            gateway.update_refused = ""
            log.info("all replicas are new")

    try:
        _check_resources(cluster, ray.cluster_resources())
        serve.start(proxy_location="Disabled", controller_options=ControllerOptions(runtime_env=CONTROLLER))
        gateway = Gateway(deploy(), options.request_seconds, board.reports.remote)
        if hasattr(signal, "SIGHUP"):
            signal.signal(signal.SIGHUP, lambda *_: threading.Thread(target=update, daemon=True).start())
        guarded = Guard(gateway, options, lambda path, status: None)
        serve_http(guarded, gateway, sock, options.drain_seconds, **logs)
        serve.delete(options.model)
    finally:
        ray.shutdown()


def _check_resources(cluster: ClusterOptions, found: Mapping[str, float]) -> None:
    """Refuse what Ray would wait for without an end."""
    for name, key in (("replica_cpus", "CPU"), ("replica_gpus", "GPU")):
        wanted, there = cluster.replicas * getattr(cluster, name), found.get(key, 0.0)
        if wanted > there:
            problem = f"{cluster.replicas} replicas need {wanted:g} {key}s, and Ray has {there:g}; give fewer"
            raise InvalidInput(name.replace("_", "-"), getattr(cluster, name), problem)


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
        max_constructor_retry_count=1,
        ray_actor_options={"num_cpus": cluster.replica_cpus, "num_gpus": cluster.replica_gpus},
        request_router_config=RequestRouterConfig(request_router_class="runtime.cluster.router.PrefixRouter"),
        health_check_period_s=2.0,
        health_check_timeout_s=cluster.stall_seconds / 3,  # a replica that fails three checks in a row is replaced
        graceful_shutdown_wait_loop_s=0.2,
        graceful_shutdown_timeout_s=options.drain_seconds,
        autoscaling_config=scaling,
    )
