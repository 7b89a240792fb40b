"""Starting replicas on Ray Serve, and the gateway before them."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
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
    from ray.serve.config import AutoscalingConfig, RequestRouterConfig

    from runtime.cluster.board import Board
    from runtime.cluster.gateway import Gateway
    from runtime.cluster.replica import Replica
except ImportError as missing:
    raise InvalidInput("replicas", missing.name, "not installed; pip install 'mtad[cluster]'") from None

log = logging.getLogger(__name__)


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
    lost = threading.Event()
    try:
        ray.init(address=cluster.ray_address, include_dashboard=False if cluster.ray_address is None else None)
    except (ConnectionError, ValueError) as error:
        raise InvalidInput("ray-address", cluster.ray_address, f"cannot be reached: {error}") from None
    try:
        _check_resources(cluster, ray.cluster_resources())
        serve.start(proxy_location="Disabled")
        board = ray.remote(num_cpus=0, max_restarts=-1)(Board).remote()
        inner = replace(options, api_keys=())  # the gateway asks for them
        generations = count(1)

        def deploy() -> Any:
            """Start the replicas, or replace them one after another; returns when all are ready."""
            rows = config.rows or read_spec(pair / "target").rows  # of a new export, after a signal
            deployment = _deployment(rows, config, options, cluster)
            application = deployment.bind(str(pair.absolute()), config, inner, board, next(generations))
            return serve.run(application, name=options.model, route_prefix=None)

        try:
            handle = deploy()
        except RuntimeError as error:
            raise InvalidInput("pair", str(pair), f"its replicas do not start: {error}") from error
        gateway = Gateway(handle, board.reports.remote, options.request_seconds, partial(asyncio.to_thread, deploy))
        guarded = Guard(gateway, options, lambda path, status: None)
        watch = threading.Thread(target=watch_head, args=(ray.get_runtime_context().gcs_address, lost), daemon=True)
        watch.start()
        serve_http(guarded, gateway, sock, options, **logs)
        if not lost.is_set():
            serve.delete(options.model)
    finally:
        if lost.is_set():  # without its head process, Ray would try for a minute, and then abort this one
            logging.shutdown()
            os._exit(1)
        ray.shutdown()


def watch_head(address: str, lost: threading.Event, pause: float = 1.0) -> None:
    """Connect to Ray's head process again and again; once it is gone for good, say so and end the server.

    Args:
        pause: seconds between two attempts; three must fail.
    """
    host, _, port = address.rpartition(":")
    failed = 0
    while failed < 3:
        time.sleep(pause)
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=5.0).close()
            failed = 0
        except OSError:
            failed += 1
    log.critical(
        "Ray's head process at %s has died, and the replicas with it; the server ends. Start it again", address
    )
    lost.set()
    for _ in range(2):  # drain, and at once cancel what still runs
        signal.raise_signal(signal.SIGTERM)


def _check_resources(cluster: ClusterOptions, found: Mapping[str, float]) -> None:
    """Refuse what Ray would wait for without an end."""
    for name, key in (("replica_cpus", "CPU"), ("replica_gpus", "GPU")):
        wanted, there = cluster.replicas * getattr(cluster, name), found.get(key, 0.0)
        if wanted > there:
            problem = f"{cluster.replicas} replicas need {wanted:g} {key}s, and Ray has {there:g}; give fewer"
            raise InvalidInput(name.replace("_", "-"), getattr(cluster, name), problem)


def _deployment(rows: int, config: RuntimeConfig, options: ServerOptions, cluster: ClusterOptions) -> Any:
    size: dict[str, Any] = {"num_replicas": cluster.replicas}
    if cluster.max_replicas is not None:
        scaling = AutoscalingConfig(
            min_replicas=cluster.replicas,
            max_replicas=cluster.max_replicas,
            target_ongoing_requests=rows,  # more than that wait for a row
            metrics_interval_s=1.0,
            look_back_period_s=2.0,
            upscale_delay_s=2.0,
            downscale_delay_s=60.0,
        )
        size = {"autoscaling_config": scaling}
    return serve.deployment(
        Replica,
        name="replica",
        max_ongoing_requests=2 * rows,  # a full batch and its successors; the rest waits for any replica
        max_queued_requests=config.max_waiting,
        ray_actor_options={"num_cpus": cluster.replica_cpus, "num_gpus": cluster.replica_gpus},
        request_router_config=RequestRouterConfig(request_router_class="runtime.cluster.router.PrefixRouter"),
        health_check_period_s=2.0,
        health_check_timeout_s=30.0,
        graceful_shutdown_wait_loop_s=0.2,
        graceful_shutdown_timeout_s=options.drain_seconds,
        **size,
    )
