"""The compiled functions are those of this version of mtad, and compute what the eager ones do, whatever the shape."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import runtime.decoder.compiled.manifest
from mtad.block import Context, Draft
from mtad.draft.live import Beams
from mtad.errors import InvalidInput
from mtad.methods import METHODS
from mtad.params import DecodingParams
from runtime.decoder.batch import Batch
from runtime.decoder.batch_builder import BatchBuilder
from runtime.decoder.compiled.functions import CompiledFunctions
from runtime.decoder.eager import BlockFunctions, TorchFunctions

LENGTH = 128


@pytest.fixture(scope="module")
def compiled() -> CompiledFunctions:
    return CompiledFunctions()


def test_graphs_of_other_sources_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime.decoder.compiled.manifest, "sources_hash", lambda: "another")
    with pytest.raises(InvalidInput, match=r"python -m runtime\.decoder\.compiled\.compile"):
        CompiledFunctions()


def test_a_missing_graph_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"python -m runtime\.decoder\.compiled\.compile"):
        CompiledFunctions(tmp_path)
    runtime.decoder.compiled.manifest.write_manifest(tmp_path, ["grow"], {})
    with pytest.raises(InvalidInput, match="grow"):
        CompiledFunctions(tmp_path)


class Defined(NamedTuple):
    """A tensor, and which of its entries mean something; leading axes where the mask has fewer."""

    name: str
    values: torch.Tensor
    where: torch.Tensor

    def kept(self) -> torch.Tensor:
        where = self.where.view(*self.where.shape, *[1] * (self.values.dim() - self.where.dim()))
        return self.values.masked_fill(~where, 0)


def run_block(functions: BlockFunctions, batch: Batch, vocab: int, seed: int) -> list[Defined]:
    """Everything of one block that is defined, from logits that are random but lean to the same few tokens."""
    generator = torch.Generator().manual_seed(seed)
    rows, shape = len(batch.committed), batch.shape
    common = 3 * torch.randn(vocab, generator=generator)
    found: list[Defined] = []

    def logits(nodes: int) -> torch.Tensor:
        return common + torch.randn(rows, nodes, vocab, generator=generator)

    def note(name: str, values: torch.Tensor, where: torch.Tensor | None = None) -> None:
        found.append(Defined(name, values.clone(), torch.tensor(True) if where is None else where.clone()))

    context = Context(batch.last_two, batch.committed, torch.arange(LENGTH))
    draft: Draft | None = None
    alive = torch.ones(rows, 1, dtype=torch.bool)
    if shape.draft_len:
        begun = functions.begin(context, batch.rows)
        for name, values in zip(begun.inputs._fields, begun.inputs, strict=True):
            note(f"begin {name}", values)
        level, sees, levels = batch.root, begun.sees, []
        for at, place in enumerate(batch.places):
            drawn, noise = logits(level.tokens.shape[1]), batch.noise.levels[at]
            given = level, sees, drawn, noise, place, begun.holds, context, batch.rows
            grown = functions.grow(at + 1, given, batch.live)
            levels.append(grown)
            level, sees = grown.level, grown.inputs.mask
            live = level.log_q > -math.inf
            for name, values in zip(level._fields, level, strict=True):
                note(f"level {at} {name}", values, None if name in ("log_q", "drafted", "growing") else live)
            note(f"level {at} mask", sees.squeeze(1), live)
            note(f"level {at} tokens", grown.inputs.tokens, live)
            note(f"level {at} positions", grown.inputs.positions)
            note(f"level {at} write_at", grown.inputs.write_at)
            for kind, first in enumerate(grown.first):
                note(f"level {at} log_prob {kind}", first.log_prob)
                note(f"level {at} ids {kind}", first.ids, first.log_prob > -math.inf)
        draft = functions.finish(levels, batch.rows)._replace(live=batch.live)
        drafted = draft.tree.drafted
        for name, values in zip(draft.tree._fields, draft.tree, strict=True):
            note(f"tree {name}", values, None if name == "drafted" else drafted)
        note("origin", draft.origin, drafted)
        alive = torch.cat([alive, drafted.gather(1, batch.rows.score_layout.node_at)], 1)
    inputs = functions.arrange(draft.tree if draft else None, context, batch.rows)
    note("arrange mask", inputs.mask.squeeze(1), alive)
    note("arrange tokens", inputs.tokens, alive)
    note("arrange positions", inputs.positions)
    note("arrange write_at", inputs.write_at)
    raw = logits(1 + shape.draft_len * shape.score_width)
    adjusted = raw - torch.randn(vocab, generator=generator).abs()
    accepted = functions.decide(draft, adjusted, raw, batch.noise, batch.committed, batch.rows)
    emitted = torch.arange(shape.draft_len + 1) <= accepted.length[:, None]
    note("length", accepted.length)
    note("tokens", accepted.tokens, emitted)
    note("log_probs", accepted.log_probs, emitted)
    note("path", accepted.path, emitted[:, 1:])
    for name, values in zip(("auxiliary", "target", "to"), accepted.moves or (), strict=False):
        note(f"moves {name}", values)
    for name, values in zip(("tokens", "lengths", "weights"), accepted.live or (), strict=False):
        note(f"live {name}", values, batch.rows.rule.ge(0) if len(shape.rules) == 1 else torch.tensor(False))
    return found


def random_params(chance: random.Random) -> DecodingParams:
    threshold = chance.choice([0.0, 0.3, 0.8])
    return DecodingParams(
        method=chance.choice([*METHODS, "mtad", "mmtad"]),
        draft_len=chance.randint(1, 5),
        beam_width=chance.randint(1, 5),
        branching=chance.choice([(2, 2, 1, 1), (3, 2), (4, 1, 1)]),
        replacement=chance.random() < 0.5,
        accept_threshold=threshold,
        draft_confidence=chance.choice([None, 0.0, 0.05, 0.4]),
        temperature=chance.choice([0.0, 0.7, 1.0]),
        top_k=chance.choice([0, 1, 3, 10]),
        top_p=chance.choice([0.5, 0.9, 1.0]),
        ignore_eos=chance.random() < 0.5,
    )


@pytest.mark.parametrize("seed", range(60))
def test_compiled_functions_compute_what_eager_ones_do(compiled: CompiledFunctions, seed: int) -> None:
    """Batches of 1 to 6 rows: alike, or different in everything."""
    chance = random.Random(seed)
    vocab, rows = chance.choice([7, 40, 300]), chance.randint(1, 6)
    alike = random_params(chance)
    params = [alike if seed % 2 else random_params(chance) for _ in range(rows)]
    batches = BatchBuilder(vocab, (0, 3))
    for block in range(2):
        committed = [chance.randint(1, 80) for _ in range(rows)]
        last_two = [(chance.randrange(vocab), chance.randrange(vocab)) for _ in range(rows)]
        kept: Beams = [((1, 2), -1.0), ((1, 4), -2.0)]
        beams = [kept if p.spec.live and p.draft_len > 3 and p.beam_width > 1 and block else [] for p in params]
        batch = batches.build(params, last_two, committed, [(row, block) for row in range(rows)], (), beams)
        expected = run_block(TorchFunctions().of(rows, batch.shape, LENGTH), batch, vocab, seed + block)
        found = run_block(compiled.of(rows, batch.shape, LENGTH), batch, vocab, seed + block)
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.name == theirs.name
            assert torch.equal(ours.where, theirs.where), ours.name
            torch.testing.assert_close(ours.kept(), theirs.kept(), rtol=0, atol=1e-5, msg=ours.name)


def test_a_value_is_rounded_alike_wherever_it_is(compiled: CompiledFunctions) -> None:
    """Vectorised kernels end a tensor of odd size by another instruction: rows must not notice."""
    params = DecodingParams(method="mmtad", draft_len=1, beam_width=3, top_k=10)
    logits = 4 * torch.randn(7, 1, 50, generator=torch.Generator().manual_seed(1))

    def joint(rows: list[int]) -> torch.Tensor:
        batch = BatchBuilder(50, ()).build(
            [params] * len(rows), [(1, 2)] * len(rows), [9] * len(rows), [(r, 0) for r in rows]
        )
        functions = compiled.of(len(rows), batch.shape, LENGTH)
        context = Context(batch.last_two, batch.committed, torch.arange(LENGTH))
        begun = functions.begin(context, batch.rows)
        noise, place = batch.noise.levels[0], batch.places[0]
        given = batch.root, begun.sees, logits[rows], noise, place, begun.holds, context, batch.rows
        return functions.grow(1, given).level.log_q.clone()

    together = joint(list(range(7)))
    assert together.isfinite().sum() > 10
    for row in range(7):
        assert torch.equal(joint([row])[0], together[row])


def test_rows_that_ask_for_the_same_share_their_tensors() -> None:
    batches = BatchBuilder(50, (0,))
    one, other = DecodingParams(seed=1), DecodingParams(seed=2, max_tokens=5)
    first = batches.build([one, other], [(1, 2)] * 2, [3, 4], [(1, 0), (2, 0)])
    second = batches.build([other, one], [(5, 6)] * 2, [7, 8], [(1, 0), (2, 1)])
    assert second.rows is first.rows
    assert second.committed.tolist() == [7, 8]
    wider = batches.build([one, replace(other, beam_width=8)], [(1, 2)] * 2, [3, 4], [(1, 0), (2, 0)])
    assert wider.rows is not first.rows
    assert wider.shape.width == 8


def test_steps_of_another_shape_keep_no_memory_of_their_own(compiled: CompiledFunctions) -> None:
    assert not compiled.session("begin").get_session_options().enable_mem_pattern
