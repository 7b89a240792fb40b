"""Metrics, the dashboard over them, traces: what is exported is what happened."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families

from mtad import LLM
from runtime.resting import Turn
from runtime.server.metrics import Scrapes
from tests.support.live_server import MODEL, LiveServer, call, gated, live
from tests.support.paths import ROOT
from tests.support.waiting import own, until

DASHBOARD = ROOT / "docs" / "grafana.json"


@pytest.fixture(scope="module")
def server(plain: LLM) -> Iterator[LiveServer]:
    """One for all tests; the first of them needs it new."""
    with live(own(plain)) as running:
        yield running


def scrape(server: LiveServer) -> dict[str, float]:
    """Samples by name and labels, as Prometheus would store them."""
    status, headers, text = call(server, "GET", "/metrics")
    assert status == 200
    assert headers["content-type"].startswith("text/plain")
    found = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            name = f"{sample.name}{{{labels}}}" if labels else sample.name
            assert name not in found, "exported twice"
            found[name] = sample.value
    return found


def test_metrics_are_the_sums_of_what_requests_report(server: LiveServer) -> None:
    before = scrape(server)
    assert (before["mtad_generated_tokens_total"], before["mtad_kv_rows"]) == (0, 4)
    reports: list[dict[str, Any]] = []
    pieces = 0
    for method in ("sample", "speculative", "mtad", "mmtad"):
        for chunk in server.client.completions.create(
            model=MODEL, prompt="How many", n=2, seed=1, max_tokens=20, stream=True, extra_body={"method": method}
        ):
            extension = chunk.choices[0].to_dict()["mtad"]
            pieces += 1
            if "statistics" in extension:
                reports.append(extension["statistics"])
    assert call(server, "GET", "/nothing")[0] == 404
    now = scrape(server)
    assert len(reports) == 8
    for metric, field in {
        "mtad_generated_tokens_total": "tokens", "mtad_prompt_tokens_total": "prompt_tokens",
        "mtad_reused_prompt_tokens_total": "reused_tokens", "mtad_drafted_tokens_total": "drafted",
        "mtad_accepted_tokens_total": "accepted", "mtad_target_passes_total": "target_passes",
    }.items():  # fmt: skip
        assert now[metric] == sum(report[field] for report in reports), metric
    assert now["mtad_generated_tokens_total"] > now["mtad_target_passes_total"]
    assert now["mtad_accepted_length_sum"] == now["mtad_accepted_tokens_total"] > 0
    assert sum(value for name, value in now.items() if name.startswith("mtad_requests_total")) == 8
    assert now["mtad_inter_block_seconds_count"] == pieces - 8, "every piece of a choice but its first"
    for name in ("mtad_time_to_first_token_seconds", "mtad_request_seconds", "mtad_queue_seconds"):
        assert now[f"{name}_count"] == now[f"{name}_bucket{{le=+Inf}}"] == 8
    for name, field in (("time_to_first_token", "first_token_seconds"), ("request", "total_seconds")):
        assert now[f"mtad_{name}_seconds_sum"] == pytest.approx(sum(report[field] for report in reports))
    for phase in ("queue", "prefill", "draft", "score", "commit"):
        assert now[f"mtad_phase_seconds_total{{phase={phase}}}"] > 0
    assert now["mtad_http_responses_total{route=/v1/completions,status=200}"] == 4
    assert now["mtad_http_responses_total{route=other,status=404}"] == 1
    assert now["mtad_model{model=small}"] == 1
    counters = [name for name in now if re.search(r"(_total|_count|_sum|_bucket)(\{|$)", name)]
    later = scrape(server)
    assert all(later[name] >= now[name] >= before.get(name, 0) for name in counters), "counters only grow"


def test_metrics_are_served_whatever_is_asked_for(server: LiveServer) -> None:
    for accept in (
        "*/*",
        "application/openmetrics-text; version=1.0.0",
        "application/openmetrics-text; version=x;q=,;",
    ):
        status, headers, text = call(server, "GET", "/metrics", accept=accept)
        assert (status, headers["content-type"][:26]) == (200, "text/plain; version=0.0.4;")
        names = {family.name for family in text_string_to_metric_families(text.decode())}
        assert names >= {"mtad_generated_tokens", "mtad_accepted_length"}


def test_scrapes_that_come_while_one_is_made_share_its_text_also_where_the_first_has_left() -> None:
    started, gate, made = threading.Event(), threading.Event(), list[int]()

    def families() -> list[Metric]:
        made.append(len(made))
        started.set()
        assert gate.wait(10)
        return [GaugeMetricFamily("made", "so far", len(made))]

    async def scraped() -> list[bytes]:
        scrapes = Scrapes(Turn())
        first = asyncio.ensure_future(scrapes.answer(families))
        await asyncio.to_thread(started.wait)
        others = [asyncio.ensure_future(scrapes.answer(families)) for _ in range(5)]
        await asyncio.sleep(0)
        first.cancel()
        gate.set()
        found = [response.body for response in await asyncio.gather(*others)]
        return [bytes(text) for text in (*found, (await scrapes.answer(families)).body)]

    *shared, later = asyncio.run(scraped())
    assert set(shared) == {b"# HELP made so far\n# TYPE made gauge\nmade 1.0\n"}
    assert b"made 2.0" in later


def test_the_dashboard_asks_for_what_is_exported_and_shows_all_of_it(server: LiveServer) -> None:
    server.client.completions.create(model=MODEL, prompt="S", max_tokens=2)
    exported = {re.sub(r"\{.*", "", name) for name in scrape(server)}
    dashboard = json.loads(DASHBOARD.read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    variables = [variable["query"] for variable in dashboard["templating"]["list"]]
    asked = set(re.findall(r"\b(?:mtad|process)_\w+", json.dumps(expressions + variables)))
    assert asked <= exported
    ours = {re.sub(r"_(bucket|sum|count)$", "", name) for name in exported if name.startswith("mtad_")}
    assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in asked} >= ours, "each metric has a panel"
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    for expression in expressions:
        assert expression.count("(") == expression.count(")")
        for label in re.findall(r"by \(([\w, ]+)\)|(\w+)(?:!=|=~)", expression):
            for name in re.split(r", ", label[0] or label[1]):
                assert name in ("le", "instance", "position", "reason", "route", "status", "phase", "job"), name


@pytest.fixture(scope="module")
def exporter() -> InMemorySpanExporter:
    """Where the process's spans go; a process has one provider for good."""
    kept, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    trace.set_tracer_provider(provider)
    return kept


