"""What a server is told when it starts."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mtad.errors import InvalidInput


@dataclass(frozen=True)
class ServerOptions:
    """Options of one server.

    Attributes:
        model: name the pair is served under.
        api_keys: a request to `/v1/` must carry one of them; none leaves it open to all who can connect.
        chat_template: Jinja template in place of the tokenizer's own.
        max_body_bytes: largest request body, > 0.
        body_seconds: timeout for receiving a request's head, and then its body, in seconds, > 0.
        request_seconds: timeout for a request, waiting included, in seconds, > 0.
        drain_seconds: how long accepted requests may go on after SIGTERM, in seconds, >= 0.
        trace: make an OpenTelemetry span of each request; needs opentelemetry-api.
    """

    model: str
    api_keys: tuple[str, ...] = ()
    chat_template: str | None = None
    max_body_bytes: int = 4 * 2**20
    body_seconds: float = 30.0
    request_seconds: float = 600.0
    drain_seconds: float = 60.0
    trace: bool = False

    def __post_init__(self) -> None:
        if not self.model:
            raise InvalidInput("model", self.model, "give a name")
        if any(not key or not key.isascii() or not key.isprintable() or " " in key for key in self.api_keys):
            raise InvalidInput("api-key", "***", "a key is printable ASCII without spaces, at least one character")
        for name, least in (("max_body_bytes", 1), ("body_seconds", 0), ("request_seconds", 0), ("drain_seconds", 0)):
            value = getattr(self, name)
            if not math.isfinite(value) or value < least or (value == 0 and name != "drain_seconds"):
                raise InvalidInput(name.replace("_", "-"), value, "give a positive number")
