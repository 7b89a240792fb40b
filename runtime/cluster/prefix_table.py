"""Which replica has seen the beginning of a prompt, so that its prefix cache is used. No Ray."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Collection, Sequence
from hashlib import blake2b
from typing import Any

from runtime.server.bodies import read_object

BLOCK = 256
"""Characters; prompts that share less are not told apart. The engine's own cache has blocks of 64 tokens."""


def prefix_keys(body: bytes, key: str = "") -> list[bytes]:
    """Keys of a request's prompt: one per block of its first prompt's text, each standing for all the text up to there.

    What is not a request gives none; whether it is one, the replica says.

    Args:
        body: of the request, as JSON.
        key: of the client; with the request's `cache_salt`, it decides whose kept prompts are its own.
    """
    values = read_object(body)
    text = _text(values)
    salt = json.dumps([key, values.get("cache_salt")])
    keys, running = [], blake2b(salt.encode("utf-8", errors="surrogatepass"), digest_size=8)
    for end in range(BLOCK, len(text) + 1, BLOCK):
        running.update(text[end - BLOCK : end].encode("utf-8", errors="surrogatepass"))
        keys.append(running.copy().digest())
    return keys


def _text(values: dict[str, Any]) -> str:
    messages, prompt = values.get("messages"), values.get("prompt")
    if isinstance(messages, list):
        return json.dumps(messages, ensure_ascii=False)[1:-1]  # a longer chat begins like a shorter one
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    return prompt if isinstance(prompt, str) else json.dumps(prompt) if prompt else ""


class PrefixTable:
    """Least recently used keys of prompts, with the replica that had each of them last.

    Args:
        size: keys kept.
    """

    def __init__(self, size: int = 65536) -> None:
        self._size = size
        self._replicas: OrderedDict[bytes, str] = OrderedDict()

    def note(self, keys: Sequence[bytes], replica: str) -> None:
        """Remember that a prompt went to a replica."""
        for key in keys:
            self._replicas[key] = replica
            self._replicas.move_to_end(key)
        while len(self._replicas) > self._size:
            self._replicas.popitem(last=False)

    def holder(self, keys: Sequence[bytes], replicas: Collection[str]) -> str | None:
        """Of these replicas, the one that had the longest beginning of a prompt; None if none had any of it."""
        return next((found for key in reversed(keys) if (found := self._replicas.get(key)) in replicas), None)
