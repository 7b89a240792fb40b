"""NVIDIA's aiperf: streamed completions of a fixed length, all answered, and what the drafts did as it reads it."""

from __future__ import annotations

import json
import os
from pathlib import Path

from scripts.clients.checks.report import MODEL, TOKENIZER, URL, WORK, check, command

REQUESTS, TOKENS = 32, 32
for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):  # with these, a tokenizer's folder is looked up on the hub
    os.environ.pop(name, None)


def profile(kind: str, folder: str) -> dict[str, dict[str, float]]:
    command(
        *("aiperf", "profile", "--model", MODEL, "--url", URL, "--endpoint-type", kind, "--streaming"),
        *("--tokenizer", TOKENIZER, "--concurrency", "4", "--request-count", str(REQUESTS)),
        *(
            "--isl",
            "64",
            "--osl",
            str(TOKENS),
            "--extra-inputs",
            "ignore_eos:true",
            "--extra-inputs",
            f"max_tokens:{TOKENS}",
        ),
        *("--artifact-dir", folder, "--ui", "none"),
    )
    found = next(Path(WORK, folder).rglob("profile_export_aiperf.json"))
    return dict(json.loads(found.read_text()))


@check(f"completions: {REQUESTS} streams of {TOKENS} tokens, 4 at a time")
def _() -> None:
    figures = profile("completions", "completions")
    assert figures["request_count"]["avg"] == REQUESTS, figures["request_count"]
    assert not figures.get("error_request_count", {}).get("avg"), figures


@check(f"chat: {REQUESTS} streams of {TOKENS} tokens, 4 at a time")
def _() -> None:
    figures = profile("chat", "chat")
    assert figures["request_count"]["avg"] == REQUESTS, figures["request_count"]
