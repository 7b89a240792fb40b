"""The table of step costs: monotone, exact at its points, refused when malformed, true to the engines."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engines.base import KV_PAGE
from engines.graphs.capture import Work
from engines.pytorch.paged_engine import PagedEngine
from mtad.errors import InvalidInput
from runtime import LLM
from runtime.speculation.profiler import measure_costs
from runtime.speculation.step_costs import BlockShape, HostOverhead, StepCosts, StepTable
from tests.support.device_loop import Device
from tests.support.replayed import ReplayRecorder

TABLE = StepTable((1, 4, 8), (1, 2, 5), ((2.0, 3.0, 3.5), (4.0, 5.0, 9.0), (7.0, 9.0, 16.0)), 64, (0.01, 0.02, 0.05))
COSTS = StepCosts(TABLE, StepTable((1,), (1, 2), ((0.25, 0.5),), 64), HostOverhead((1, 8), (1.0, 2.0), (0.1, 0.2)))


def test_the_table_needs_no_torch() -> None:
    code = "import sys, runtime.speculation.step_costs; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_measured_points_are_given_back_and_what_lies_between_is_on_the_line() -> None:
    assert [TABLE.at(r, t, 64) for r, t in ((1, 1), (4, 5), (8, 2))] == [2.0, 9.0, 9.0]
    assert TABLE.at(1, 3, 64) == pytest.approx(3.0 + 0.5 / 3)
    assert TABLE.at(6, 1, 64) == pytest.approx(5.5)


def test_more_rows_tokens_or_columns_never_cost_less() -> None:
    for columns in (1, 64, 500):
        grid = [[TABLE.at(rows, tokens, columns) for tokens in range(1, 40)] for rows in range(1, 40)]
        assert all(line == sorted(line) for line in grid)
        assert all(list(column) == sorted(column) for column in zip(*grid, strict=True))
    assert TABLE.at(4, 3, 128) - TABLE.at(4, 3, 64) == pytest.approx(4 * 64 * 0.03)


def test_a_flat_device_does_not_stay_flat_beyond_what_was_measured() -> None:
    flat = StepTable((1, 2), (1, 8), ((1.0, 1.0), (1.0, 1.0)), 64)
    assert flat.at(2, 8, 64) == 1.0
    assert flat.at(2, 64, 64) > 4.0
    assert flat.at(64, 1, 64) > 16.0


def test_a_block_is_its_steps_and_the_hosts_overhead() -> None:
    assert COSTS.block(1, BlockShape(0, 0, 0), 64) == 2.0 + 1.0
    chain = COSTS.block(1, BlockShape(4, 1, 1), 64)
    assert chain == pytest.approx(0.5 + 3 * 0.25 + 3.5 + 1.0 + 4 * 0.1)
    beams = COSTS.block(8, BlockShape(4, 2, 1), 64)
    assert beams == pytest.approx(16.0 + 4 * COSTS.auxiliary.at(8, 2, 64) + 2.0 + 4 * 0.2)
    assert COSTS.block(8, BlockShape(4, 2, 2), 64) > beams
    assert COSTS.catch_up(0, 64) == 0.0
    assert COSTS.catch_up(300, 64) > COSTS.catch_up(30, 64) > 0


def test_a_table_survives_json() -> None:
    assert StepCosts.from_dict(json.loads(json.dumps(COSTS.to_dict()))) == COSTS


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("target",), None),
        (("target", "rows"), [1, 4]),
        (("target", "rows"), [4, 1, 8]),
        (("target", "rows"), []),
        (("target", "tokens"), [0, 2, 5]),
        (("target", "tokens"), [1, 2.5, 5]),
        (("target", "seconds"), [[1.0, 2.0], [1.0, 2.0], [1.0, 2.0]]),
        (("target", "seconds"), [[1.0, 2.0, -3.0]] * 3),
        (("target", "seconds"), [[1.0, 2.0, "3"]] * 3),
        (("target", "columns"), 0),
        (("target", "growth"), [float("nan")] * 3),
        (("auxiliary", "other"), 1),
        (("host", "block"), [1.0]),
        (("host", "level"), [True, False]),
        (("other",), {}),
    ],
)
def test_a_malformed_table_is_refused(path: tuple[str, ...], value: object) -> None:
    values: dict[str, Any] = copy.deepcopy(COSTS.to_dict())
    at = values
    for name in path[:-1]:
        at = at[name]
    at[path[-1]] = value
    with pytest.raises(InvalidInput, match="costs"):
        StepCosts.from_dict(values)


def test_what_is_no_table_is_refused() -> None:
    nothing: list[Any] = [{}, {"target": {}}, [], None]
    for values in nothing:
        with pytest.raises(InvalidInput, match="measure it again"):
            StepCosts.from_dict(values)


def test_a_measured_table_is_monotone_covers_the_rows_and_leaves_the_caches_as_they_were(llm: LLM) -> None:
    """Also while rows are held: the whole caches are never copied, as they may take most of a GPU."""
    pair = llm.pair
    engines = pair.auxiliary, pair.target
    held = [engine.kv.clone() for engine in engines]
    for engine in engines:
        engine.kv.normal_()
    needed = [slice(2 * KV_PAGE if isinstance(engine, PagedEngine) else 0, None) for engine in engines]
    before = [engine.kv[..., part, :].clone() for engine, part in zip(engines, needed, strict=True)]
    with Largest() as copied:
        costs = measure_costs(pair.auxiliary, pair.target, llm.runner, 3, 2, budget=0.2)
    assert copied.elements <= pair.target.kv.numel() // 2
    for table in (costs.target, costs.auxiliary):
        assert table.rows == (1, 4)
        assert table.tokens[:2] == (1, 5)
        assert all(list(line) == sorted(line) for line in table.seconds)
        assert all(list(column) == sorted(column) for column in zip(*table.seconds, strict=True))
        assert min(table.seconds[0]) > 0
    assert costs.host.rows == (1, 4)
    assert min(costs.host.block) >= 0
    assert StepCosts.from_dict(costs.to_dict()) == costs
    for engine, part, kept, first in zip(engines, needed, before, held, strict=True):
        assert torch.equal(engine.kv[..., part, :], kept)
        engine.kv.copy_(first)


class Largest(TorchDispatchMode):
    """The elements of the largest copy that is made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operation is torch.ops.aten.clone.default:
            self.elements = max(self.elements, args[0].numel())
        return operation(*args, **(kwargs or {}))


class SlowToRecord(ReplayRecorder):
    """A recording takes a second, and a launch a thousandth, by a clock of its own."""

    now = 0.0

    def record(self, work: Work) -> Work:
        launch = super().record(work)
        self.now += 1.0

        def timed() -> None:
            self.now += 0.001
            launch()

        return timed


def test_the_time_that_recording_takes_is_none_of_the_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(4, recorder := SlowToRecord())
    clock = SimpleNamespace(perf_counter=lambda: recorder.now)
    for module in ("runtime.speculation.profiler", "runtime.decoder.cuda_graph.block_runner"):
        monkeypatch.setattr(f"{module}.time", clock)
    engines, blocks = (device.auxiliary, device.target), device.blocks
    costs = measure_costs(*engines, blocks, max_draft_len=4, max_beam_width=4, budget=0.1, blocks=blocks)
    assert (costs.target.tokens, costs.auxiliary.tokens) == ((1, 5, 17), (1, 5, 17, 64))
    assert max(map(max, costs.target.seconds)) == pytest.approx(0.001)
