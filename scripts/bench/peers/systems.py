"""A worker that runs one of `scripts.systems` in the toolkit's own environment.

Settings: system (`ours`, `huggingface` or `onnxruntime-genai`), threads, and what it needs beside; see below. Jobs:
`params` of ours, `assisted` of Hugging Face's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from engines.placement import versions
from mtad.params import DecodingParams
from runtime import LLM, RuntimeConfig
from runtime.config import use_torch
from scripts.bench.peers.protocol import Answer, Job, serve
from scripts.systems import GenAI, HuggingFace, InFlight, Prompt, System, load_checkpoint


def open_peer(settings: dict[str, Any]) -> tuple[dict[str, str], Answer]:
    use_torch()
    kind, threads = settings["system"], settings["threads"]
    systems: list[System]
    if kind == "ours":
        given = {name: settings[name] for name in ("provider", "compute", "rows")}
        systems = [InFlight(kind, LLM(settings["pair"], RuntimeConfig(threads=threads, prefix_tokens=0, **given)))]
        found = versions("mtad", "onnxruntime-gpu", "onnxruntime", "openvino")
    elif kind == "huggingface":
        target, auxiliary = (load_checkpoint(Path(settings[name])) for name in ("target", "auxiliary"))
        for model in (target, auxiliary):
            model.to(getattr(torch, settings["dtype"]))
        systems = [HuggingFace(target, None, threads), HuggingFace(target, auxiliary, threads)]
        found = versions("torch", "transformers")
    else:
        genai = GenAI(threads=threads, model=Path(settings["model"]))
        systems, found = [genai], {kind: genai.version}

    def answer(job: Job) -> list[tuple[int, list[int]]]:
        params = {name: job[name] for name in ("temperature", "top_k", "top_p")} | job.get("params", {})
        torch.manual_seed(job["seed"])
        first = 1000 * job["seed"]  # numbers are the requests' seeds
        prompts = [Prompt(first + number, tuple(ids)) for number, ids in enumerate(job["prompts"])]
        used = DecodingParams.from_dict({**params, "max_tokens": job["tokens"], "ignore_eos": True})
        system = systems[1 if job.get("assisted") else 0]
        return [(one.prompt - first, one.tokens) for one in system.run(prompts, job["in_flight"], used).finished]

    return found, answer


if __name__ == "__main__":
    serve(open_peer)
