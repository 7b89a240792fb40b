"""A worker that runs Hugging Face's `generate` on left-padded batches; with an auxiliary, one prompt at a time.

The library's defaults for everything but sampling; its drafts follow its own schedule, which ends them where it is
unsure. Settings: dtype, torch's name of a type.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from engines.placement import versions
from scripts.bench.peers.protocol import Answer, Job, serve


def open_peer(settings: dict[str, Any]) -> tuple[dict[str, str], Answer]:
    torch.set_num_threads(settings["threads"])

    def load(role: str) -> Any:
        dtype, folder = getattr(torch, settings["dtype"]), Path(settings["checkpoints"], role)
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True).eval()

    target, assistant = load("target"), load("auxiliary") if settings["draft_len"] else None

    @torch.inference_mode()
    def answer(job: Job) -> list[tuple[int, list[int]]]:
        torch.manual_seed(job["seed"])
        texts = list[tuple[int, list[int]]]()
        sampling = {name: job[name] for name in ("temperature", "top_k", "top_p")} | {"do_sample": True}
        for at in range(0, len(job["prompts"]), job["in_flight"]):
            batch = list(map(torch.tensor, job["prompts"][at : at + job["in_flight"]]))
            ids = pad_sequence(batch, batch_first=True, padding_side="left")
            mask = pad_sequence(list(map(torch.ones_like, batch)), batch_first=True, padding_side="left")
            sampling |= {"assistant_model": assistant, "attention_mask": mask, "pad_token_id": 0}
            out = target.generate(ids, max_new_tokens=job["tokens"], min_new_tokens=job["tokens"], **sampling)
            texts += enumerate(out[:, ids.shape[1] :].tolist(), at)
        return texts

    return versions("torch", "transformers"), answer


if __name__ == "__main__":
    serve(open_peer)
