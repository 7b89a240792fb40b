"""A worker that runs OpenVINO GenAI, in the environment that scripts/baselines.sh makes for it.

Settings: target, draft (folders of converted checkpoints; without a draft, plain), precision (`f32`; without one, what
the library chooses: on a CPU with bfloat16 instructions, bfloat16, and a cache of 8-bit integers), rows, threads.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai  # type: ignore[import-not-found, unused-ignore]

from scripts.bench.peers.protocol import Answer, Job, serve


def open_peer(settings: dict[str, Any]) -> tuple[dict[str, str], Answer]:
    options: dict[str, Any] = {"INFERENCE_NUM_THREADS": settings["threads"]}
    if settings["precision"]:
        options |= {"INFERENCE_PRECISION_HINT": settings["precision"], "KV_CACHE_PRECISION": settings["precision"]}
    draft = {"draft_model": genai.draft_model(settings["draft"], "CPU", **options)} if settings["draft"] else {}
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 1  # GiB
    scheduler.enable_prefix_caching = False
    scheduler.max_num_seqs = settings["rows"]
    pipeline = genai.ContinuousBatchingPipeline(settings["target"], scheduler, "CPU", {**options, **draft})
    ids = itertools.count()

    def config(job: Job, number: int) -> Any:
        own = genai.GenerationConfig()
        own.max_new_tokens, own.ignore_eos = job["tokens"], True
        if job["top_k"] > 1:  # with a draft model, sampling from one token is not greedy there: its rule is not exact
            own.do_sample, own.rng_seed = True, job["seed"] + number
            own.temperature, own.top_k, own.top_p = job["temperature"], job["top_k"], job["top_p"]
        if draft:
            own.num_assistant_tokens = job["draft_len"]
        return own

    def answer(job: Job) -> list[tuple[int, list[int]]]:
        waiting, running, texts = list(enumerate(job["prompts"]))[::-1], dict[int, Any](), list[tuple[int, list[int]]]()
        while waiting or running:
            while waiting and len(running) < job["in_flight"]:
                number, prompt = waiting.pop()
                tensor = ov.Tensor(np.array([prompt], dtype=np.int64))
                running[number] = pipeline.add_request(next(ids), tensor, config(job, number))
            pipeline.step()
            for number, handle in list(running.items()):
                if handle.get_status() == genai.GenerationStatus.FINISHED:
                    texts.append((number, list(handle.read_all()[0].generated_ids)))
                    del running[number]
        return texts

    return {"openvino-genai": genai.__version__}, answer


if __name__ == "__main__":
    serve(open_peer)
