"""Does an engine compute what the checkpoint computes? Checked on every export, before the folder gets its name.

The same batches, references and tolerances serve `mtad check` (`export/verification/check.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from inspect import signature

import torch
from torch import Tensor
from tqdm import trange
from transformers import PreTrainedModel

from engines.base import Engine, EngineSpec, Step, mask_length
from mtad.errors import VerificationFailed

TOLERANCE = {"float32": 1e-4, "float16": 5e-2, "bfloat16": 1.0}
RELATIVE = {"float32": 3e-5, "float16": 1e-2, "bfloat16": 6e-2}
"""Largest difference of a logit that is accepted, by engine dtype, or as a part of the largest logit where that is more
(GPT-2's are -30 to -130). The reference is the checkpoint in float32; quantised weights are the same in both, which
compute in float32. In bfloat16, up to 0.72 was seen, of random models. A wrong graph is off by 10 and more."""
WIDENED = {"float16": 0.0125, "bfloat16": 0.1}
"""Largest difference of a logit that is accepted of a graph of this dtype computed in float32, against the checkpoint
with weights rounded to it: up to 2e-5 where all that is rounded are weights, but constants of the graph are as well,
such as the factor of Gemma's embeddings."""
ACTIVATIONS = {"int8": 0.1, "int4": 0.1, "int8-static": 0.3, "fp8": 0.3}
"""Root mean square of the differences that is accepted, in standard deviations of the logits, where activations are
quantised too: by precision, weights being those of the reference. A wrong graph differs by 1 and more."""
CHUNK = 256
"""Tokens stored in one step."""
ROWS, NODES = 3, 6
"""Rows of a case, where the engine has as many, and drafted tokens per row."""
LOGITS = 2**26
"""Most logits that the reference computes in one pass: of all positions, or of a text that fills a pass, of its end."""


@dataclass(frozen=True)
class Case:
    """A ragged batch with a token tree on each row's last token.

    Attributes:
        tokens: int64 [R, T], contexts, right-padded.
        lengths: int64 [R], tokens of each context.
        drafted: int64 [R, N], the trees' tokens.
        parents: int64 [R, N], -1 is the context's last token; every parent comes before its children.
    """

    tokens: Tensor
    lengths: Tensor
    drafted: Tensor
    parents: Tensor


def random_tree(rows: int, nodes: int, generator: torch.Generator) -> Tensor:
    """Parents of random trees, int64 [R, N]; -1 is the root."""
    draws = torch.rand(rows, nodes, generator=generator)
    return (draws * torch.arange(1, nodes + 1)).long() - 1


def ancestors_of(parents: Tensor) -> Tensor:
    """The nodes on the path to each, itself included, bool [R, N, N], from parents [R, N], which precede children."""
    rows, nodes = parents.shape
    seen = torch.zeros(rows, nodes, nodes, dtype=torch.bool)
    for node in range(nodes):
        up = parents[:, node]
        seen[:, node] = seen[torch.arange(rows), up.clamp(min=0)] & (up >= 0)[:, None]
        seen[:, node, node] = True
    return seen


def make_cases(spec: EngineSpec, window: int | None) -> tuple[Case, Case]:
    """Ragged rows with a chain, and the same rows with random trees.

    Args:
        spec: rows, capacity and vocabulary they must fit.
        window: the model's sliding window; where the capacity exceeds it, one row is longer than it.
    """
    generator = torch.Generator().manual_seed(0)
    rows, window = few_rows(spec).rows, window or 0
    longest = max(37, window + 9) if window < spec.capacity else 37
    lengths = torch.tensor([longest, 9, 21][:rows]).clamp(max=spec.capacity - NODES - 1)
    tokens = torch.randint(spec.vocab_size, (rows, int(lengths.max())), generator=generator)
    drafted = torch.randint(spec.vocab_size, (rows, NODES), generator=generator)
    chain = Case(tokens, lengths, drafted, torch.arange(-1, NODES - 1).repeat(rows, 1))
    return chain, replace(chain, parents=random_tree(rows, NODES, generator))


def few_rows(spec: EngineSpec) -> EngineSpec:
    """An engine with no more rows than the cases have: each takes the memory of its whole capacity."""
    return replace(spec, rows=min(ROWS, spec.rows))


def run_engine(engine: Engine, case: Case) -> Tensor:
    """Logits float32 [R * (1 + N), V] of an engine at each row's last token and nodes; its cache is overwritten.

    The contexts are stored in steps, but for their last tokens; another step scores the trees. It keeps all positions
    in reverse, so that selecting them is checked as well.
    """
    lengths, ancestors, capacity = case.lengths, ancestors_of(case.parents), engine.spec.capacity
    rows, nodes = case.drafted.shape
    for start in range(0, case.tokens.shape[1], CHUNK):  # right-padded; the padding is overwritten below
        part = case.tokens[:, start : start + CHUNK].contiguous()
        engine.step(Step.causal(part, start, capacity, torch.zeros(0, dtype=torch.int64)))
    size = mask_length(case.tokens.shape[1] + nodes, capacity)
    mask = (torch.arange(size) < lengths[:, None])[:, None, None].repeat(1, 1, 1 + nodes, 1)
    for row, length in enumerate(lengths.tolist()):  # node n lies n columns behind the text
        mask[row, 0, 1:, length : length + nodes] |= ancestors[row]
    step = Step(
        tokens=torch.cat([case.tokens.gather(1, lengths[:, None] - 1), case.drafted], 1),
        positions=lengths[:, None] - 1 + torch.cat([torch.zeros(rows, 1, dtype=torch.int64), ancestors.sum(2)], 1),
        write_at=lengths - 1,
        mask=mask,
        keep=torch.arange(nodes, -1, -1),
    )
    return engine.step(step).flip(1).flatten(0, 1).float()


@torch.inference_mode()
def run_checkpoint(model: PreTrainedModel, case: Case) -> Tensor:
    """Logits float32 [R * (1 + N), V] of a checkpoint at each row's last token and nodes.

    The model's own forward pass without a cache, on the full token sequence of each path from a tree's root to a leaf,
    several at once, padded behind their ends, which no token sees: nothing of the hook, the masks or the cache is
    shared with what is being checked.

    Args:
        model: the checkpoint in float32, with its own attention.
    """
    (rows, nodes), vocabulary = case.drafted.shape, model.config.get_text_config().vocab_size
    found, ancestors, paths = torch.empty(rows, 1 + nodes, vocabulary), ancestors_of(case.parents), []
    for row, (length, parents) in enumerate(zip(case.lengths.tolist(), case.parents.tolist(), strict=True)):
        for leaf in sorted(set(range(nodes)) - set(parents)):
            path = ancestors[row, leaf].nonzero()[:, 0]
            tokens = torch.cat([case.tokens[row, :length], case.drafted[row, path]])
            paths.append((row, [0, *(path + 1).tolist()], tokens))
    together = max(1, LOGITS // (max(len(tokens) for *_, tokens in paths) * vocabulary))
    shortened = together == 1 and "logits_to_keep" in signature(model.forward).parameters
    last = {"logits_to_keep": 1 + nodes} if shortened else {}
    for start in trange(0, len(paths), together, desc="checkpoint", unit="pass", leave=False, disable=None):
        part = paths[start : start + together]
        padded = torch.nn.utils.rnn.pad_sequence([tokens for *_, tokens in part], batch_first=True)
        for (row, at, tokens), logits in zip(part, model(padded, use_cache=False, **last).logits, strict=True):
            found[row, at] = logits[len(tokens) - padded.shape[1] - len(at) :][: len(at)].float()
    return found.flatten(0, 1)


Expectation = tuple[tuple[Case, ...], Tensor]
"""Cases and what a checkpoint answers to them, case after case, float32 [K, V]; its weights are no longer needed."""


@torch.inference_mode()
def expect(model: PreTrainedModel, spec: EngineSpec) -> Expectation:
    """Run a checkpoint, in float32 with its own attention, on the cases that an engine of `spec` is verified on."""
    cases = make_cases(spec, getattr(model.config.get_text_config(), "sliding_window", None))
    return cases, torch.cat([run_checkpoint(model, case) for case in cases])


@torch.inference_mode()
def _differences(engine: Engine, expected: Expectation) -> Tensor:
    """Of the logits, [K, V]; the engine's cache is overwritten."""
    cases, answers = expected
    return torch.cat([run_engine(engine, case) for case in cases]) - answers


def tolerance(dtype: str, expected: Tensor) -> float:
    """Largest difference from these logits that is accepted of an engine of a dtype."""
    return max(TOLERANCE[dtype], RELATIVE[dtype] * float(expected[expected.isfinite()].abs().max()))


def verify(engine: Engine, expected: Expectation, allowed: float | None = None) -> float:
    """Refuse an engine whose logits are further off than `allowed`, and than `tolerance` says.

    Returns:
        the largest absolute difference of a logit.

    Raises:
        VerificationFailed: it exceeds the tolerance, or is not a number.
    """
    spec, worst = engine.spec, float(_differences(engine, expected).abs().max())
    limit = max(allowed or 0.0, tolerance(spec.dtype, expected[1]))
    if not worst <= limit:
        problem = f"logits of the {spec.format} engine differ from the checkpoint's by {worst:.3g}"
        raise VerificationFailed(f"{problem} (allowed for {spec.precision}: {limit:.3g}); the engine was not written")
    return worst


def verify_activations(engine: Engine, expected: Expectation, precision: str | None = None) -> float:
    """Refuse an engine that quantises activations if it is further off than `ACTIVATIONS` says.

    Args:
        expected: of the checkpoint with the same weights, in float32.
        precision: of the engine; default: what its specification says.

    Returns:
        root mean square of the differences, in standard deviations of the expected logits.

    Raises:
        VerificationFailed: it exceeds the tolerance, or is not a number.
    """
    precision = precision or engine.spec.precision
    relative = float(_differences(engine, expected).square().mean().sqrt() / expected[1].std())
    if not relative <= ACTIVATIONS[precision]:
        found = f"logits of the {precision} engine differ from the checkpoint's by {relative:.3g} of their spread"
        problem = f"with the same weights, {found} (allowed: {ACTIVATIONS[precision]})"
        remedy = "quantised activations cost this model too much; choose another precision; the engine was not written"
        raise VerificationFailed(f"{problem}: {remedy}")
    return relative
