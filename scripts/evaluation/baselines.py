"""Hugging Face's searches on the pair's own checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from engines.folder import read_spec
from export.checkpoint.checkpoint import find
from mtad.errors import InvalidInput
from mtad.params import DecodingParams
from runtime import LLM
from runtime.tuning.search import GRID
from scripts.evaluation.decoders import Baseline
from scripts.evaluation.settings import undrafted
from scripts.systems import HuggingFace, load_checkpoint

SEARCHES: dict[str, dict[str, Any] | None] = {
    "hf sampling": None,
    "hf greedy": {"do_sample": False},
    "hf beam search": {"num_beams": 4},
    "hf assisted": None,
}
"""Hugging Face's, by label: what it searches with; None samples. `hf assisted` drafts with the auxiliary, as many
tokens as its default confidence stop lets through."""

GIVEN = ("method", "temperature", "top_k", "top_p", "max_tokens", "stop", "seed", "speculation", *GRID)
"""Parameters that Hugging Face's searches are given, or that are not theirs to follow."""


def parse_searches(text: str) -> list[str]:
    """Labels asked for: `all`, `none`, or some of `SEARCHES`.

    Raises:
        InvalidInput: one is unknown.
    """
    if text in ("all", "none"):
        return list(SEARCHES) if text == "all" else []
    found = [name.strip() for name in text.split(",")]
    for name in found:
        if name not in SEARCHES:
            raise InvalidInput("baselines", name, f"give all, none, or some of {', '.join(SEARCHES)}")
    return found


def check_checkpoints(pair: Path, checkpoints: Path) -> None:
    """Refuse checkpoints that are not those the pair was exported from.

    Raises:
        InvalidInput: they are not, or not there.
    """
    for name in ("target", "auxiliary"):
        if find(name, str(checkpoints / name)).digest != read_spec(pair / name).checkpoint_hash:
            problem = f"not the checkpoint the pair's {name} was exported from; give its folder, or --baselines none"
            raise InvalidInput("checkpoints", str(checkpoints / name), problem)


def open_baselines(
    labels: Sequence[str], folder: Path, llm: LLM, threads: int
) -> list[Callable[[DecodingParams], Baseline]]:
    """Makers of the baselines; they share the loaded models.

    Args:
        labels: of `SEARCHES`.
        folder: with `target/` and `auxiliary/`.
        llm: the pair they are compared with.
        threads: CPU threads they may use.
    """
    if not labels:
        return []
    target, tokenizer = load_checkpoint(folder / "target"), llm.pair.tokenizer
    auxiliary = load_checkpoint(folder / "auxiliary") if "hf assisted" in labels else None
    opened: list[Callable[[DecodingParams], Baseline]] = []
    for label in labels:
        helper = auxiliary if label == "hf assisted" else None
        system = HuggingFace(target, helper, threads, label, SEARCHES[label], tokenizer)
        opened.append(partial(Baseline, label, system, tokenizer))
    return opened


def check_baseline(params: DecodingParams) -> None:
    """Refuse parameters that Hugging Face's searches would not be given, so that all get the same task.

    Raises:
        InvalidInput: one of them is set.
    """
    plain = undrafted(DecodingParams())
    for field in fields(DecodingParams):
        if field.name not in GIVEN and getattr(params, field.name) != getattr(plain, field.name):
            problem = "the baselines are not given it; use --baselines none"
            raise InvalidInput(field.name, getattr(params, field.name), problem)
