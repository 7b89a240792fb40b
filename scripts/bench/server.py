"""The HTTP server under load: throughput and latency by requests in flight, as guidellm measures them.

`mtad serve` runs in a process of its own, as it is started by hand, and guidellm, in an environment of its own, streams
completions of the demo's prompts. Both take the same cores.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scripts.clients.served import MODEL, environment, served
from scripts.demo import dataset
from scripts.results import Rows

TOKENS = 64  # of an answer at most; the prompts are source code, whose text rarely ends before
LATENCIES = {
    "time_to_first_token_ms": "first token, ms",
    "inter_token_latency_ms": "per token, ms",
    "request_latency": "whole answer, s",
}


def run(options: Namespace) -> dict[str, Any]:
    """Drive a server at each load in turn, for some seconds each."""
    loads, seconds = ([1, 4], 3.0) if options.quick else (options.loads, options.seconds)
    python, examples = environment("guidellm"), dataset.load("test", "code")
    with tempfile.TemporaryDirectory() as work, served(options.pair, "--rows", str(max(8, *loads))) as server:
        prompts, report = Path(work, "prompts.jsonl"), Path(work, "report.json")
        lines = [json.dumps({"prompt": one.prompt, "output_tokens_count": TOKENS}) for one in examples]
        prompts.write_text("\n".join(lines), encoding="utf-8")
        target = f"target={server.url},model={MODEL},request_format=/v1/completions"
        command = [
            *(str(python), "-m", "guidellm", "run", "--backend", f"kind=openai_http,{target}"),
            *("--tokenizer", f"kind=huggingface_auto,model={options.pair.absolute() / 'target'}"),
            *("--data", f"kind=json_file,path={prompts}", "--output", f"kind=json,path={report}"),
            *("--profile", "kind=concurrent", "--override", "profile.streams", ",".join(map(str, loads))),
            *("--constraint", f"kind=max_duration,seconds={seconds}"),
        ]
        subprocess.run(command, cwd=work, env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": work}, check=True)
        benchmarks = json.loads(report.read_text(encoding="utf-8"))["benchmarks"]
    found = {}
    for load, benchmark in zip(loads, benchmarks, strict=True):
        metrics, totals = benchmark["metrics"], benchmark["metrics"]["request_totals"]
        times = {name: metrics[name]["successful"]["percentiles"] for name in LATENCIES}
        rate = metrics["output_tokens_per_second"]["successful"]["mean"]
        found[load] = {"tokens_per_second": rate, "answers": totals["successful"], "errors": totals["errored"], **times}
    return {"seconds": seconds, "loads": found}


def tables(figures: Mapping[str, Any]) -> dict[str, Rows]:
    """Throughput, and latencies as median and 99th percentile, by load."""
    lines = [["in flight", "tokens/s", "answers", "errors", *LATENCIES.values()]]
    for load, one in figures["loads"].items():
        counts = [f"{one[name]:.0f}" for name in ("tokens_per_second", "answers", "errors")]
        lines.append([str(load), *counts, *(f"{one[name]['p50']:.1f} ({one[name]['p99']:.1f})" for name in LATENCIES)])
    return {"server": lines}
