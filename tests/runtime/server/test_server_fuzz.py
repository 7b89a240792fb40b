"""Requests made up from the OpenAPI document, good and bad: never a 500, and the server lives."""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error

from tests.support.live_server import MODEL, LiveServer, ask
from tests.support.waiting import PATIENCE, until

EXAMPLES = 30
"""Requests for each operation that takes a body."""


@pytest.mark.slow
@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: str(mode.value))
def test_no_request_breaks_the_server(mode: GenerationMode, server: LiveServer) -> None:
    statuses: dict[str, Counter[int]] = {}
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    for found in schema.get_all_operations():
        operation = cast("Any", found).ok()
        if mode is GenerationMode.NEGATIVE and not operation.body:
            continue  # nothing in it can be wrong
        seen = statuses[operation.label] = Counter()

        @settings(
            max_examples=EXAMPLES if operation.method == "post" else 3,
            deadline=None,
            database=None,
            derandomize=True,
            phases=(Phase.explicit, Phase.generate),
            suppress_health_check=list(HealthCheck),
        )
        @given(operation.as_strategy(generation_mode=mode), st.integers(0, 9), st.just(seen))
        def fuzz(case: Any, chance: int, seen: Counter[int]) -> None:
            if isinstance(case.body, dict) and chance:  # most made-up names are not the model's: go further than that
                case.body["model"] = MODEL
                if isinstance(case.body.get("max_tokens"), int):
                    case.body["max_tokens"] = min(case.body["max_tokens"], 8)
            response = case.call(timeout=PATIENCE)
            case.validate_response(response, checks=[not_a_server_error])
            seen[response.status_code] += 1

        fuzz()
    assert len(statuses) == (14 if mode is GenerationMode.POSITIVE else 5)
    for label in ("POST /v1/completions", "POST /v1/chat/completions"):
        assert statuses[label].total() >= EXAMPLES
        assert statuses[label][400] > 0
    if mode is GenerationMode.POSITIVE:
        assert statuses["POST /v1/completions"][200] > 0, "some made-up requests are answered"
    until(lambda: server.statistics["running"] == 0)
    assert ask(server, max_tokens=2)[0] == 200, "still serving"
