"""A task for lm-eval-harness, and what its log-likelihoods are by the checkpoint itself, in PyTorch."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts.demo import dataset

COUNT = 24

TASK = """task: mtad_likelihoods
dataset_path: json
dataset_kwargs:
  data_files: {data}
test_split: train
output_type: loglikelihood
doc_to_text: "{{{{context}}}}"
doc_to_target: "{{{{continuation}}}}"
target_delimiter: ""
metric_list:
  - metric: perplexity
    aggregation: perplexity
    higher_is_better: false
"""


@torch.inference_mode()
def write_task(checkpoint: Path, folder: Path) -> None:
    """Write the task, its documents and `expected.json`: (context, continuation, log-likelihood, is greedy) of each.

    Args:
        checkpoint: of the model that is served.
        folder: to write to.
    """
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    found = []
    for example in dataset.load("test", "sql")[:COUNT]:
        context, whole = example.prompt, example.prompt + example.answer
        before = len(tokenizer(context, add_special_tokens=False).input_ids)
        ids = torch.tensor(tokenizer(whole, add_special_tokens=False).input_ids)
        scores = model(ids[None]).logits[0, before - 1 : -1].log_softmax(-1)
        likelihood = float(scores.gather(1, ids[before:, None]).sum())
        found.append((context, example.answer, likelihood, bool((scores.argmax(-1) == ids[before:]).all())))
    documents = [{"context": context, "continuation": continuation} for context, continuation, _, _ in found]
    data = folder / "documents.jsonl"
    data.write_text("".join(json.dumps(one) + "\n" for one in documents), encoding="utf-8")
    (folder / "expected.json").write_text(json.dumps(found), encoding="utf-8")
    (folder / "mtad_likelihoods.yaml").write_text(TASK.format(data=data), encoding="utf-8")
