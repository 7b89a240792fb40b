"""Does an engine compute what the checkpoint computes? Checked on every export, before the folder gets its name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from engines.base import Engine, EngineSpec, Step, mask_length
from mtad.errors import VerificationFailed
from mtad.tree import attend

TOLERANCE = {"float32": 1e-4, "float16": 5e-2}
"""Largest difference of a logit that is accepted, by engine dtype; the reference is the checkpoint in float32. With
quantised weights the reference has the same ones, and both compute in float32."""
ACTIVATIONS = {"int8": 0.1, "int4": 0.1, "int8-dynamic": 0.3}
"""Root mean square of the differences that is accepted, in standard deviations of the logits, where activations are
quantised too: by precision, weights being those of the reference. A wrong graph differs by 1 and more."""
CHUNK = 256
"""Tokens stored in one step."""
LOGITS = 2**26
"""Logits of the reference at most in one pass, which gives them for every position."""
LONG = 512
"""Contexts longer than this are compared at the root and the last node alone: each costs a pass without a cache."""


def random_tree(rows: int, nodes: int, generator: torch.Generator) -> Tensor:
    """Parents of random trees, int64 [R, N]; -1 is the root."""
    draws = torch.rand(rows, nodes, generator=generator)
    return (draws * torch.arange(1, nodes + 1)).long() - 1


def ancestors_of(parents: Tensor) -> Tensor:
    """Bool [R, N, N] from parents [R, N] in which every parent comes before its children."""
    rows, nodes = parents.shape
    seen = torch.zeros(rows, nodes, nodes, dtype=torch.bool)
    for node in range(nodes):
        up = parents[:, node]
        above = seen[torch.arange(rows), up.clamp(min=0)] & (up >= 0)[:, None]
        seen[:, node] = above
        seen[:, node, node] = True
    return seen


@dataclass(frozen=True)
class Difference:
    """Between an engine's logits and a model's.

    Attributes:
        worst: the largest absolute difference of a logit.
        relative: root mean square of the differences, in standard deviations of the model's logits.
    """

    worst: float
    relative: float


@dataclass(frozen=True)
class Observation:
    """What an engine said, kept so that it can be closed before its checkpoint is read.

    Attributes:
        spec: the engine's.
        paths: token ids of each text whose next token was asked for.
        logits: its answers, [V] each.
    """

    spec: EngineSpec
    paths: list[Tensor]
    logits: list[Tensor]


@torch.inference_mode()
def observe(engine: Engine, model: PreTrainedModel, seed: int = 0) -> Observation:
    """Run an engine on ragged rows, a chain and a random tree.

    Where the model has a sliding window that the capacity exceeds, one row is longer than it.

    Args:
        engine: freshly opened; its cache is overwritten, and zero at the end.
        model: the checkpoint's model; only its configuration is looked at.
    """
    generator = torch.Generator().manual_seed(seed)
    spec, nodes = engine.spec, 6
    rows = min(3, spec.rows)
    window = getattr(model.config.get_text_config(), "sliding_window", None) or 0
    longest = max(37, window + 9) if window < spec.capacity else 37
    lengths = torch.tensor([longest, 9, 21][:rows]).clamp(max=spec.capacity - nodes - 1)
    longest = int(lengths.max())
    tokens = torch.randint(spec.vocab_size, (rows, longest), generator=generator)
    drafted = torch.randint(spec.vocab_size, (rows, nodes), generator=generator)
    chain = torch.arange(-1, nodes - 1).expand(rows, nodes)
    observed, paths = list[Tensor](), list[Tensor]()
    for parents in (chain, random_tree(rows, nodes, generator)):
        ancestors = ancestors_of(parents)
        _prefill(engine, tokens)
        size = mask_length(longest + nodes, spec.capacity)
        root = torch.zeros(rows, 1, nodes, dtype=torch.bool)
        columns = (torch.arange(size) - (lengths - 1)[:, None]).clamp(0, nodes + 1)  # as `tree_columns` counts
        step = Step(
            tokens=torch.cat([tokens.gather(1, lengths[:, None] - 1), drafted], 1),
            positions=lengths[:, None] - 1 + torch.cat([torch.zeros(rows, 1, dtype=torch.int64), ancestors.sum(2)], 1),
            write_at=lengths - 1,
            mask=attend(torch.cat([root, ancestors], 1), columns[:, None]),
            keep=torch.arange(nodes, -1, -1),  # not their own order, so that selecting is checked as well
        )
        logits = engine.step(step).float().flip(1)
        for row in range(rows):
            context = tokens[row, : lengths[row]]
            for node in range(-1, nodes) if len(context) <= LONG else (-1, nodes - 1):
                path = drafted[row][ancestors[row, node]] if node >= 0 else drafted[row, :0]
                observed.append(logits[row, node + 1])
                paths.append(torch.cat([context, path]))
    engine.kv.zero_()
    return Observation(spec, paths, observed)


@torch.inference_mode()
def compare(observed: Observation, model: PreTrainedModel) -> Difference:
    """Compare an engine's logits with its checkpoint's.

    The reference is the model's own forward pass without a cache, on the full token sequence of each tree path: nothing
    of the hook, the masks or the cache is shared with what is being checked.

    Args:
        observed: of `observe`.
        model: the checkpoint in float32, with its own attention.
    """
    expected = torch.stack(list(_last_logits(model, observed.paths)))
    difference = torch.stack(observed.logits) - expected
    return Difference(float(difference.abs().max()), float(difference.square().mean().sqrt() / expected.std()))


def verify(engine: Engine | Observation, model: PreTrainedModel, seed: int = 0) -> float:
    """`observe`, unless that was done, and `compare`: refuse what is further off than `TOLERANCE`.

    Returns:
        the largest absolute difference of a logit.

    Raises:
        VerificationFailed: it exceeds the tolerance, or is not a number.
    """
    observed = engine if isinstance(engine, Observation) else observe(engine, model, seed)
    spec, worst = observed.spec, compare(observed, model).worst
    if not worst <= TOLERANCE[spec.dtype]:
        raise VerificationFailed(
            f"logits of the {spec.format} engine differ from the checkpoint's by {worst:.3g} "
            f"(allowed for {spec.dtype}: {TOLERANCE[spec.dtype]}); the engine was not written"
        )
    return worst


def verify_activations(engine: Engine | Observation, model: PreTrainedModel, seed: int = 0) -> float:
    """The same for an engine that quantises activations: refuse what is further off than `ACTIVATIONS`.

    Args:
        engine: with quantised weights.
        model: with the same weights, in float32.

    Returns:
        `Difference.relative`.

    Raises:
        VerificationFailed: it exceeds the tolerance, or is not a number.
    """
    observed = engine if isinstance(engine, Observation) else observe(engine, model, seed)
    precision, relative = observed.spec.precision, compare(observed, model).relative
    if not relative <= ACTIVATIONS[precision]:
        raise VerificationFailed(
            f"with the same weights, logits of the {precision} engine differ from the checkpoint's by {relative:.3g} "
            f"of their spread (allowed: {ACTIVATIONS[precision]}): quantised activations cost this model too much; "
            "choose another precision; the engine was not written"
        )
    return relative


def _last_logits(model: PreTrainedModel, paths: list[Tensor]) -> Iterator[Tensor]:
    """The model's logits [V] after each text, several in one causal pass, padded behind their ends."""
    longest = max(map(len, paths))
    together = max(1, LOGITS // (longest * model.config.get_text_config().vocab_size))
    for start in range(0, len(paths), together):
        part = paths[start : start + together]
        logits = model(torch.nn.utils.rnn.pad_sequence(part, batch_first=True), use_cache=False).logits
        yield from (logits[number, len(path) - 1].clone() for number, path in enumerate(part))


def _prefill(engine: Engine, tokens: Tensor) -> None:
    """All but each row's last token, right-padded; padding is overwritten by later steps."""
    rows, longest = tokens.shape
    nothing = torch.zeros(0, dtype=torch.int64)
    for start in range(0, longest, CHUNK):
        part = tokens[:, start : start + CHUNK].contiguous()
        positions = torch.arange(start, start + part.shape[1]).repeat(rows, 1)
        size = mask_length(start + part.shape[1], engine.spec.capacity)
        mask = (torch.arange(size) <= positions[:, :, None])[:, None]
        engine.step(Step(part, positions, torch.full((rows,), start), mask, nothing))
