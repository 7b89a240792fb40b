"""guidellm: streamed completions, 4 at a time; all succeed."""

from __future__ import annotations

import json
from pathlib import Path

from scripts.clients.checks.report import MODEL, TOKENIZER, URL, WORK, check, command

REQUESTS = 16


@check(f"{REQUESTS} streams of 32 tokens, 4 at a time")
def _() -> None:
    command(
        *(
            "guidellm",
            "run",
            "--backend",
            f"kind=openai_http,target={URL},model={MODEL},request_format=/v1/completions",
        ),
        *("--tokenizer", f"kind=huggingface_auto,model={TOKENIZER}"),
        *("--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=32"),
        *("--profile", "kind=concurrent,streams=4", "--constraint", f"kind=max_requests,count={REQUESTS}"),
        *("--output", f"kind=json,path={WORK}/guidellm.json", "--disable-progress"),
    )
    report = json.loads(Path(WORK, "guidellm.json").read_text())
    totals = report["benchmarks"][0]["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (REQUESTS, 0), totals
