"""Captured steps: in memory that never moves, one graph per bucket of shapes, the same logits as without."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from engines.base import Step
from engines.graphs.capture import Uncapturable, Work
from engines.graphs.runner import GraphRunner, StepShape
from tests.support.fake_cuda import FakeRecorder
from tests.support.mock_engine import mock_spec

CAPACITY, VOCAB = 320, 7
SPEC = replace(mock_spec(4, CAPACITY), vocab_size=VOCAB)
LIMITS = (StepShape(1, 100, CAPACITY, 8), StepShape(4, 9, CAPACITY, 9))


class Runner:
    """A `GraphRunner` of a "model" whose logits show all of a step's inputs.

    Attributes:
        bound: steps that were given to it to capture, in order.
        once: steps that it ran without a graph.
    """

    def __init__(self, max_graphs: int = 8) -> None:
        self.bound: list[Step] = []
        self.once: list[Step] = []
        self.recorder = FakeRecorder()
        self.graphs = GraphRunner(self.bind, SPEC, LIMITS, self.recorder, "cpu", max_graphs)

    def bind(self, step: Step) -> Work:
        self.bound.append(step)

        def work() -> None:
            model(step)

        return work

    def run_once(self, step: Step) -> None:
        assert self.recorder.inside
        self.once.append(step)
        model(step)


def model(step: Step) -> torch.Tensor:
    """Logits [R, N, V] to `step.out`, or new; a mask's False columns count for nothing."""
    value = step.tokens + 3 * step.positions + 5 * step.write_at[:, None] + 7 * step.mask.sum(3)[:, 0]
    logits = value[:, step.keep, None] + 0.125 * torch.arange(VOCAB)
    return logits if step.out is None else step.out.copy_(logits)


@pytest.fixture
def runner() -> Runner:
    return Runner()


def step_of(rows: int, steps: int, length: int, kept: int, seed: int = 0, first_row: int = 0) -> Step:
    """A step of random content."""
    draw = partial(torch.randint, generator=torch.Generator().manual_seed(seed))
    return Step(
        tokens=draw(300, (rows, steps)),
        positions=draw(200, (rows, steps)),
        write_at=draw(60, (rows,)),
        mask=draw(2, (rows, 1, steps, length)).bool(),
        keep=draw(steps, (kept,)),
        first_row=first_row,
    )


def test_replayed_steps_give_the_models_logits_whatever_ran_before(runner: Runner) -> None:
    shapes = [(2, 5, 128, 5), (4, 9, 320, 9), (2, 5, 64, 5), (1, 1, 192, 1), (2, 5, 128, 0), (4, 2, 128, 1)]
    for seed, shape in enumerate(shapes * 2):
        step = step_of(*shape, seed=seed)
        assert torch.equal(runner.graphs.replay(step), model(step))
    assert runner.recorder.recorded == len(runner.graphs.captured) == 6


def test_steps_of_any_rows_without_a_graph_give_the_models_logits(runner: Runner) -> None:
    step = step_of(1, 100, 128, 3, first_row=2)
    assert torch.equal(runner.graphs.run(step, runner.run_once), model(step))
    assert [once.first_row for once in runner.once] == [2]
    assert not runner.recorder.recorded


def test_every_shape_lies_at_the_same_addresses(runner: Runner) -> None:
    for shape in ((4, 9, 320, 9), (1, 1, 64, 1), (2, 5, 128, 5)):
        runner.graphs.replay(step_of(*shape))
    for name in ("tokens", "positions", "write_at", "mask", "keep", "out"):
        tensors = [getattr(step, name) for step in runner.bound]
        assert len({tensor.data_ptr() for tensor in tensors}) == 1
        assert all(tensor.is_contiguous() for tensor in tensors)


@pytest.mark.parametrize(("length", "bucket"), [(64, 64), (128, 128), (192, 256), (256, 256), (320, 320)])
def test_masks_are_rounded_to_powers_of_two_pages_within_the_capacity(length: int, bucket: int) -> None:
    shape = StepShape(3, 5, length, 2)
    assert shape.bucket(CAPACITY) == StepShape(3, 5, bucket, 2)


def test_a_step_that_cannot_be_captured_runs_without_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(work: Work) -> Work:
        raise Uncapturable("it looks at the device")

    runner = Runner()
    monkeypatch.setattr(runner.recorder, "record", refuse)
    for seed in range(2):
        step = step_of(2, 3, 64, 1, seed)
        assert torch.equal(runner.graphs.replay(step), model(step))
    assert len(runner.bound) == 1


def test_the_least_recently_used_graph_goes_first() -> None:
    runner = Runner(max_graphs=2)
    for tokens in (1, 2, 1, 3, 1):
        runner.graphs.replay(step_of(2, tokens, 64, 1))
    assert [shape.steps for shape in runner.graphs.captured] == [3, 1]
    assert runner.recorder.recorded == 3
    assert runner.recorder.waits == 1, "it may still be running"
