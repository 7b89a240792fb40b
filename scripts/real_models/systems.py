"""What is compared: this toolkit's methods, and other libraries, each as a server with OpenAI's API."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.paths import DEMO


@dataclass(frozen=True)
class Pair:
    """Two checkpoints: hub ids or folders.

    Attributes:
        eagle: hub id of the target's EAGLE-3 head, for the peers that have one; empty without.
        chat: whether questions are messages of a chat.
        fields: what requests to every system say besides.
    """

    target: str
    auxiliary: str
    eagle: str = ""
    chat: bool = True
    fields: Mapping[str, Any] = field(default_factory=dict)


PAIRS = {
    "demo": Pair(str(DEMO / "pair" / "target"), str(DEMO / "pair" / "auxiliary"), chat=False),
    "qwen3": Pair(
        "Qwen/Qwen3-8B",
        "Qwen/Qwen3-0.6B",
        "RedHatAI/Qwen3-8B-speculator.eagle3",
        fields={"chat_template_kwargs": {"enable_thinking": False}},  # vLLM leaves thoughts in the answer, we do not
    ),
    "llama3": Pair(
        "meta-llama/Llama-3.1-8B-Instruct",
        "meta-llama/Llama-3.2-1B-Instruct",
        "RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3",
    ),
    "coder": Pair("Qwen/Qwen2.5-Coder-14B-Instruct", "Qwen/Qwen2.5-Coder-0.5B-Instruct"),
}
"""Pairs, by name."""


@dataclass(frozen=True)
class System:
    """One line of the comparison.

    Attributes:
        command: of its server, to which the port is given; those of equal commands share one server.
        fields: what its requests say besides.
    """

    name: str
    command: tuple[str, ...]
    fields: Mapping[str, Any] = field(default_factory=dict)


def ours(folder: Path, rows: int, device: str) -> list[System]:
    """This toolkit's methods on a pair folder; `block` is the default, with drafts that follow the load."""
    run = (sys.executable, "-m", "runtime.commands.main", "serve", str(folder), "--model", "model")
    command = (*run, "--rows", str(rows), "--device", device, "--log-level", "warning", "--port")
    methods: dict[str, dict[str, Any]] = {
        "sample": {},
        "block": {},
        "budget": {"divergence": 0.1},
        "mtad": {"accept_threshold": 0.5},
    }
    return [System(name, command, {"method": name, **values}) for name, values in methods.items()]


def peers(pair: Pair) -> list[System]:
    """Servers of vLLM 0.20.0, in an environment of its own: alone, with the auxiliary, and with the EAGLE-3 head."""
    vllm = ("uvx", "--from", "vllm==0.20.0", "vllm", "serve", pair.target)
    run = (*vllm, "--served-model-name", "model", "--max-model-len", "4096")
    drafts = {"vllm": None, "vllm, the auxiliary drafts": {"model": pair.auxiliary, "num_speculative_tokens": 5}}
    if pair.eagle:
        drafts["vllm, EAGLE-3"] = {"model": pair.eagle, "num_speculative_tokens": 3, "method": "eagle3"}
    found = []
    for name, speculative in drafts.items():
        own = ("--speculative-config", json.dumps(speculative)) if speculative else ()
        found.append(System(name, (*run, *own, "--port")))
    return found
