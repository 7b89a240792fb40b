"""The decoding methods that are compared on the demo pair."""

from __future__ import annotations

from dataclasses import replace

from runtime import DecodingParams

KINDS = {"sql": "text-to-SQL", "code": "source code"}


THRESHOLDS = {"sql": 0.5, "code": 0.1}
"""Tau: on open-ended text 0.1 is faster at the same quality; where answers are right or wrong it is not harmless."""


BASE = DecodingParams(max_tokens=128)
"""Gamma 4, B 4, temperature 1, top-k 10, top-p 0.9."""


BASELINES = {
    "sample": replace(BASE, method="sample"),
    "greedy": replace(BASE, method="sample", temperature=0.0),
    "speculative": replace(BASE, method="speculative"),
}


def methods(kind: str) -> dict[str, DecodingParams]:
    """The methods compared, with the threshold of the kind of text."""
    return BASELINES | {
        name: replace(BASE, method=name, accept_threshold=THRESHOLDS[kind]) for name in ("mtad", "mmtad")
    }
