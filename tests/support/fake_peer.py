"""A worker of the comparison that decodes nothing, and may misbehave: its tokens count up from a prompt's last one."""

from __future__ import annotations

import os
import time
from typing import Any

from scripts.bench.peers.protocol import Answer, Job, serve


def open_peer(settings: dict[str, Any]) -> tuple[dict[str, str], Answer]:
    manner = settings["manner"]
    if manner == "cannot open":
        raise RuntimeError("no such model")
    print("a library's banner")

    def answer(job: Job) -> list[tuple[int, list[int]]]:
        if manner == "dies":
            os._exit(7)
        if manner == "hangs":
            time.sleep(60)
        texts = [(n, [ids[-1] + 1 + at for at in range(job["tokens"])]) for n, ids in enumerate(job["prompts"])]
        if manner == "too few":
            texts[-1][1].pop()
        if manner == "answers one twice":
            texts[-1] = texts[0]
        return texts[::-1] if manner == "reorders" else texts

    return {"fake": "1.0"}, answer


if __name__ == "__main__":
    serve(open_peer)
