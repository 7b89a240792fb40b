"""A worker that runs onnxruntime-genai's `Generator` on right-padded batches; with a draft model, one prompt at a time.

Its continuous batching (`Engine`) needs paged attention, which its builder makes for GPUs only; on a CPU an `Engine`
runs static batches of at most 4, so the batched `Generator` is the faster one. Right padding is what its models want:
positions are counted from the left, and left-padded prompts give wrong text. Settings: builder, its precision's name.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime_genai as genai  # type: ignore[import-not-found, unused-ignore]

from scripts.bench.peers.protocol import ROLES, Answer, Job, made_once, serve


def convert(settings: dict[str, Any], folder: Path) -> None:
    """Write both models as its builder makes them; `folder` itself is the target with its draft model."""
    program = (sys.executable, "-m", "onnxruntime_genai.models.builder", "-p", settings["builder"], "-e", "cpu")
    configs = []
    for role in ROLES:
        source = str(Path(settings["checkpoints"], role))
        subprocess.run([*program, "-i", source, "-o", str(folder / role), "-c", str(folder / "cache")], check=True)
        configs.append(json.loads((folder / role / "genai_config.json").read_text()))
        configs[-1]["model"]["decoder"]["filename"] = f"{role}/model.onnx"
    both, draft = configs
    both["model"]["draft"] = draft["model"]["decoder"]
    both["model"]["draft"]["session_options"]["intra_op_num_threads"] = 1  # as our auxiliary's
    both["speculative"] = {"max_draft_tokens": settings["draft_len"]}
    (folder / "genai_config.json").write_text(json.dumps(both, indent=2), encoding="utf-8")
    for file in (folder / "target").glob("*token*"):
        shutil.copy(file, folder)


def open_peer(settings: dict[str, Any]) -> tuple[dict[str, str], Answer]:
    name = f"genai-{settings['builder']}-{settings['draft_len']}"
    folder = made_once(Path(settings["folder"], name), lambda new: convert(settings, new))
    config = genai.Config(str(folder if settings["draft_len"] else folder / "target"))
    config.clear_providers()
    session = {"intra_op_num_threads": settings["threads"]}
    config.overlay(json.dumps({"model": {"decoder": {"session_options": session}}}))
    model = genai.Model(config)

    def answer(job: Job) -> list[tuple[int, list[int]]]:
        texts = list[tuple[int, list[int]]]()
        sampling = {name: job[name] for name in ("temperature", "top_k", "top_p")} | {"do_sample": True}
        for at in range(0, len(job["prompts"]), job["in_flight"]):
            batch = job["prompts"][at : at + job["in_flight"]]
            start = max(map(len, batch))
            options, length = genai.GeneratorParams(model), start + job["tokens"]
            sampling |= {"max_length": length, "min_length": length, "random_seed": 1000 * job["seed"] + at}
            options.set_search_options(batch_size=len(batch), **sampling)
            generator = genai.Generator(model, options)
            generator.append_tokens(np.array([one + [0] * (start - len(one)) for one in batch], dtype=np.int32))
            while not generator.is_done():
                generator.generate_next_token()
            texts += [(at + row, generator.get_sequence(row)[start:].tolist()) for row in range(len(batch))]
        return texts

    return {"onnxruntime-genai": f"{genai.__version__} on {Path(os.environ['ORT_LIB_PATH']).name}"}, answer


if __name__ == "__main__":
    serve(open_peer)
