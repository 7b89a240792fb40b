"""How far each method's texts are from the target's own joint distribution, on models small enough to enumerate.

    python -m scripts.evaluation.distance

The first three tokens over a vocabulary of four, drawn many times from pairs of models that are tables, against all 64
texts with their probability under the target: total variation, 0 for the same distribution, and the mean log-likelihood
of the drawn texts less that of the target's own. A sample of this size from the joint distribution itself, drawn among
all texts at once, is `floor` away from it; `mtad` is measured at several tau.

Prints a table and, as its last line, one JSON object; writes docs/results/distance.json and distance.png.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
from tqdm import tqdm

from mtad.errors import InvalidInput
from mtad.params import DecodingParams
from runtime.commands.entry import Parser, command
from scripts.evaluation.table_pair import TablePair, Tokens
from scripts.paths import RESULTS

VOCAB, LENGTH = 4, 3
TAUS = (0.0, 0.01, 0.03, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0)
DISTANCES = (0.0, 0.3, 1.0, 2.0, 4.0)
BASE = DecodingParams(draft_len=LENGTH, top_k=0, top_p=1.0)


def joint(pair: TablePair) -> dict[Tokens, float]:
    """Every text's probability under the target."""
    found: dict[Tokens, float] = {(): 1.0}
    for _ in range(LENGTH):
        above, found = found, {}
        for text, p in above.items():
            weights = np.exp(pair.logits(text)[0].astype(np.float64))
            found |= {(*text, token): p * float(weight / weights.sum()) for token, weight in enumerate(weights)}
    return found


def distance(texts: list[Tokens], expected: dict[Tokens, float]) -> tuple[float, float]:
    """Total variation, and mean log-likelihood above that of the joint itself, in nats."""
    seen = Counter(texts)
    variation = sum(abs(seen[text] / len(texts) - p) for text, p in expected.items()) / 2
    own = sum(p * math.log(p) for p in expected.values())
    return variation, sum(math.log(expected[text]) for text in texts) / len(texts) - own


def plot(rows: list[dict[str, float | str]], floor: float, path: Path) -> None:
    """Distance and likelihood against tau."""
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4))
    of_tau = [row for row in rows if row["method"] == "mtad"]
    for axes, name, text in (
        (left, "variation", "total variation to the joint"),
        (right, "gain", "log-likelihood above the joint's, nats"),
    ):
        axes.plot([row["threshold"] for row in of_tau], [row[name] for row in of_tau], "o-", label="mtad")
        for row in rows:
            if row["method"] == "speculative":
                axes.axhline(float(row[name]), ls=":", label="speculative")
        axes.set(xlabel="tau", ylabel=text)
        axes.legend()
    left.axhline(floor, color="grey", lw=0.5)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


@command
def main() -> None:
    parser = Parser(prog="scripts.evaluation.distance", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--texts", type=int, default=4000, help="texts of each method and pair (default %(default)s)")
    parser.add_argument("--pairs", type=int, default=5, help="pairs of models (default %(default)s)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write to (default %(default)s)")
    options = parser.parse_args()
    for name in ("texts", "pairs"):
        if getattr(options, name) < 1:
            raise InvalidInput(name, getattr(options, name), "give at least 1")
    settings = {
        "sample": replace(BASE, method="sample"),
        "speculative": replace(BASE, method="speculative"),
        **{f"mtad {tau}": replace(BASE, method="mtad", accept_threshold=tau) for tau in TAUS},
        **{f"modal {nats}": replace(BASE, method="modal", accept_threshold=nats) for nats in DISTANCES},
    }
    found: dict[str, list[tuple[float, float]]] = {label: [] for label in settings}
    floors = []
    with tqdm(total=options.pairs * len(settings), file=sys.stderr, disable=None) as bar:
        for seed in range(options.pairs):
            pair = TablePair(seed, VOCAB, peak=1.2, noise=0.8)
            expected = joint(pair)
            chance = np.random.default_rng(seed)
            own = chance.choice(len(expected), size=options.texts, p=np.array(list(expected.values())))
            floors.append(distance([list(expected)[at] for at in own], expected)[0])
            for label, params in settings.items():
                found[label].append(distance(pair.generate([params] * options.texts, LENGTH), expected))
                bar.update()
    floor = float(np.mean(floors))
    rows: list[dict[str, float | str]] = []
    print(f"| setting | total variation (floor {floor:.3f}) | log-likelihood above the joint's, nats |\n|---|---|---|")
    for label, params in settings.items():
        variation, gain = (float(value) for value in np.mean(found[label], 0))
        rows.append({"method": params.method, "threshold": params.threshold, "variation": variation, "gain": gain})
        print(f"| {label} | {variation:.3f} | {gain:+.2f} |")
    report = {"texts": options.texts, "pairs": options.pairs, "floor": floor, "rows": rows}
    options.results.mkdir(parents=True, exist_ok=True)
    (options.results / "distance.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    plot(rows, floor, options.results / "distance.png")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
