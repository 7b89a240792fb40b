"""What a group of replicas is told when it starts."""

from __future__ import annotations

from dataclasses import dataclass

from mtad.errors import InvalidInput
from runtime.config import check_least


@dataclass(frozen=True)
class ClusterOptions:
    """Options of a group of replicas.

    Attributes:
        replicas: processes with an engine each, >= 1; without it, the server's own process has the engine.
        max_replicas: most replicas, started while requests wait; by default, as many as replicas.
        replica_cpus: CPU cores that Ray reserves for each replica, >= 0.
        replica_gpus: GPUs that Ray gives each replica, >= 0.
        ray_address: address of a running Ray cluster; by default, one is started on this machine.
    """

    replicas: int
    max_replicas: int | None = None
    replica_cpus: float = 1.0
    replica_gpus: float = 0.0
    ray_address: str | None = None

    def __post_init__(self) -> None:
        check_least(self, replicas=1, replica_cpus=0, replica_gpus=0)
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise InvalidInput("max-replicas", self.max_replicas, f"give at least --replicas, {self.replicas}")
