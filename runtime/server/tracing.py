"""OpenTelemetry spans, one per request, for the tracer provider that the process has.

`opentelemetry-instrument mtad serve ...` sets one up; without one, nothing is recorded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from opentelemetry import propagate, trace

from mtad.params import DecodingParams
from runtime.scheduler.request import Request
from runtime.scheduler.statistics import Statistics
from runtime.server.responses import summed
from runtime.server.schema import Body

_TRACER = trace.get_tracer("mtad")


def begin_span(route: str, headers: Mapping[str, str]) -> trace.Span:
    """The span of a request, under the caller's if the headers name one (W3C trace context)."""
    operation = "text_completion" if route == "/v1/completions" else "chat"
    asked = {"gen_ai.operation.name": operation, "http.route": route}
    above, kind = propagate.extract(dict(headers)), trace.SpanKind.SERVER
    return _TRACER.start_span(f"POST {route}", above, kind=kind, attributes=asked)


def describe_request(span: trace.Span, body: Body, requests: Sequence[Request], params: DecodingParams) -> None:
    """Add what was asked for, when it is queued."""
    span.set_attributes(
        {
            "gen_ai.request.model": body.model,
            "gen_ai.request.max_tokens": requests[0].max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.usage.input_tokens": sum(len(request.prompt) for request in requests[:: params.n]),
            "mtad.method": params.method,
            "mtad.stream": body.stream,
        }
    )


def end_span(span: trace.Span, statistics: Mapping[int, Statistics], error: str | None = None) -> None:
    """End it with what the choices that have ended cost; `error` says why the response was given up."""
    if span.is_recording() and (ended := list(statistics.values())):
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
        span.set_attributes(cost)
    if error:
        span.set_status(trace.Status(trace.StatusCode.ERROR, error))
    span.end()
