"""Fused filters and levels of a GPU: few launches, and what the functions of `mtad` give, to the token."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mtad.block import Context
from mtad.distributions.candidates import process
from mtad.distributions.table import Table, tabulate
from mtad.draft.levels import Level
from mtad.draft.live import Beams
from mtad.methods import METHODS
from mtad.noise import device as device_noise
from mtad.params import DecodingParams
from mtad.rows import LISTED, Rows
from mtad.stacking import block_shape, stack_rows
from runtime.decoder.batch_builder import BatchBuilder
from runtime.decoder.buckets import Buckets
from runtime.decoder.cuda_graph import fused
from runtime.decoder.cuda_graph.fused import FusedBlock, FusedFunctions, filter_lists, filter_tables
from runtime.decoder.eager import BlockFunctions
from tests.support.fake_gpu import fake_gpu
from tests.support.launches import counted

V, ROWS, REAL = 1500, 8, 128_256
ROUNDING = 1e-5
SAMPLING: dict[str, dict[str, Any]] = {
    "top_k": {"top_k": 40},
    "top_k, top_p": {"top_k": 100, "top_p": 0.9, "temperature": 0.7},
    "greedy": {"temperature": 0.0},
    "all": {"top_k": 0},
    "top_p": {"top_k": 0, "top_p": 0.95},
    "top_p, min_p": {"top_k": 0, "top_p": 0.9, "min_p": 0.02, "temperature": 1.5},
    "long top_k": {"top_k": 1000, "top_p": 0.99},
    "greedy table": {"top_k": 0, "temperature": 0.0},
}
DRAFTS = tuple(method for method, spec in METHODS.items() if spec.drafter)
LEVELS = 3


@pytest.fixture(autouse=True)
def sorts_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Imports late: what chooses the interpreter runs after this file is read, see `tests/conftest.py`."""
    import triton.language as tl

    from tests.support.interpreter import topk

    monkeypatch.setattr(tl, "topk", topk)


def params(method: str, sampling: str, **values: Any) -> DecodingParams:
    return DecodingParams.from_dict({"method": method, "draft_len": LEVELS} | SAMPLING[sampling] | values)


MIXED = [params(m, s) for m in ("speculative", "mtad", "specinfer", "dsbd") for s in ("top_k", "top_p")]


@pytest.mark.parametrize(
    "rows",
    [
        *([params(m, s)] * ROWS for m in DRAFTS if m not in ("mtad", "specinfer") for s in ("top_k", "top_p")),
        *([params(m, s)] * ROWS for m in ("mtad", "specinfer") for s in SAMPLING),
        MIXED,
    ],
    ids=lambda rows: f"{rows[0].method}-{rows[0].temperature}-{rows[0].top_k}-{rows[0].top_p}-{rows[-1].method}",
)
def test_a_level_launches_at_most_six_kernels(rows: list[DecodingParams]) -> None:
    """What filters it, draws it, and prepares the step over it: a launch each, as torch's operators are."""
    draw = FusedFunctions().draw_noise
    batches = BatchBuilder(REAL, (0,), Buckets(ROWS, 1024, pad=True, pinned=False), draw=draw)
    batch = batches.build(rows, [(1, 2)] * ROWS, [9] * ROWS, [(0, 0)] * ROWS)
    mode, gpu = fake_gpu()
    assert batch.padded
    with mode, torch.inference_mode():
        memory = torch.empty(len(batch.padded.memory), dtype=torch.uint8, device=gpu)
        for _ in range(2):  # the first time makes constants
            with counted() as counts:
                batch = batch.padded.over(memory)
                assert batch.padded
        assert counts.total() == 1, "the noise of the block"
        context = Context(batch.last_two, batch.committed, torch.arange(1024, device=gpu))
        functions = FusedFunctions().of(ROWS, batch.shape, 1024)
        begun = functions.begin(context, batch.rows)
        above, sees = batch.root, begun.sees
        for depth, place in enumerate(batch.places, 1):
            logits = torch.empty(*above.tokens.shape, REAL, device=gpu)
            noise = batch.noise.levels[depth - 1]
            with counted() as counts:
                grown = functions.grow(
                    depth, (above, sees, logits, noise, place, begun.holds, context, batch.rows), batch.live
                )
                functions.hold_back(grown, batch.rows)
            copied = batch.shape.keeps_logits  # by the drafter, before it gives them to `grow`
            assert counts.total() == 2 * len(batch.shape.tables) + 1 <= 6 - copied, counts
            above, sees = grown.level, grown.inputs.mask
        logits = torch.empty(ROWS, 1 + LEVELS * batch.shape.score_width, REAL, device=gpu)
        for filtered in (filter_lists, filter_tables):
            with counted() as counts:
                filtered(logits, batch.rows)
            assert counts.total() == 2, counts


