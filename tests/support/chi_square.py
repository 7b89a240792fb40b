"""How often outcomes were drawn against how often they should be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import chdtrc  # all of scipy.stats takes a second and a half to import


def fit(observed: ArrayLike, expected: ArrayLike | None = None) -> float:
    """P-value of counts, by default of such as should be equal; the sums of both are taken to be."""
    seen = np.asarray(observed, dtype=float)
    law = np.full_like(seen, seen.mean()) if expected is None else np.asarray(expected)
    return float(chdtrc(len(seen) - 1, ((seen - law) ** 2 / law).sum()))


def p_value(drawn: Iterable[Any], law: Mapping[Any, float]) -> float:
    """Chi-square over the outcomes expected at least five times; the rare rest is one more outcome."""
    seen = Counter(drawn)
    count = seen.total()
    assert seen.keys() <= {outcome for outcome, value in law.items() if value > 0}
    common = [outcome for outcome, value in law.items() if value * count >= 5]
    observed, expected = [seen[one] for one in common], [law[one] * count for one in common]
    if (rest := count - sum(expected)) > 5:
        observed, expected = [*observed, count - sum(observed)], [*expected, rest]
    scale = sum(observed) / sum(expected)
    return fit(observed, [value * scale for value in expected])
