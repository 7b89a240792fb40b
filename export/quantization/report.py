"""What quantising a pair cost and gained, measured on text against the same pair in float32: `quantization.json`."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from engines.base import Engine, Step
from engines.folder import open_engine
from engines.placement import Placement
from engines.prompts import read_prompts
from mtad.errors import InvalidInput, refused_as

REPORT = "quantization.json"
TOKENS = 4096
"""Tokens of text at most that logits are compared on."""
CHUNK = 64
"""Tokens of a text in one step."""
NEUTRAL_TEXT = Path(__file__).with_name("neutral.jsonl")
"""What is measured on where the user gives no text of their own: prose, questions, code and data, about 900 tokens."""


@dataclass(frozen=True)
class Calibration:
    """Text to measure on.

    Attributes:
        bundled: it is `NEUTRAL_TEXT`, which may not be like the user's.
        texts: token ids of each line, its answer included, by the name of the engine that reads them.
    """

    name: str
    bundled: bool
    sha256: str
    texts: dict[str, list[list[int]]]


def read_calibration(path: Path, readers: Mapping[str, PreTrainedTokenizerBase]) -> Calibration:
    """Read JSON lines with `prompt` and, if known, `answer`.

    Raises:
        InvalidInput: not such a file, or no text of it has two tokens.
    """
    try:
        examples = read_prompts(path)
    except InvalidInput as error:
        raise InvalidInput("calibration", str(path), error.problem) from error
    whole = [x.prompt + (x.answer or "") for x in examples]
    with refused_as("calibration", str(path), "a tokenizer cannot read it, as it cannot half of a surrogate pair"):
        texts = {name: [list(own(text).input_ids) for text in whole] for name, own in readers.items()}
    if min(max(map(len, own)) for own in texts.values()) < 2:
        raise InvalidInput("calibration", str(path), "none of its lines has two tokens or more")
    return Calibration(path.name, path == NEUTRAL_TEXT, hashlib.sha256(path.read_bytes()).hexdigest(), texts)


@torch.inference_mode()
def logits_on(engine: Engine, text: Sequence[int]) -> Tensor:
    """Logits [len(text) - 1, V] in float32 before each token but the first, over row 0 of the cache."""
    tokens = torch.tensor(text[:-1])
    parts = []
    for start in range(0, len(tokens), CHUNK):
        part = tokens[start : start + CHUNK][None]
        step = Step.causal(part, start, engine.spec.capacity, torch.arange(part.shape[1]))
        parts.append(engine.step(step)[0].float())
    return torch.cat(parts)


def compare_on_text(reference: Engine, engine: Engine, texts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """How far an engine's next-token distributions are from another's, and both perplexities.

    Args:
        texts: token ids; cut to the capacity, and after `TOKENS` in all.

    Returns:
        `tokens` predicted; of the logits the largest and the mean absolute difference; of the Kullback-Leibler
        divergence from the reference mean and largest, in nats; how often the likeliest is the same; both perplexities.
    """
    tokens, most, total, agree = 0, 0.0, 0.0, 0
    divergences, losses = list[Tensor](), ([0.0], [0.0])
    for text in texts:
        part = text[: min(engine.spec.capacity, TOKENS + 1 - tokens)]
        if len(part) < 2:
            continue
        expected, found = (logits_on(each, part) for each in (reference, engine))
        difference = (expected - found).abs()
        most, total = max(most, float(difference.max())), total + float(difference.double().mean(1).sum())
        logs = torch.log_softmax(expected, -1), torch.log_softmax(found, -1)
        divergences.append((logs[0].exp() * (logs[0] - logs[1])).sum(-1).clamp(min=0))
        agree += int((expected.argmax(-1) == found.argmax(-1)).sum())
        for loss, log in zip(losses, logs, strict=True):
            loss[0] -= float(log.gather(1, torch.tensor(part[1:])[:, None]).double().sum())
        tokens += len(part) - 1
    divergence = torch.cat(divergences)
    return {
        "tokens": tokens,
        "logits": {"max": most, "mean": total / tokens},
        "kl_nats": {"mean": float(divergence.mean()), "max": float(divergence.max())},
        "argmax_agreement": agree / tokens,
        "perplexity": {
            name: math.exp(loss[0] / tokens) for name, loss in zip(("float32", "engine"), losses, strict=True)
        },
    }


def measure(reference: Path, pair: Path, name: str, calibration: Calibration, engine: Path | None) -> dict[str, Any]:
    """One engine's part of the report.

    Args:
        engine: folder of the engine, if what the pair has in its place is run for it.
    """
    plain, own = (open_engine(one / name, Placement(threads=torch.get_num_threads()), 1) for one in (reference, pair))
    folders = reference / name, engine or pair / name
    sizes = [sum(file.stat().st_size for file in folder.glob("model*")) for folder in folders]
    return {
        "precision": own.spec.precision,
        "bytes": {"float32": sizes[0], "engine": sizes[1], "ratio": round(sizes[1] / sizes[0], 4)},
        **({"executed": "the plan's graph, on a CPU, in float32"} if engine else {}),
        "text": {
            "file": calibration.name,
            "bundled": calibration.bundled,
            "sha256": calibration.sha256,
            **compare_on_text(plain, own, calibration.texts[name]),
        },
    }
