"""A worker that runs OpenVINO GenAI, in the environment that scripts/baselines.sh makes for it.

Settings: weights, optimum-cli's name of their format; precision of the computation and of the cache, empty for what the
library chooses: bfloat16 on a CPU with its instructions, and a cache of 8-bit integers. Jobs: draft_len.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai  # type: ignore[import-not-found, unused-ignore]

from scripts.bench.peers.protocol import ROLES, Answer, Job, made_once, serve

NGRAM = 3  # tokens of a suffix that is looked up at most, as in the library's samples


def convert(settings: dict[str, Any], folder: Path) -> None:
    """Write both models as optimum-intel makes them."""
    program = str(Path(sys.executable).with_name("optimum-cli"))
    what = ("--task", "text-generation-with-past", "--weight-format", settings["weights"])
    for role in ROLES:
        source = str(Path(settings["checkpoints"], role))
        subprocess.run([program, "export", "openvino", "--model", source, *what, str(folder / role)], check=True)


def open_peer(settings: dict[str, Any]) -> tuple[dict[str, str], Answer]:
    folder = made_once(Path(settings["folder"], f"openvino-{settings['weights']}"), lambda new: convert(settings, new))
    options: dict[str, Any] = {"INFERENCE_NUM_THREADS": settings["threads"]}
    if settings["precision"]:
        options |= {"INFERENCE_PRECISION_HINT": settings["precision"], "KV_CACHE_PRECISION": settings["precision"]}
    models = dict(options)
    if settings.get("lookup"):
        models["prompt_lookup"] = True
    elif settings["draft_len"]:
        models["draft_model"] = genai.draft_model(str(folder / "auxiliary"), "CPU", **options)
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 1  # GiB
    scheduler.enable_prefix_caching = False
    scheduler.max_num_seqs = settings["rows"]
    pipeline = genai.ContinuousBatchingPipeline(str(folder / "target"), scheduler, "CPU", models)
    ids = itertools.count()

    def answer(job: Job) -> list[tuple[int, list[int]]]:
        said = {"max_new_tokens": job["tokens"], "ignore_eos": True}
        if job["top_k"] > 1:  # with a draft model, sampling from one token is not greedy there: its rule is not exact
            said |= {name: job[name] for name in ("temperature", "top_k", "top_p")} | {"do_sample": True}
        if settings["draft_len"]:
            said["num_assistant_tokens"] = job["draft_len"]
            if settings.get("lookup"):
                said["max_ngram_size"] = NGRAM
        waiting, running, texts = list(enumerate(job["prompts"]))[::-1], dict[int, Any](), list[tuple[int, list[int]]]()
        while waiting or running:
            while waiting and len(running) < job["in_flight"]:
                number, prompt = waiting.pop()
                tensor = ov.Tensor(np.array([prompt], dtype=np.int64))
                config = genai.GenerationConfig(**said, rng_seed=job["seed"] + number)
                running[number] = pipeline.add_request(next(ids), tensor, config)
            pipeline.step()
            for number, handle in list(running.items()):
                if handle.get_status() == genai.GenerationStatus.FINISHED:
                    texts.append((number, list(handle.read_all()[0].generated_ids)))
                    del running[number]
        return texts

    return {"openvino-genai": genai.__version__}, answer


if __name__ == "__main__":
    serve(open_peer)