def rows_of(every: Sequence[DecodingParams], vocab: int = V) -> Rows:
    return stack_rows(every, block_shape(every, vocab), vocab, ())


def random_logits(*sizes: int, seed: int = 0) -> Tensor:
    return 3 * torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("vocab", [V, 9000])
def test_lists_are_those_of_the_definition(vocab: int) -> None:
    """Also where few tokens are possible, and whatever temperature and filters do."""
    every = [
        DecodingParams(method="sample", temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        for temperature in (0.3, 1.0, 2.5)
        for top_k in (1, 10, LISTED)
        for top_p, min_p in ((1.0, 0.0), (0.9, 0.0), (0.3, 0.1), (0.0, 0.0))
    ]
    logits, rows = random_logits(len(every), 2, vocab), rows_of(every, vocab)
    logits[5:8, 1, 7:] = -math.inf
    ours, expected = filter_lists(logits, rows), process(logits, rows)
    possible = expected.log_prob > -math.inf
    assert torch.equal(ours.log_prob > -math.inf, possible)
    assert torch.equal(ours.ids[possible], expected.ids[possible])
    assert torch.allclose(ours.log_prob.exp(), expected.log_prob.exp(), atol=ROUNDING)
    assert ours.ids.max() < vocab


def test_of_equal_logits_a_list_has_those_with_the_smaller_ids() -> None:
    logits = torch.zeros(1, 1, 9000)
    logits[0, 0, 4000::1000] = torch.tensor([1.0, -0.0, 1.0, 0.0, 1.0])
    found = filter_lists(logits, rows_of([DecodingParams(method="sample", top_k=5)], 9000))
    assert found.ids.tolist() == [[[4000, 6000, 8000, 0, 1]]]


TABLES = [
    DecodingParams(method="sample", temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    for temperature, min_p in ((0.4, 0.05), (1.5, 0.0))
    for top_k in (0, 200)
    for top_p in (1.0, 0.95, 0.3, 0.0)
]


@pytest.mark.parametrize("ties", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_tables_are_those_of_the_definition(ties: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where few tokens are possible, and where many are equal at the border."""
    monkeypatch.setattr(fused, "CHUNK", 1024)
    every = [*TABLES, DecodingParams(method="mtad", temperature=0.0, top_k=0)]
    logits, rows = random_logits(len(every), 1, V, seed=1), rows_of(every)
    logits = (2 * logits).round() / 2 if ties else logits
    logits[3, 0, 7:] = -math.inf
    same_table(filter_tables(logits, rows), tabulate(logits, rows))


@pytest.mark.slow
def test_a_bin_may_have_more_tokens_than_a_program_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "TILE", 256)
    every = TABLES[-3:-1]
    logits, rows = (random_logits(len(every), 1, V, seed=1) / 10).round(decimals=2), rows_of(every)
    same_table(filter_tables(logits, rows), tabulate(logits, rows))


def same_table(ours: Table, expected: Table) -> None:
    assert torch.equal(ours.largest, expected.largest)
    assert torch.equal(ours.log_prob > -math.inf, expected.log_prob > -math.inf)
    assert torch.allclose(ours.log_prob.exp(), expected.log_prob.exp(), atol=ROUNDING)
    assert torch.allclose(ours.blocks.exp(), expected.blocks.exp(), atol=ROUNDING)


@pytest.mark.slow
def test_tables_of_a_real_vocabulary_are_those_of_the_definition() -> None:
    every = TABLES[::3]
    logits, rows = random_logits(len(every), 1, REAL), rows_of(every, REAL)
    same_table(filter_tables(logits, rows), tabulate(logits, rows))


LIVE: list[Beams] = [[((3, 4), -0.5), ((3, 7), -1.0)], [((5, 8), -0.1)], []]
"""Live beams of three rows; the second's text has ended."""


def levels(
    every: Sequence[DecodingParams], functions: type[BlockFunctions], poison: Any = None, pad: bool = False
) -> Iterator[tuple[Level, Any]]:
    """Levels of a draft, and the inputs of the steps over them; each row's logits depend on nothing but its seed.

    Args:
        pad: the candidates of the batch are rounded up, and a device draws its noise.
    """
    count = len(every)
    batches = BatchBuilder(V, (0, 5, 9), Buckets(count, 1280, pad=True, pinned=False) if pad else None)
    seeds, beams = [p.seed or 0 for p in every], LIVE if any(p.spec.live for p in every) else ()
    batch = batches.build(
        every, [(1, 2)] * count, [9 + seed for seed in seeds], [(seed, 3) for seed in seeds], beams=beams
    )
    if batch.padded:
        batch = batch.padded.over(batch.padded.memory)
    context = Context(batch.last_two, batch.committed, torch.arange(1280))
    own = functions(batch.shape)
    begun = own.begin(context, batch.rows)
    above, sees = batch.root, begun.sees
    for depth, place in enumerate(batch.places, 1):
        own_seeds = [[1000 * depth + 100 * beam + seed for beam in range(above.tokens.shape[1])] for seed in seeds]
        logits = torch.stack([torch.stack([random_logits(V, seed=seed) for seed in row]) for row in own_seeds])
        if poison:
            logits[poison] = math.nan
        noise = batch.noise.levels[depth - 1]
        grown = own.grow(depth, (above, sees, logits, noise, place, begun.holds, context, batch.rows), batch.live)
        own.hold_back(grown, batch.rows)
        above, sees = grown.level, grown.inputs.mask
        yield above, grown.inputs


BATCHES = {
    "chains": [params("speculative", s, seed=n) for n, s in enumerate(("top_k", "top_k, top_p", "greedy"))],
    "beams": [params(m, "top_k", seed=n, beam_width=3 + n) for n, m in enumerate(("mtad", "mmtad", "mmtad_sample"))],
    "greedy beams": [params(m, "greedy", seed=n) for n, m in enumerate(("mtad", "mmtad_sample", "speculative"))],
    "tables": [params("block", s, seed=n) for n, s in enumerate(("all", "top_p", "greedy table", "long top_k"))],
    "tables of beams": [params("mtad", s, seed=n) for n, s in enumerate(("all", "top_p, min_p", "long top_k"))],
    "branches": [
        params("specinfer", "top_k", seed=0, branching=(3, 2, 1)),
        params("traversal", "top_k, top_p", seed=1, branching=(2, 2), replacement=True),
        params("gbv", "greedy", seed=2, beam_width=3),
    ],
    "tables of branches": [
        params("specinfer", "top_p, min_p", seed=0, branching=(3, 2, 1)),
        params("traversal", "all", seed=1, branching=(2, 2), replacement=True),
        params("specinfer", "greedy table", seed=2, branching=(2, 3)),
        params("gbv", "long top_k", seed=3, beam_width=3),
        params("mtad", "top_p", seed=4, beam_width=5),
    ],
    "branches, all of tables": [
        params("specinfer", "top_p", seed=0, branching=(3, 2, 1)),
        params("traversal", "all", seed=1, branching=(2, 2), replacement=True),
        params("gbv", "long top_k", seed=2, beam_width=3),
    ],
    "live": [params("dsbd", s, seed=n) for n, s in enumerate(("top_k", "top_p", "top_k"))],
    "mixed": [
        *(params(m, "top_p", seed=n, beam_width=2 + n) for n, m in enumerate(("mmtad", "bild"))),
        *(params(m, "top_k", seed=2 + n, draft_confidence=0.1) for n, m in enumerate(("mtad", "bild"))),
        params("mmtad_sample", "greedy table", seed=4),
        params("speculative", "top_k", seed=5, draft_len=1),
        params("sample", "all", seed=6),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("pad", [False, True])
@pytest.mark.parametrize("batch", BATCHES)
def test_a_level_is_the_one_that_the_functions_draw(batch: str, pad: bool) -> None:
    both = (levels(BATCHES[batch], functions, pad=pad) for functions in (BlockFunctions, FusedBlock))
    above_width = 1
    for (expected, step), (ours, our_step) in zip(*both, strict=True):
        assert (ours.parents < above_width).all()
        above_width = ours.tokens.shape[1]
        alive = expected.log_q > -math.inf
        assert alive.any()
        torch.testing.assert_close(ours.log_q, expected.log_q, rtol=0, atol=ROUNDING)
        for name in ("tokens", "parents", "paths"):
            assert torch.equal(getattr(ours, name)[alive], getattr(expected, name)[alive]), name
        for name in ("drafted", "growing", "ended"):
            assert torch.equal(getattr(ours, name), getattr(expected, name)), name
        assert torch.equal(our_step.tokens, ours.tokens)
        assert torch.equal(our_step.positions, step.positions)
        assert torch.equal(our_step.write_at, step.write_at)
        assert torch.equal(our_step.mask.squeeze(1)[alive], step.mask.squeeze(1)[alive])
        for one, other in zip((*ours, *our_step), (*expected, *step), strict=True):
            assert (one.shape, one.dtype) == (other.shape, other.dtype)
            assert one.is_contiguous()


@pytest.mark.slow
def test_a_row_draws_in_any_batch_what_it_draws_alone_to_the_bit() -> None:
    """Also where the batch's lists, beams and levels are more."""
    together = list(levels(BATCHES["mixed"], FusedBlock))
    for row in (0, 3, 5):
        own = BATCHES["mixed"][row]
        for (alone, _), (level, _) in zip(levels([own], FusedBlock), together, strict=False):
            width = alone.tokens.shape[1]
            kept = alone.log_q[0] > -math.inf
            assert torch.equal(level.log_q[row, :width], alone.log_q[0])
            assert torch.equal(level.tokens[row, :width][kept], alone.tokens[0][kept])


@pytest.mark.parametrize("batch", sorted(BATCHES.keys() - {"live"}))
def test_a_logit_that_is_no_number_shows_in_its_row_alone(batch: str) -> None:
    """The host fails a request whose log-likelihoods are none, and no other one."""
    for level, _ in levels(BATCHES[batch], FusedBlock, poison=(1, 0, 1234)):
        assert level.log_q[1].isnan().all()
        assert not level.log_q[[0, 2]].isnan().any()
        assert (level.tokens < V).all()
        assert (level.parents == 0).all()
        break


@pytest.mark.parametrize("batch", BATCHES)
def test_the_noise_is_that_of_the_definition(batch: str) -> None:
    every = BATCHES[batch]
    states = torch.tensor([device_noise.begin(p.seed or 0, 7) for p in every])
    scales = torch.tensor([device_noise.scale(p.temperature) for p in every])
    shape = block_shape(every, V)
    ours, expected = (give(states, scales, shape) for give in (FusedFunctions().draw_noise, device_noise.draw))
    assert torch.equal(ours.accept, expected.accept)
    assert torch.equal(ours.bonus, expected.bonus)
    assert torch.equal(ours.nodes, expected.nodes)
    for one, other in zip(ours.levels, expected.levels, strict=True):
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("listed", [LISTED, 5])
def test_blocks_with_fused_functions_give_every_request_the_tokens_it_gets_alone_on_the_host(
    listed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lists and tables, padded rows, beside rows that join and leave."""
    from engines.graphs.capture import NoRecorder
    from tests.support.device_loop import Device, alone_on_the_host, pool

    chosen = [entry[:2] for entry in pool() if len(entry[2]) < 12][:9]
    for module in ("runtime.decoder.cuda_graph.block_runner", "tests.runtime.test_schedules"):
        monkeypatch.setattr(f"{module}.BatchBuilder", partial(BatchBuilder, listed=listed))
    device, drawn = Device(3, NoRecorder("cpu"), functions=FusedFunctions()), Counter[int]()

    def hash_numbers(*given: Any) -> Tensor:
        drawn[len(given[0])] += 1
        return fused_hash(*given)

    fused_hash = fused.hash_numbers
    monkeypatch.setattr(fused, "hash_numbers", hash_numbers)
    found = device.generate(chosen, random.Random(2))
    assert set(drawn) == {1, 3}
    for request, (prompt, own) in zip(found, chosen, strict=True):
        alone = alone_on_the_host(prompt, own)
        assert request.tokens == alone.tokens, own
        assert request.log_probs == pytest.approx(alone.log_probs, abs=1e-5)


@pytest.mark.slow
def test_the_kernels_compile_for_gpus_that_are_not_here(tmp_path: Path) -> None:
    """No register spilled, and no more shared memory than a program may have anywhere."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-m", "tests.support.level_compiler"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    compiled = [json.loads(line) for line in run.stdout.splitlines()]
    assert {kernel["capability"] for kernel in compiled} == {80, 89, 90, 100, 120}
    for kernel in compiled:
        assert kernel["spilled"] == 0, kernel
        assert kernel["shared"] <= 99 * 1024, kernel
