"""A worker that runs llama.cpp's server, as the package xllamacpp has it, in the environment of scripts/baselines.sh.

Settings: target, draft (GGUF files; without a draft, plain), kv_cache (ggml's name of the type of keys and values),
rows, capacity, draft_len, threads.
"""

from __future__ import annotations

import json
import socket
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import Any

import xllamacpp  # type: ignore[import-not-found, unused-ignore]

from scripts.bench.peers.protocol import Answer, Job, serve


def open_peer(settings: dict[str, Any]) -> tuple[dict[str, str], Answer]:
    options = xllamacpp.CommonParams()
    for caches in (options, options.speculative.draft):
        caches.cache_type_k = caches.cache_type_v = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{settings['kv_cache']}")
    options.model.path = settings["target"]
    options.n_parallel, options.n_ctx = settings["rows"], settings["rows"] * settings["capacity"]
    options.cpuparams.n_threads = options.cpuparams_batch.n_threads = settings["threads"]
    options.cache_prompt, options.cache_ram_mib = False, 0
    if settings["draft"]:
        draft = options.speculative.draft
        draft.mparams.path, draft.n_max, draft.n_min, draft.p_min = settings["draft"], settings["draft_len"], 0, 0.0
        draft.cpuparams.n_threads = draft.cpuparams_batch.n_threads = settings["threads"]
        options.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        options.port = free.getsockname()[1]
    server = xllamacpp.Server(options)

    def one(job: Job, number: int) -> tuple[int, list[int]]:
        body = {
            "prompt": job["prompts"][number],
            "n_predict": job["tokens"],
            "samplers": ["temperature", "top_k", "top_p"],  # in our order, and nothing else
            "seed": job["seed"] + number,
            "ignore_eos": True,
            "cache_prompt": False,
            "return_tokens": True,
            **{name: job[name] for name in ("temperature", "top_k", "top_p")},
        }
        address = f"{server.listening_address}/completion"  # not OpenAI's form: that one returns no token ids
        request = urllib.request.Request(address, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as reply:
            return number, json.load(reply)["tokens"]

    def answer(job: Job) -> list[tuple[int, list[int]]]:
        with ThreadPoolExecutor(job["in_flight"]) as pool:
            return list(pool.map(lambda number: one(job, number), range(len(job["prompts"]))))

    return {"xllamacpp": version("xllamacpp")}, answer


if __name__ == "__main__":
    serve(open_peer)
