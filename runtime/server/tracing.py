"""OpenTelemetry spans, one per request, with the option `trace`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from mtad.errors import InvalidInput
from mtad.params import DecodingParams
from runtime.scheduler.statistics import Statistics
from runtime.server.responses import summed
from runtime.server.schema import Body

log = logging.getLogger(__name__)


class Span:
    """One request's span; without a tracer it does nothing."""

    def __init__(self, span: Any = None) -> None:
        self._span = span

    def submitted(self, body: Body, prompt_tokens: int, params: DecodingParams) -> None:
        """Add what was asked for, when it is queued."""
        if self._span:
            asked = {
                "gen_ai.request.model": body.model,
                "gen_ai.request.max_tokens": params.max_tokens,
                "gen_ai.request.temperature": params.temperature,
                "gen_ai.usage.input_tokens": prompt_tokens,
                "mtad.method": params.method,
                "mtad.stream": body.stream,
            }
            self._span.set_attributes(asked | ({"enduser.id": body.user} if body.user else {}))

    def end(self, statistics: Mapping[int, Statistics], error: str | None = None) -> None:
        """End it with what the choices that have ended cost; `error` says why the response was given up."""
        if not self._span:
            return
        if ended := list(statistics.values()):
            total = summed(ended)
            first = [s.first_token_seconds for s in ended if s.first_token_seconds is not None]
            cost = {
                "gen_ai.usage.output_tokens": total.tokens,
                "mtad.block_efficiency": total.block_efficiency,
                "mtad.acceptance_rate": total.acceptance_rate,
                "mtad.reused_tokens": sum(s.reused_tokens for s in ended),
                "mtad.queue_seconds": max(s.queue_seconds for s in ended),
                "mtad.first_token_seconds": min(first, default=0.0),
            }
            self._span.set_attributes(cost)
        if error:
            from opentelemetry.trace import Status, StatusCode

            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end()


class Tracing:
    """Makes the spans.

    They go to the process's tracer provider, which `opentelemetry-instrument mtad serve ...` or the program around the
    application sets up.

    Raises:
        InvalidInput: they are wanted and `opentelemetry-api` is not installed.
    """

    def __init__(self, wanted: bool) -> None:
        self._tracer: Any = None
        if not wanted:
            return
        try:
            from opentelemetry import trace
        except ImportError:
            remedy = "opentelemetry-api is not installed; pip install 'mtad[trace]'"
            raise InvalidInput("trace", True, remedy) from None
        self._tracer = trace.get_tracer("mtad")
        if type(trace.get_tracer_provider()).__name__ in ("ProxyTracerProvider", "NoOpTracerProvider"):
            log.warning("spans go nowhere: no tracer provider; start with opentelemetry-instrument mtad serve ...")

    def begin(self, route: str, headers: Mapping[str, str]) -> Span:
        """The span of a request, under the caller's if the headers name one (W3C trace context)."""
        if self._tracer is None:
            return Span()
        from opentelemetry import propagate
        from opentelemetry.trace import SpanKind

        operation = "text_completion" if route == "/v1/completions" else "chat"
        attributes = {"gen_ai.operation.name": operation, "http.route": route}
        context = propagate.extract(dict(headers))
        return Span(self._tracer.start_span(f"POST {route}", context, kind=SpanKind.SERVER, attributes=attributes))
