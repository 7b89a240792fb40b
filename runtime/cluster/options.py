"""What a group of replicas is told when it starts."""

from __future__ import annotations

from dataclasses import dataclass

from mtad.errors import InvalidInput


@dataclass(frozen=True)
class ClusterOptions:
    """Options of a group of replicas.

    Attributes:
        replicas: at least so many, >= 1.
        max_replicas: at most so many, by the depth of the queue; None keeps `replicas`.
        cpus, gpus: of each replica, as Ray accounts for them, >= 0; a GPU is that replica's own if this is 1.
        address: of a running Ray cluster; None starts one on this machine.
        attempts: replicas that a request is tried on where some cannot be reached, >= 1; of dying ones, two at most.
        imbalance: requests that the replica with a prompt's prefix may have more than the least busy one, >= 0.
    """

    replicas: int = 1
    max_replicas: int | None = None
    cpus: float = 1.0
    gpus: float = 0.0
    address: str | None = None
    attempts: int = 3
    imbalance: int = 4

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise InvalidInput("replicas", self.replicas, "give at least 1")
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise InvalidInput("max-replicas", self.max_replicas, f"give at least --replicas, {self.replicas}")
        for name in ("cpus", "gpus"):
            if getattr(self, name) < 0:
                raise InvalidInput(f"replica-{name}", getattr(self, name), "give at least 0")
        if self.attempts < 1 or self.imbalance < 0:
            raise InvalidInput("attempts and imbalance", (self.attempts, self.imbalance), "give at least 1 and 0")
