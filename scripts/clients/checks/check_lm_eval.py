"""lm-eval-harness, `local-completions`: log-likelihoods of a small task of ours are those of the checkpoint itself."""

from __future__ import annotations

import json
from pathlib import Path

from scripts.clients.checks.report import MODEL, TOKENIZER, URL, WORK, check, command

EXPECTED = json.loads(Path(WORK, "expected.json").read_text())
"""(context, continuation, log-likelihood, whether it is the greedy one), by the checkpoint in PyTorch."""


@check(f"{len(EXPECTED)} log-likelihoods within 1e-3 of the checkpoint's own")
def _() -> None:
    known = f"model={MODEL},base_url={URL}/v1/completions,tokenizer={TOKENIZER},tokenizer_backend=huggingface"
    command(
        *("lm_eval", "run", "--model", "local-completions", "--model_args", f"{known},num_concurrent=4,max_length=512"),
        *("--tasks", "mtad_likelihoods", "--include_path", WORK, "--log_samples", "--output_path", f"{WORK}/lm-eval"),
    )
    found = next(Path(WORK, "lm-eval").rglob("samples_mtad_likelihoods_*.jsonl"))
    samples = [json.loads(line) for line in found.read_text().splitlines()]
    assert len(samples) == len(EXPECTED)
    for sample in samples:
        value, greedy = sample["filtered_resps"][0]
        _, _, wanted, likeliest = EXPECTED[sample["doc_id"]]
        assert abs(float(value) - wanted) < 1e-3, (value, wanted)
        assert str(greedy) == str(likeliest), sample
