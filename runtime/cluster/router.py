"""Ray Serve's request router for prompts: to the replica that has the prefix, unless it is much busier than another."""

from __future__ import annotations

import json
import random
from collections import OrderedDict
from hashlib import blake2b
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from runtime.server.bodies import read_object

IMBALANCE = 4
"""Requests that the replica with a prompt's prefix may have more than the least busy one."""
CHUNK_CHARACTERS = 256
"""Characters per key; shorter shared prefixes are ignored. The engine's own cache has pages of 64 tokens."""
KEPT_KEYS = 65536
"""Latest keys whose replica is known."""


def prefix_keys(body: bytes, key: str = "") -> list[bytes]:
    """Keys of a request's prompt: one per chunk of its first prompt's text, each standing for all the text up to there.

    What is not a request gives none; whether it is one, the replica says.

    Args:
        key: of the client. Prompts share keys and values only if this and the request's `cache_salt` are the same.
    """
    values = read_object(body)
    text = _text(values)
    salt = json.dumps([key, values.get("cache_salt")])
    keys, running = [], blake2b(salt.encode("utf-8", errors="surrogatepass"), digest_size=8)
    for end in range(CHUNK_CHARACTERS, len(text) + 1, CHUNK_CHARACTERS):
        running.update(text[end - CHUNK_CHARACTERS : end].encode("utf-8", errors="surrogatepass"))
        keys.append(running.copy().digest())
    return keys


def _text(values: dict[str, Any]) -> str:
    messages, prompt = values.get("messages"), values.get("prompt")
    if isinstance(messages, list):
        return json.dumps(messages, ensure_ascii=False)[1:-1]  # a longer chat begins like a shorter one
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    return prompt if isinstance(prompt, str) else json.dumps(prompt) if prompt else ""


class PrefixRouter(RequestRouter):  # type: ignore[misc] # Ray comes without types
    """Prefix-aware routing with a bound on imbalance; without a known prefix, the less busy of two drawn replicas.

    Keys come with the request as its argument `keys`; the replica that had each of the latest ones last is known. Queue
    lengths are what Ray Serve keeps anyway; who was asked nothing for ten seconds counts as idle.
    """

    queue_len_response_deadline_s = 1.0  # Ray Serve's tenth of a second is short for a replica that is busy

    def initialize_state(self) -> None:
        self._holders: OrderedDict[bytes, str] = OrderedDict()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Ranks of replicas; Ray Serve takes the least busy of the first rank that accepts the request.

        It asks again at once where all are full, unless it is told to wait (`should_backoff`).
        """
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        two = random.sample(candidate_replicas, min(2, len(candidate_replicas)))
        by_id = {one.replica_id.unique_id: one for one in candidate_replicas}
        known = map(self._holders.get, reversed(_keys(pending_request)))
        holder = next((one for one in known if one in by_id), None)  # of the longest beginning of the prompt
        if holder is None:
            return [two]
        busy = {id: self.replica_queue_len_cache.get(one.replica_id) or 0 for id, one in by_id.items()}
        if busy[holder] > min(busy.values()) + IMBALANCE:
            return [two]
        return [[by_id[holder]], [one for one in two if one is not by_id[holder]]]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        for key in _keys(pending_request):
            self._holders[key] = replica_id.unique_id
            self._holders.move_to_end(key)
        while len(self._holders) > KEPT_KEYS:
            self._holders.popitem(last=False)


def _keys(request: PendingRequest | None) -> list[bytes]:
    return request.kwargs.get("keys", []) if request is not None else []
