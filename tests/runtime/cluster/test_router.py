"""Where a prompt goes: to the replica that keeps its beginning, unless that is gone or much busier."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from ray.serve._private.common import DeploymentID
from ray.serve._private.request_router.common import RequestRoutingContext
from ray.serve.request_router import ReplicaID

from runtime.cluster.router import CHUNK_CHARACTERS, PrefixRouter, prefix_keys


def test_keys_stand_for_all_the_text_up_to_them() -> None:
    long = "x" * (3 * CHUNK_CHARACTERS)
    keys = prefix_keys(json.dumps({"prompt": long}).encode())
    assert len(keys) == 3
    assert prefix_keys(json.dumps({"prompt": long + "y"}).encode()) == keys
    other = prefix_keys(json.dumps({"prompt": "y" + long[1:]}).encode())
    assert not set(keys) & set(other), "a later block alone says nothing"
    assert prefix_keys(json.dumps({"prompt": [long, "z"]}).encode()) == keys
    chat = [{"role": "user", "content": long}]
    more = [*chat, {"role": "assistant", "content": "z"}]
    first, second = (prefix_keys(json.dumps({"messages": one}).encode()) for one in (chat, more))
    assert second[: len(first)] == first != []
    assert prefix_keys(json.dumps({"prompt": [1] * 400}).encode())
    deep = b"[" * 100_000
    nothing = deep, b'{"prompt": ' + deep, b'{"messages": [' + b"{}," * 300_000 + b"{}]}"
    for body in (*nothing, b"", b"[", b"[1]", b"{}", b'{"prompt": ""}', b'{"prompt": {"a": 1}}', b"\xff"):
        assert prefix_keys(body) == [], "a body that is no request is left to a replica"


def test_the_longest_known_beginning_decides_and_the_oldest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.cluster.router.KEPT_KEYS", 4)
    names = [ReplicaID(name, DeploymentID("replica")) for name in "ab"]
    one, other = (SimpleNamespace(replica_id=name) for name in names)
    router = PrefixRouter.__new__(PrefixRouter)
    router.initialize_state()
    router._replica_queue_len_cache = {}

    def request(*keys: bytes) -> Any:
        return SimpleNamespace(kwargs={"keys": [*keys]}, routing_context=RequestRoutingContext())

    def first(among: list[Any], *keys: bytes) -> list[Any]:
        return list(asyncio.run(router.choose_replicas(among, request(*keys)))[0])

    router.on_request_routed(request(b"1", b"2"), names[0], None)
    router.on_request_routed(request(b"1", b"3"), names[1], None)
    assert first([one, other], b"1", b"2") == [one]
    assert first([other], b"1", b"2") == [other], "who is gone is not chosen"
    assert len(first([one, other], b"9")) == 2
    router._replica_queue_len_cache = {names[0]: 9}
    assert len(first([one, other], b"1", b"2")) == 2, "nor who is much busier"
    router._replica_queue_len_cache = {}
    router.on_request_routed(request(b"4", b"5", b"6"), names[1], None)
    assert len(first([one, other], b"2")) == 2, "the oldest keys make room"


def test_replicas_that_are_full_are_asked_again_after_a_pause() -> None:
    one = SimpleNamespace(replica_id=ReplicaID("a", DeploymentID("replica")))
    router, pauses = PrefixRouter.__new__(PrefixRouter), list[int]()
    router.initialize_state()
    router._replica_queue_len_cache, router._replicas, router._replicas_list = {}, {one.replica_id: one}, [one]
    router.num_routing_tasks_in_backoff, router.num_routing_tasks_in_backoff_gauge = 0, Mock()
    request: Any = SimpleNamespace(kwargs={"keys": []}, routing_context=RequestRoutingContext())

    async def pause(attempt: int) -> None:
        pauses.append(attempt)

    router._backoff = pause

    async def ask(times: int) -> None:
        asked = router._choose_replicas_with_backoff(request)
        for _ in range(times):
            assert await anext(asked) == [one]
        await asked.aclose()

    asyncio.run(ask(5))
    assert pauses == [0, 1, 2], "all but the first two times"
