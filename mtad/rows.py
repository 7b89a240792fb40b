"""The parameters of a batch's rows as one array of records, which compiled functions read."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mtad.methods import FORMS, METHODS
from mtad.params import DecodingParams

RULES = tuple(sorted({method.rule for method in METHODS.values()}))
"""Acceptance rules, as module and function of `mtad.rules`; a row's rule is an index into this."""

CHAIN, BEAMS, BRANCHES = range(len(FORMS))

RATIOS = ("joint.joint", "joint.joint_sample")
"""Rules that bound a likelihood ratio; their threshold is kept as its logarithm."""

_FIELDS = {
    np.float64: ("temperature", "top_p", "min_p", "threshold", "divergence", "plausible", "log_confidence"),
    np.int64: ("top_k", "rule", "relaxed_topk", "form", "draft_len", "width"),
    np.bool_: ("greedy", "tree", "reads_draft", "stops_at_eos"),
}
ROW = np.dtype([(name, kind) for kind, names in _FIELDS.items() for name in names], align=True)
"""One row.

* temperature, top_k, top_p, min_p: the filter of both models' logits; top_k is V for all, top_p 1 for all.
* greedy: nothing is random; what would be drawn is the likeliest.
* rule: an index of `RULES`. threshold: what it bounds, for `RATIOS` the logarithm. relaxed_topk: of `relaxed`.
* divergence, plausible: of `mtad.rules.budget.move`.
* form, draft_len, width: of the draft; draft_len 0 drafts nothing. width: nodes of its widest level.
* tree: the target scores the whole draft rather than its best path.
* log_confidence: a path that is less likely is not continued.
"""


def top_k_of(params: DecodingParams, vocab_size: int) -> int:
    """Tokens a request's filter keeps at most: a method that is exact keeps one at temperature 0."""
    if params.temperature == 0 and params.spec.exact:
        return 1
    return min(params.top_k or vocab_size, vocab_size)


def stack_rows(params: Sequence[DecodingParams], vocab_size: int) -> npt.NDArray[np.record]:
    """The records of a batch's rows, `ROW` [R].

    At temperature 0 a method that is exact becomes top-k 1; the others keep the distributions of temperature 1, and
    draw nothing.
    """
    return np.array([_record(p, vocab_size) for p in params], dtype=np.dtype((np.record, ROW)))


def _record(p: DecodingParams, vocab_size: int) -> tuple[object, ...]:
    """A row's values in the order of `_FIELDS`."""
    rule = p.spec.rule
    return (
        p.temperature or 1.0,
        p.top_p,
        p.min_p,
        _log(p.threshold) if rule in RATIOS else p.threshold,
        p.divergence,
        p.plausible,
        _log(p.draft_confidence),
        top_k_of(p, vocab_size),
        RULES.index(rule),
        p.relaxed_topk,
        FORMS.index(p.form) if p.form else CHAIN,
        p.drafted,
        p.draft_width,
        p.temperature == 0,
        p.spec.tree,
        p.spec.reads_draft,
        not p.ignore_eos,
    )


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf
