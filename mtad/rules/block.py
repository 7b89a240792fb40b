"""Block verification: lossless, and joint."""

from __future__ import annotations

import math

import numpy as np

from mtad.compiled import compiled
from mtad.rules.scored import keep_residual, log_p_of, log_q_of, residual


@compiled
def block(row, scored, bonus):
    """Block verification (arXiv 2403.10444, algorithm 2).

    With w_i = min(w_{i-1} p_i / q_i, 1), w_0 = 1, and s_i the sum over tokens of max(w_i p - q, 0) after i tokens, the
    longest prefix with u_i < s_i / (s_i + 1 - w_i) is kept, or the whole draft if u < w. The bonus token comes from
    max(w_i p - q, 0), after full acceptance from p. It accepts no fewer tokens than `token_wise` in expectation.
    """
    count, kept = int(scored.drafted.sum()), 0
    w = np.ones(count + 1)
    for i in range(1, count + 1):
        ratio = log_p_of(scored, i - 1) - log_q_of(scored, i - 1)
        w[i] = min(w[i - 1] * math.exp(min(ratio, 700.0)), 1.0)
        bound = w[i]
        if i < count:
            s = residual(scored, i - 1, w[i], bonus)
            bound = s / (s + 1.0 - w[i]) if s > 0.0 else 0.0
        if scored.accept[i - 1] < bound:
            kept = i
    if kept == count:
        return kept - 1
    return keep_residual(scored, kept - 1, w[kept], bonus)
