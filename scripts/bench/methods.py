"""The decoding methods as tuned for the demo pair."""

from __future__ import annotations

import json
from dataclasses import replace

from mtad.errors import InvalidInput
from runtime import DecodingParams
from scripts.paths import DEMO

TUNED = DEMO / "tuned.json"


KINDS = {"sql": "text-to-SQL", "code": "source code"}


BASE = DecodingParams(max_tokens=128)
"""Gamma 4, B 4, temperature 1, top-k 10, top-p 0.9."""


BASELINES = {
    "sample": replace(BASE, method="sample"),
    "greedy": replace(BASE, method="sample", temperature=0.0),
    "speculative": replace(BASE, method="speculative"),
}


def methods(kind: str) -> dict[str, DecodingParams]:
    """The methods compared, with the thresholds of tuned.json."""
    if not TUNED.is_file():
        raise InvalidInput("thresholds", str(TUNED), "no such file; run python -m scripts.bench tune")
    tuned = json.loads(TUNED.read_text(encoding="utf-8"))[kind]
    return BASELINES | {name: replace(BASE, method=name, **tuned[name]) for name in ("mtad", "mmtad")}