def test_each_request_is_one_span_under_its_callers(plain: LLM, exporter: InMemorySpanExporter) -> None:
    exporter.clear()
    parent = f"00-{'a' * 32}-{'b' * 16}-01"
    with live(own(plain)) as server:
        client = server.client.with_options(default_headers={"traceparent": parent})
        client.completions.create(model=MODEL, prompt="How many", max_tokens=8, user="me", n=2)
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "S"}], max_tokens=3)
        call(server, "POST", "/v1/completions", {"model": MODEL, "prompt": ""})
        call(server, "POST", "/v1/completions", b"{")
        until(lambda: len(exporter.get_finished_spans()) == 4)
    first, second, third, fourth = exporter.get_finished_spans()
    assert f"{first.context.trace_id:x}" == "a" * 32
    assert first.parent is not None
    assert f"{first.parent.span_id:x}" == "b" * 16
    assert (first.name, second.name) == ("POST /v1/completions", "POST /v1/chat/completions")
    values = dict(first.attributes or {})
    assert values["gen_ai.request.model"] == MODEL
    assert values["gen_ai.usage.output_tokens"] <= 16  # type: ignore[operator]
    assert values["mtad.block_efficiency"] >= 1  # type: ignore[operator]
    assert first.status.is_ok
    assert third.parent is None
    assert not third.status.is_ok
    assert "prompt" in (third.status.description or "")
    assert "not JSON" in (fourth.status.description or "")


def test_a_client_that_leaves_is_in_the_trace(plain: LLM, exporter: InMemorySpanExporter) -> None:
    exporter.clear()
    with gated(own(plain)) as (server, gate):
        asked = {"model": MODEL, "prompt": "S", "max_tokens": 150, "extra_body": {"ignore_eos": True}}
        stream = server.client.completions.create(stream=True, **asked)
        gate.let(1)
        next(stream)
        until(lambda: gate.holds)
        stream.close()
        until(lambda: server.leaving == 1)
        gate.open()
        until(lambda: len(exporter.get_finished_spans()) == 1)
    assert exporter.get_finished_spans()[0].status.description == "the client went away"


def test_the_documentation_names_every_metric(server: LiveServer) -> None:
    server.client.completions.create(model=MODEL, prompt="S", max_tokens=2)
    described = (DASHBOARD.parent / "serving.md").read_text().partition("## Metrics")[2]
    named = set(re.findall(r"`(mtad_\w+)", described))
    exported = {re.sub(r"\{.*|_(bucket|sum|count)(\{.*)?$", "", name) for name in scrape(server)}
    assert named == {name for name in exported if name.startswith("mtad_")}
