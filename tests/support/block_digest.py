"""A program: blocks of every method over random logits, by the functions of a block; prints a digest of each."""

from __future__ import annotations

import hashlib
import math
import warnings
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import NumbaExperimentalFeatureWarning

from mtad import block, step_inputs
from mtad.batch import Decisions, Trees
from mtad.methods import METHODS
from mtad.params import DecodingParams
from runtime.decoder.batch_arrays import BatchArrays, empty_distributions
from tests.support.noise import draw_noise

Floats = npt.NDArray[np.float32]

VOCAB = 70
KINDS = ("random", "half masked", "few allowed", "one token", "tied", "flat", "all masked", "nan")
FEW = 10


def requests(*asked: dict[str, Any]) -> list[DecodingParams]:
    """Requests of every method, each with what is asked."""
    form = {"draft_len": 3, "beam_width": 3, "branching": (2, 2, 1)}
    return [DecodingParams(**{"method": method, **form, **more}) for method in METHODS for more in asked]


def logits_of(kind: str, centre: Floats, places: int, generator: np.random.Generator) -> Floats:
    """Logits [R, places, V] of one kind, near the rows' centre [R, 1, V]; of two kinds, some are no distribution."""
    shape = len(centre), places, VOCAB
    logits = (centre + 0.5 * generator.standard_normal(shape)).astype(np.float32)
    if kind == "half masked":
        logits[generator.random(shape) < 0.5] = -math.inf
        logits[..., 3] = 0.0
    elif kind == "few allowed":
        logits[..., FEW:] = -math.inf
    elif kind == "one token":
        logits[..., :9], logits[..., 10:] = -math.inf, -math.inf
    elif kind == "tied":
        logits = np.round(logits)
    elif kind == "flat":
        logits[:] = 0.0
    elif kind != "random":
        logits[generator.random(shape[:2]) < 0.1] = -math.inf if kind == "all masked" else math.nan
    return logits


def run_block(params: list[DecodingParams], kind: str, seed: int) -> tuple[str, Decisions]:
    """A digest of all that a batch's block writes, and what it decides."""
    layout, rows = BatchArrays(params, VOCAB), len(params)
    is_end, committed, last_two = np.arange(VOCAB) < 3, np.arange(rows) % 4 + 2, np.full((rows, 2), 5)
    generator, digest = np.random.default_rng([seed, KINDS.index(kind)]), hashlib.sha256()
    centre = (2 * generator.standard_normal((rows, 1, VOCAB))).astype(np.float32)
    noise = draw_noise([(seed, row) for row in range(rows)], layout.draft_len, layout.width)
    trees, q, finite = Trees.empty(layout.starts), empty_distributions(layout), np.ones(rows, np.bool_)
    for level in range(layout.draft_len):
        logits = logits_of(kind, centre, layout.width if level else 1, generator)
        if not block.draft_levels(0, rows, layout.rows, level, trees, logits, q, noise.draft, is_end, finite):
            break
    scored = layout.scored
    block.select_nodes(layout.rows, level + 1, trees, is_end, scored)
    nodes = int(scored.counts.max())
    tokens, positions = np.zeros((2, rows, 1 + nodes), np.int64)
    write_at, mask = np.zeros(rows, np.int64), np.zeros((rows, 1, 1 + nodes, 64), np.bool_)
    step_inputs.target_inputs(scored, last_two[:, 1], committed, tokens, positions, write_at, mask)
    logits = logits_of(kind, centre, 1 + nodes, generator)
    decisions = Decisions.empty(rows, layout.draft_len)
    decisions.finite[:] = finite
    draft = trees, scored, logits, logits, q
    block.decide(0, rows, layout.rows, *draft, noise.accept, noise.bonus, decisions)
    columns = np.zeros((3, rows, layout.draft_len), np.int64)
    step_inputs.kept_columns(layout.rows, committed, scored, decisions, *columns)
    floats = trees.log_q, decisions.log_probs  # libraries' logarithms differ in the last bits
    rounded = [np.round(np.nan_to_num(x, neginf=-1e3), 4) + 0.0 for x in floats]
    whole = trees.tokens, trees.parents, trees.drafted, trees.ended, scored.origins[:, :nodes]
    inputs = tokens, positions, write_at, mask
    told = decisions.tokens, decisions.lengths, decisions.paths, decisions.finite, columns
    for array in (*whole, *inputs, *told, *rounded):
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:16], decisions


def digests() -> list[str]:
    """A line for each kind of logits: by the paper's filter, none, a threshold of 0, and temperature 0."""
    free = {"top_k": 0, "top_p": 1.0}
    params = requests(
        {}, free, {"accept_threshold": 0.0, "top_k": 5}, {"temperature": 0.0}, {"temperature": 0.0} | free
    )
    lines = []
    for kind in KINDS:
        digest, decisions = run_block(params, kind, 0)
        finite = decisions.finite
        lines.append(f"{kind}: {digest}, {decisions.lengths[finite].sum()} tokens of {finite.sum()} requests")
    return lines


if __name__ == "__main__":
    warnings.simplefilter("ignore", NumbaExperimentalFeatureWarning)
    print("\n".join(digests()))
