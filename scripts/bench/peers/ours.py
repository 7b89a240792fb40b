"""A worker that runs this toolkit. Settings: provider, compute. Jobs: params, those of decoding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engines.placement import versions
from mtad import LLM, RuntimeConfig
from mtad.params import DecodingParams
from runtime.config import use_torch
from runtime.scheduler.request import Result
from scripts.bench.peers.protocol import Answer, Job, serve


def open_peer(settings: dict[str, Any]) -> tuple[dict[str, str], Answer]:
    use_torch()
    given = {name: settings[name] for name in ("provider", "compute", "threads", "rows")}
    llm = LLM(settings["pair"], RuntimeConfig(prefix_tokens=0, **given))

    def answer(job: Job) -> list[tuple[int, list[int]]]:
        sampling = {name: job[name] for name in ("temperature", "top_k", "top_p")} | job["params"]
        params = DecodingParams.from_dict({**sampling, "max_tokens": job["tokens"], "ignore_eos": True})
        waiting, running, texts = list(enumerate(job["prompts"]))[::-1], dict[int, int](), list[tuple[int, list[int]]]()
        while waiting or running:
            while waiting and len(running) < job["in_flight"]:
                number, prompt = waiting.pop()
                seed = None if params.automatic else 1000 * job["seed"] + number  # with one, no load is followed
                request = llm.add(prompt, replace(params, seed=seed))
                running[request.id] = number
            for request in llm.step():
                texts.append((running.pop(request.id), Result.of(request).token_ids))
        return texts

    return versions("mtad", "onnxruntime-gpu", "onnxruntime", "openvino"), answer


if __name__ == "__main__":
    serve(open_peer)
