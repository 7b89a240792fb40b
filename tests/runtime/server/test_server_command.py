"""`mtad serve` as a process: it serves the real pair, drains on SIGTERM, and says in one line what is wrong."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import APIStatusError, OpenAI

from mtad import LLM, DecodingParams
from mtad.errors import InvalidInput
from runtime.server.uvicorn_server import bind
from tests.support.held import Hold
from tests.support.live_server import Process
from tests.support.waiting import PATIENCE, until

PROMPT = "def largest(values):\n"


@pytest.fixture
def start() -> Iterator[Callable[..., Process]]:
    """Starts servers, and ends them."""
    started: list[Process] = []

    def one(*arguments: str, **environment: str) -> Process:
        started.append(Process(*arguments, **environment))
        return started[-1]

    yield one
    for running in started:
        running.process.kill()
        running.process.wait(10)


def test_the_real_pair_is_served_and_sigterm_drains(
    demo: LLM, demo_pair: Path, start: Callable[..., Process], tmp_path: Path
) -> None:
    template, hold = tmp_path / "chat.jinja", Hold(tmp_path / "hold")
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    server = start(
        *(str(demo_pair), "--chat-template", str(template), "--rows", "4", "--model", "demo"),
        *("--provider", "cpu", "--drain-seconds", str(PATIENCE)),
        MTAD_API_KEY="secret",
        **hold.environment,
    )
    client = OpenAI(base_url=f"{server.url()}/v1", api_key="secret", max_retries=0, timeout=PATIENCE)
    assert "memory: weights" in server.log
    assert [model.id for model in client.models.list()] == ["demo"]
    expected = demo.generate(PROMPT, DecodingParams.from_dict({"seed": 7, "max_tokens": 40}, demo.pair.defaults))[0]
    answer = client.completions.create(model="demo", prompt=PROMPT, seed=7, max_tokens=40)
    assert answer.choices[0].text == expected.text, "the pair's tuned defaults hold where the request says nothing"
    chat = client.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": PROMPT}], seed=7, max_tokens=40
    )
    assert chat.choices[0].message.content == expected.text

    extra: Any = {"ignore_eos": True, "method": "sample"}
    with hold(4 * PATIENCE):
        stream = client.completions.create(model="demo", prompt=PROMPT, max_tokens=8, stream=True, extra_body=extra)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: "draining" in server.log)
        with pytest.raises(APIStatusError) as caught:
            client.completions.create(model="demo", prompt=PROMPT)
        assert caught.value.status_code == 503
    *_, last = stream
    assert last.choices[0].finish_reason == "length"
    client.close()
    assert server.process.wait(PATIENCE) == 0, server.log
    assert "Traceback" not in server.log


def test_a_port_in_use_is_refused_before_the_engines_are_opened() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InvalidInput, match=f"127.0.0.1:{port}.*in use"):
            bind("127.0.0.1", port)
    with bind("127.0.0.1", 0) as bound:
        assert bound.getsockname()[1] > 0
