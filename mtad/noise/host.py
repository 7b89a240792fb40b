"""Random numbers of a block: a counter-based generator per request, keyed by its seed, at the block's position."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from mtad.params import DecodingParams
from mtad.rows import BLOCK, Shape, blocks_of
from mtad.stacking import top_k_of

WINDOW = 2**14
"""Numbers of one request that are drawn at once and kept at most."""

Floats = npt.NDArray[np.float32]


class LevelNoise(NamedTuple):
    """What one level of a draft is drawn with; 0 where nothing is.

    Attributes:
        uniform: float32 [R], uniform [0, 1): a chain's token.
        gumbel: float32 [R, width, K], standard Gumbel: beams and branches; [R, width, 0] where all drafts are chains.
        table: float32 [R, width, blocks + BLOCK], standard Gumbel: beams and branches that are drawn from tables; of
            each slot, for the blocks after a beam, and for the tokens of a block. [R, width, 0] where there are none.
    """

    uniform: Tensor
    gumbel: Tensor
    table: Tensor


class Noise(NamedTuple):
    """The noise of one block.

    Attributes:
        levels: of the draft.
        accept: float32 [R, draft_len], uniform [0, 1): chains are accepted with it. The first draws the path of
            `joint_sample`.
        bonus: float32 [R], uniform [0, 1).
        nodes: float32 [R, N], uniform [0, 1), of the scored nodes of branching drafts; [R, N + W] where beams stay
            alive, of the nodes and of one level more; [R, 0] where neither is.
    """

    levels: tuple[LevelNoise, ...]
    accept: Tensor
    bonus: Tensor
    nodes: Tensor


class Draws:
    """What the rows of a batch draw, block after block.

    A row draws exactly the numbers its own parameters call for and they are then placed in the batch's shape, so what
    else is in the batch does not change them. Temperature 0 is noise 0.

    Args:
        listed: candidates up to which a row's distributions are lists, of `Shape`.
    """

    def __init__(self, params: Sequence[DecodingParams], vocab_size: int, listed: int) -> None:
        self._rows = []
        for row, p in enumerate(params):
            chain = p.spec.form == "chain"
            levels, beams, k = p.drafted, p.draft_width, 0 if chain else top_k_of(p, vocab_size)
            table = k > listed
            k = blocks_of(vocab_size) + BLOCK if table else k
            each = (levels + p.spec.live) * beams if p.spec.form == "branches" or p.spec.live else 0
            each += levels if chain else 0
            length = max(1, min(32, WINDOW // max(1, levels * beams * k)))
            draw = _window if length > 1 else _window.__wrapped__  # a window of one block is never asked for again
            if p.temperature != 0:
                self._rows.append((row, draw, (length, levels, beams, k, each), chain, table))

    def into(
        self,
        uniform: Floats,
        gumbel: Floats,
        table: Floats,
        accept: Floats,
        bonus: Floats,
        nodes: Floats,
        keys: Sequence[tuple[int, int]],
    ) -> None:
        """Write the noise of one block; what a row does not draw is left as it is.

        Args:
            uniform: float32 [draft_len, R].
            gumbel: float32 [draft_len, R, width, K], K of `gumbel_noise`.
            table: float32 [draft_len, R, width, N], N of `table_noise`.
            accept: float32 [R, draft_len].
            bonus: float32 [R].
            nodes: float32 [R, levels, score_width], as many levels as `node_noise` says.
            keys: (seed, block index) of each row.
        """
        for row, draw, (length, levels, beams, k, each), chain, tabulated in self._rows:
            seed, block = keys[row]
            window, at = divmod(block, length)
            uniforms, gumbels = draw(seed, window, length, levels, beams, k, each)
            bonus[row] = uniforms[at, 0]
            accept[row, :levels] = uniforms[at, 1 : 1 + levels]
            if chain:
                uniform[:levels, row] = uniforms[at, 1 + levels :]
                continue
            (table if tabulated else gumbel)[:levels, row, :beams, :k] = gumbels[at]
            if each:
                own = uniforms[at, 1 + levels :].reshape(-1, beams)
                nodes[row, :levels, :beams] = own[:levels]
                if len(own) > levels:  # the level behind the batch's last
                    nodes[row, -1, :beams] = own[levels]


def gumbel_noise(shape: Shape) -> int:
    """Candidates that Gumbel noise is drawn for; 0 where all drafts are chains."""
    return 0 if shape.forms == ("chain",) or False not in shape.tables else shape.candidates


def table_noise(shape: Shape) -> int:
    """Numbers of a slot that is drawn from a table; 0 where all drafts are chains."""
    return 0 if shape.forms == ("chain",) or True not in shape.tables else shape.blocks + BLOCK


def node_noise(shape: Shape) -> tuple[int, int]:
    """Levels, and nodes per level, that branching drafts and live beams draw uniforms for."""
    return (shape.draft_len + shape.live, shape.score_width) if shape.children or shape.live else (0, 0)


@lru_cache(maxsize=256)  # 16 MiB of full windows
def _window(seed: int, window: int, length: int, levels: int, beams: int, k: int, each: int) -> tuple[Floats, Floats]:
    """Noise of `length` consecutive blocks of one request, drawn at once: [length, 1 + levels ..], [length, levels ..].

    Philox-4x64 keyed by (seed; window, levels, beams): a request that changes its draft from block to block never
    meets the same numbers twice. Drawing several blocks at a time costs less than making a generator a block.
    """
    key = np.array([seed, window << 16 | levels << 8 | beams], dtype=np.uint64)
    generator = np.random.Generator(np.random.Philox(key=key))
    uniform = generator.random((length, 1 + levels + each), dtype=np.float32)
    gumbel = generator.random((length, levels, beams, k), dtype=np.float32)
    np.clip(gumbel, 2.0**-25, 1 - 2.0**-24, out=gumbel)  # the logarithms stay finite
    return uniform, -np.log(-np.log(gumbel))
