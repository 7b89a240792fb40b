"""Starting replicas on Ray Serve, and the gateway before them."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from engines.folder import read_spec
from mtad.errors import InvalidInput
from runtime.cluster.options import ClusterOptions
from runtime.config import RuntimeConfig
from runtime.server.middleware import Guard
from runtime.server.options import ServerOptions
from runtime.server.uvicorn_server import serve as serve_http

log = logging.getLogger(__name__)


def serve_cluster(
    pair: Path,
    config: RuntimeConfig,
    options: ServerOptions,
    cluster: ClusterOptions,
    bound: socket.socket,
    log_level: str,
    access_log: bool,
) -> None:
    """Serve a pair with several replicas on a bound socket, until drained.

    Args:
        pair: pair folder, at the same path on each machine of the cluster.
        config: how each replica's pair runs.
        options: of the server.
        cluster: of the group.
        bound: where to listen.
        log_level, access_log: of the HTTP server.

    Raises:
        InvalidInput: Ray is not installed or cannot be reached.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
        from ray import serve
    except ImportError as error:
        raise InvalidInput(
            "replicas", cluster.replicas, f"{error.name} is missing; pip install 'mtad[cluster]'"
        ) from None
    try:
        ray.init(address=cluster.address, include_dashboard=False if cluster.address is None else None)
    except (ConnectionError, ValueError) as error:
        raise InvalidInput("ray-address", cluster.address, f"cannot be reached: {error}") from None
    try:
        _check_resources(cluster, ray.cluster_resources())
        serve.start(proxy_location="Disabled")
        group = Group(pair, config, options, cluster)
        try:
            group.deploy()
        except RuntimeError as error:
            raise InvalidInput("pair", str(pair), f"its replicas do not start: {error}") from error
        gateway = group.gateway()
        guarded = Guard(gateway, options, lambda route, status: None)
        serve_http(guarded, gateway, bound, options, log_level, access_log)
        group.delete()
    finally:
        ray.shutdown()


def _check_resources(cluster: ClusterOptions, found: Mapping[str, float]) -> None:
    """Refuse what Ray would wait for without an end."""
    for name, key in (("cpus", "CPU"), ("gpus", "GPU")):
        wanted, there = cluster.replicas * getattr(cluster, name), found.get(key, 0.0)
        if wanted > there:
            problem = f"{cluster.replicas} replicas want {wanted:g} of Ray's {there:g} {key}s; give fewer"
            raise InvalidInput(f"replica-{name}", getattr(cluster, name), problem)


class Group:
    """The replicas of one pair.

    Args:
        pair, config, options, cluster: see `serve_cluster`.
    """

    def __init__(self, pair: Path, config: RuntimeConfig, options: ServerOptions, cluster: ClusterOptions) -> None:
        import ray

        from runtime.cluster.board import Board

        self._pair, self._config, self._cluster = pair, config, cluster
        self._options = replace(options, api_keys=())  # the gateway asks for them
        self._drain_seconds = options.drain_seconds
        self._board = ray.remote(num_cpus=0, max_restarts=-1)(Board).remote()
        self._generation = 0

    def deploy(self) -> None:
        """Start the replicas, or replace them one after another; returns when all are ready."""
        from ray import serve

        self._generation += 1
        self._handle = serve.run(self._application(), name=self._options.model, route_prefix=None)

    def delete(self) -> None:
        """Stop the replicas."""
        from ray import serve

        serve.delete(self._options.model)

    def gateway(self) -> Any:
        """The application that routes to them."""
        from runtime.cluster.gateway import Gateway

        async def reports() -> Any:
            return await self._board.reports.remote()

        async def rollout() -> None:
            await asyncio.to_thread(self.deploy)

        return Gateway(self._handle, reports, self._cluster.attempts, self._options.request_seconds, rollout)

    def _application(self) -> Any:
        from ray import serve
        from ray.serve.config import AutoscalingConfig, RequestRouterConfig

        from runtime.cluster.replica import Replica

        cluster = self._cluster
        rows = self._config.rows or read_spec(self._pair / "target").rows
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
        deployment = serve.deployment(
            Replica,
            name="replica",
            max_ongoing_requests=2 * rows,  # a full batch and its successors; the rest waits for any replica
            max_queued_requests=self._config.max_waiting,
            ray_actor_options={"num_cpus": cluster.cpus, "num_gpus": cluster.gpus},
            request_router_config=RequestRouterConfig(
                request_router_class="runtime.cluster.router.PrefixRouter",
                request_router_kwargs={"imbalance": cluster.imbalance},
            ),
            health_check_period_s=2.0,
            health_check_timeout_s=30.0,
            graceful_shutdown_wait_loop_s=0.2,
            graceful_shutdown_timeout_s=self._drain_seconds,
            **size,
        )
        arguments = (str(self._pair.absolute()), self._config, self._options, self._board, self._generation)
        return deployment.bind(*arguments)
