"""Options of the HTTP server, and of replicas behind one."""

from __future__ import annotations

from dataclasses import dataclass

from mtad.errors import InvalidInput
from runtime.config import check_least


@dataclass(frozen=True)
class ServerOptions:
    """Options of one server.

    Attributes:
        model: name the pair is served under.
        api_keys: a request to `/v1/` must carry one of them; none leaves it open to all who can connect.
        chat_template: Jinja template in place of the tokenizer's own.
        max_body_bytes: largest request body, >= 1.
        body_seconds: timeout for receiving a request's body, in seconds, >= 0.001.
        request_seconds: timeout for a request, waiting included, in seconds, >= 0.001.
        drain_seconds: how long accepted requests may go on after SIGTERM, in seconds, >= 0.
        max_choices: choices per request, prompts times n, >= 1.
        allow_priority: let requests carry a priority.
        allowed_host: a name under which clients reach this server, without port; needed only without API keys. May be
            repeated.
    """

    model: str
    api_keys: tuple[str, ...] = ()
    chat_template: str | None = None
    max_body_bytes: int = 4 * 2**20
    body_seconds: float = 30.0
    request_seconds: float = 600.0
    drain_seconds: float = 60.0
    max_choices: int = 128
    allow_priority: bool = False
    allowed_host: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.model:
            raise InvalidInput("model", self.model, "give a name")
        if any(not key or not key.isascii() or not key.isprintable() or " " in key for key in self.api_keys):
            raise InvalidInput("api-key", "***", "a key is printable ASCII without spaces, at least one character")
        check_least(self, max_body_bytes=1, max_choices=1, drain_seconds=0, body_seconds=1e-3, request_seconds=1e-3)


@dataclass(frozen=True)
class ClusterOptions:
    """Options of a group of replicas.

    Attributes:
        replicas: processes with an engine each, >= 1; without it, the server's own process has the engine.
        max_replicas: most replicas, started while requests wait; by default, as many as replicas.
        replica_cpus: CPU cores that Ray reserves for each replica, >= 0.
        replica_gpus: GPUs that Ray gives each replica, >= 0.
        stall_seconds: a replica that does not answer Ray Serve's health checks, or has requests and makes no step, for
            so long is replaced, and requests of which nothing was sent go to another; in seconds, >= 1.
    """

    replicas: int
    max_replicas: int | None = None
    replica_cpus: float = 1.0
    replica_gpus: float = 0.0
    stall_seconds: float = 120.0

    def __post_init__(self) -> None:
        check_least(self, replicas=1, replica_cpus=0, replica_gpus=0, stall_seconds=1)
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise InvalidInput("max-replicas", self.max_replicas, f"give at least --replicas, {self.replicas}")
