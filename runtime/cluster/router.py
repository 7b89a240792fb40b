"""Ray Serve's request router for prompts: to the replica that has the prefix, unless it is much busier than another."""

from __future__ import annotations

import random
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from runtime.cluster.prefix_table import PrefixTable


class PrefixRouter(RequestRouter):  # type: ignore[misc] # Ray comes without types
    """Prefix-aware routing with a bound on imbalance; without a known prefix, the less busy of two drawn replicas.

    Keys come with the request as its argument `keys`. Queue lengths are what Ray Serve keeps anyway.
    """

    def initialize_state(self, imbalance: int = 4) -> None:
        """Take the options of `RequestRouterConfig.request_router_kwargs`."""
        self._imbalance = imbalance
        self._table = PrefixTable()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Ranks of replicas; Ray Serve takes the least busy of the first rank that accepts the request."""
        two = random.sample(candidate_replicas, min(2, len(candidate_replicas)))
        by_id = {one.replica_id.unique_id: one for one in candidate_replicas}
        holder = self._table.holder(_keys(pending_request), by_id)
        if holder is None:
            return [two]
        busy = {id: self.replica_queue_len_cache.get(one.replica_id) or 0 for id, one in by_id.items()}
        if busy[holder] > min(busy.values()) + self._imbalance:
            return [two]
        return [[by_id[holder]], [one for id, one in by_id.items() if id != holder]]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        self._table.note(_keys(pending_request), replica_id.unique_id)


def _keys(request: PendingRequest | None) -> list[bytes]:
    return request.kwargs.get("keys", []) if request is not None else []
