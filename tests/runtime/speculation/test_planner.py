"""Adaptive speculation: never slower than none, close to the best fixed draft, and nothing else is touched.

Blocks are simulated: seconds from a table of costs, accepted tokens from coins. Figures are decoding time against the
same texts without a draft, or with the best fixed one; catching up of caches and changes of shape are in the time.
"""

from __future__ import annotations

import math
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest

from mtad.params import DecodingParams
from runtime.speculation.acceptance import Acceptance
from runtime.speculation.planner import Planner, variants
from runtime.speculation.step_costs import BlockShape, HostOverhead, StepCosts, StepTable

ROWS, TOKENS = (1, 2, 4, 8, 16), (1, 2, 3, 5, 9, 17, 33, 65)
CHANGE = 3e-4
"""Seconds that the first block after a change of shape takes longer."""

Predictability = Callable[[int, int], float]
"""(place in the text, beams) -> probability that a drafted token is accepted."""


def table(base: float, each: float) -> StepTable:
    return StepTable(
        ROWS,
        TOKENS,
        tuple(tuple(base + each * r * t for t in TOKENS) for r in ROWS),
        128,
        tuple(each * t / 500 for t in TOKENS),
    )


LOOP = HostOverhead((1, 16), (5e-4, 1e-3), (2e-4, 4e-4))
COSTS = {
    "cpu": StepCosts(table(2e-3, 3.2e-4), table(3e-4, 3e-5), LOOP),  # bound by arithmetic from the first token on
    "gpu": StepCosts(table(2e-2, 1e-5), table(2e-3, 2e-6), LOOP),  # bound by reading the weights
}
CHAIN = DecodingParams(method="speculative", draft_len=8, max_tokens=400, speculation="adaptive")
BEAMS = DecodingParams(method="mtad", draft_len=8, beam_width=4, max_tokens=400, speculation="adaptive")
PLAIN = DecodingParams(method="sample")


@dataclass
class Text:
    """What the planner sees of a request, and how predictable its text is."""

    id: int
    params: DecodingParams
    acceptance: Predictability
    committed: int = 100
    auxiliary_held: int = 98

    @property
    def tokens(self) -> int:
        return self.committed - 100


@dataclass
class World:
    """A pair that decodes.

    Attributes:
        costs: what steps take.
        noise: log-standard deviation of the seconds the planner is told; one block in a hundred is six times as slow.
        error: factor by which blocks with a draft take longer than the planner's table says.
        clock: seconds so far.
        tokens: so far, each block's at its expectation: the luck of the coins guides the planner but is not in figures.
    """

    costs: StepCosts
    seed: int = 0
    noise: float = 0.0
    error: float = 1.0
    clock: float = 0.0
    tokens: float = 0.0
    shapes: list[BlockShape] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.coin, self.jitter = random.Random(self.seed), random.Random(self.seed)

    def block(self, texts: Sequence[Text], used: Sequence[DecodingParams]) -> tuple[list[int], float]:
        """Run one block; what was accepted, and the seconds measured."""
        shape = BlockShape(
            max(p.drafted for p in used), max(p.draft_width for p in used), max(p.score_width for p in used)
        )
        columns = max(text.committed for text in texts)
        for text, p in zip(texts, used, strict=True):
            if p.drafted:
                self.clock += self.costs.catch_up(text.committed - 2 - text.auxiliary_held, columns)
        seconds = self.costs.block(len(texts), shape, columns) * (self.error if shape.draft_len else 1.0)
        seconds += CHANGE if self.shapes and shape != self.shapes[-1] else 0.0
        self.clock += seconds
        self.shapes.append(shape)
        accepted = []
        for text, p in zip(texts, used, strict=True):
            self.tokens += sum(text.acceptance(text.tokens, p.draft_width) ** n for n in range(p.drafted + 1))
            count = 0
            while count < p.drafted and self.coin.random() < text.acceptance(text.tokens + count, p.draft_width):
                count += 1
            accepted.append(count)
            text.committed += count + 1
            if p.drafted:
                text.auxiliary_held = text.committed - 2
        if self.noise:
            seconds *= math.exp(self.jitter.gauss(0, self.noise)) * (6 if self.jitter.random() < 0.01 else 1)
        return accepted, seconds


def decode(
    world: World,
    acceptances: Sequence[Predictability],
    params: DecodingParams,
    planner: Planner | None = None,
    rows: int = 16,
) -> float:
    """Decode a queue of texts, `rows` at once; seconds a token. Without a planner all are drafted as `params` say."""
    waiting: list[Any] = [Text(number, params, acceptance) for number, acceptance in enumerate(acceptances)]
    running: list[Any] = []
    while waiting or running:
        while waiting and len(running) < rows:
            running.append(waiting.pop(0))
        used = planner.plan(running) if planner else [params] * len(running)
        accepted, seconds = world.block(running, used)
        if planner:
            planner.observe(running, used, accepted, seconds)
        for text in [text for text in running if text.tokens >= params.max_tokens]:
            running.remove(text)
            if planner:
                planner.forget(text)
    return world.clock / world.tokens


def always(rate: float) -> Predictability:
    return lambda place, width: rate


def wider_is_better(rate: float) -> Predictability:
    """Twice the beams, 1.25 times the odds."""
    odds = [rate / (1 - rate) * 1.25 ** math.log2(width) for width in range(1, 9)]
    return lambda place, width: odds[width - 1] / (1 + odds[width - 1])


def against(
    kind: str,
    acceptances: Sequence[Predictability],
    params: DecodingParams,
    seeds: int = 8,
    rows: int = 16,
    noise: float = 0.0,
    error: float = 1.0,
) -> list[float]:
    """Time of adaptive drafts once the planner has decoded such texts, per seed; without a draft it is 1."""
    costs, times = COSTS[kind], []
    alone = decode(World(costs), acceptances, replace(PLAIN, max_tokens=params.max_tokens), rows=rows)
    for seed in range(seeds):
        planner = Planner(costs)
        decode(World(costs, seed, noise, error), acceptances, params, planner, rows)
        times.append(decode(World(costs, seed + 100, noise, error), acceptances, params, planner, rows) / alone)
    return times


def best_fixed(kind: str, acceptance: Predictability, params: DecodingParams, error: float = 1.0) -> float:
    """Time of the best fixed draft of one text alone, computed; without a draft it is 1."""
    columns = 100 + params.max_tokens // 2
    alone = COSTS[kind].block(1, BlockShape(0, 0, 0), columns)
    times = [1.0]
    for width in [1] if params.method == "speculative" else [1, 2, 4]:
        rate = acceptance(0, width)
        for length in range(1, params.draft_len + 1):
            tokens = (1 - rate ** (length + 1)) / (1 - rate)
            times.append(COSTS[kind].block(1, BlockShape(length, width, 1), columns) * error / tokens / alone)
    return min(times)


def test_planning_needs_no_torch() -> None:
    code = "import sys, runtime.speculation.planner; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("rate", [0.05, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("rows", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("kind", ["cpu", "gpu"])
@pytest.mark.slow
def test_never_slower_than_no_speculation_at_any_batch_size(kind: str, rows: int, rate: float) -> None:
    adaptive = against(kind, [always(rate)] * rows, CHAIN, seeds=4 if rows < 8 else 2)
    assert statistics.mean(adaptive) <= 1.03


@pytest.mark.parametrize("rate", [0.1, 0.3, 0.7, 0.9, 0.97])
@pytest.mark.parametrize("kind", ["cpu", "gpu"])
@pytest.mark.slow
def test_a_chain_alone_is_as_fast_as_with_the_best_fixed_length(kind: str, rate: float) -> None:
    params = replace(CHAIN, max_tokens=800)
    adaptive = against(kind, [always(rate)], params, seeds=16)
    assert statistics.mean(adaptive) <= 1.05 * best_fixed(kind, always(rate), params)


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.1, 0.5, 0.8])
@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_beams_alone_are_as_fast_as_with_the_best_fixed_length_and_width(kind: str, rate: float) -> None:
    adaptive = against(kind, [wider_is_better(rate)] * 4, BEAMS, seeds=12, rows=1)
    assert statistics.mean(adaptive) <= 1.05 * best_fixed(kind, wider_is_better(rate), BEAMS)


@pytest.mark.parametrize("rate", [0.1, 0.9])
@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_noise_and_a_wrong_table_are_survived(kind: str, rate: float) -> None:
    """Blocks with a draft take 15 % longer than the table says, and every measurement is 10 % off."""
    params = replace(CHAIN, max_tokens=800)
    adaptive = against(kind, [always(rate)], params, noise=0.1, error=1.15)
    assert statistics.mean(adaptive) <= 1.03
    assert statistics.mean(adaptive) <= 1.05 * best_fixed(kind, always(rate), params, error=1.15)


@pytest.mark.parametrize(("kind", "bound"), [("cpu", 1.08), ("gpu", 1.03)])
def test_a_table_that_is_wrong_about_the_auxiliary_is_corrected_by_the_drafts_that_are_run(
    kind: str, bound: float
) -> None:
    """Its steps take 0.4 of what the table says, so long drafts look dear; every measurement is 10 % off."""
    costs, acceptance, times = COSTS[kind], wider_is_better(0.9), []
    steps = costs.auxiliary
    slow = replace(steps, seconds=tuple(tuple(2.5 * s for s in line) for line in steps.seconds))
    alone = decode(World(costs), [acceptance], replace(PLAIN, max_tokens=400))
    for seed in range(6):
        planner = Planner(replace(costs, auxiliary=slow))
        decode(World(costs, seed, 0.1), [acceptance] * 4, BEAMS, planner, 1)
        times.append(decode(World(costs, seed + 100, 0.1), [acceptance], BEAMS, planner, 1) / alone)
    assert statistics.mean(times) <= bound * best_fixed(kind, acceptance, BEAMS)


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_drafts_end_when_a_text_stops_being_predictable_and_come_back(kind: str) -> None:
    down = against(kind, [lambda place, width: 0.9 if place < 500 else 0.1], replace(CHAIN, max_tokens=1000))
    assert statistics.mean(down) < 0.95
    up = against(kind, [lambda place, width: 0.1 if place < 300 else 0.95], replace(CHAIN, max_tokens=1200))
    assert max(up) <= 1.03
    if kind == "gpu":  # on a CPU the auxiliary's catching up costs more than the budget for learning allows
        assert statistics.mean(up) < 0.8


def test_fixed_requests_keep_their_own_parameters() -> None:
    fixed = replace(BEAMS, speculation="fixed", draft_len=3)
    texts: list[Any] = [Text(0, fixed, always(0.0)), Text(1, PLAIN, always(0.0)), Text(2, CHAIN, always(0.0))]
    planner, world = Planner(COSTS["cpu"]), World(COSTS["cpu"])
    for _ in range(50):
        used = planner.plan(texts)
        assert used[0] is fixed
        assert used[1] is PLAIN
        planner.observe(texts, used, *world.block(texts, used))
    assert {shape.draft_len for shape in world.shapes} >= {3}


def test_adaptive_rows_ride_along_with_a_fixed_one() -> None:
    """A block has the length of its longest row; being drafted as far costs the others nothing."""
    fixed = replace(CHAIN, speculation="fixed")
    texts: list[Any] = [Text(0, fixed, always(0.3)), *(Text(n, CHAIN, always(0.3)) for n in range(1, 8))]
    planner, world = Planner(COSTS["cpu"]), World(COSTS["cpu"])
    for _ in range(60):
        used = planner.plan(texts)
        planner.observe(texts, used, *world.block(texts, used))
    assert [p.drafted for p in used] == [8] * 8
    alone = texts[1:]
    for _ in range(60):
        used = planner.plan(alone)
        planner.observe(alone, used, *world.block(alone, used))
    assert max(p.drafted for p in used) < 8


def test_a_draft_never_exceeds_what_was_asked_and_changes_nothing_else() -> None:
    texts: list[Any] = [
        Text(
            n, replace(BEAMS if n % 2 else CHAIN, draft_len=1 + n, beam_width=1 + n % 3, temperature=n / 4), always(0.8)
        )
        for n in range(6)
    ]
    planner, world = Planner(COSTS["gpu"]), World(COSTS["gpu"])
    for _ in range(100):
        used = planner.plan(texts)
        for text, p in zip(texts, used, strict=True):
            asked = text.params
            assert p.drafted <= asked.drafted
            assert p.draft_width <= asked.draft_width
            same = {"method": asked.method, "draft_len": asked.draft_len, "beam_width": asked.beam_width}
            assert replace(p, **same) == asked  # type: ignore[arg-type]
        planner.observe(texts, used, *world.block(texts, used))


def test_where_each_draft_is_recorded_few_are_chosen_among_and_all_are_known() -> None:
    sizes = [(5, 3), (7, 6), (8, 4)]
    texts: list[Any] = [
        Text(n, replace(BEAMS, draft_len=length, beam_width=width, max_tokens=9999), always(0.8 - 0.1 * n))
        for n, (length, width) in enumerate(sizes)
    ]
    planner, world, seen = Planner(COSTS["gpu"], few=True), World(COSTS["gpu"], noise=0.2), set()
    for number in range(400):
        used = planner.plan(texts[: 1 + number // 50 % 3])
        seen |= {(p.method, p.drafted, p.draft_width) for p in used}
        planner.observe(texts[: len(used)], used, *world.block(texts[: len(used)], used))
    assert seen <= {(p.method, p.drafted, p.draft_width) for text in texts for p in variants(text.params)}
    assert len(variants(texts[1].params)) == 4 * 4 + 1
    fixed = replace(CHAIN, speculation="fixed")
    assert variants(fixed) == [fixed]


def test_an_auxiliary_far_behind_is_not_caught_up_for_the_last_tokens() -> None:
    near: Any = Text(0, replace(CHAIN, max_tokens=2000), always(0.8), committed=3000, auxiliary_held=2998)
    behind: Any = Text(1, replace(CHAIN, max_tokens=4), always(0.8), committed=3000, auxiliary_held=0)
    assert Planner(COSTS["cpu"]).plan([near])[0].drafted > 0
    assert Planner(COSTS["cpu"]).plan([behind])[0].drafted == 0


def test_the_same_observations_give_the_same_choices() -> None:
    worlds = [World(COSTS["cpu"], seed=3, noise=0.2) for _ in range(2)]
    for world in worlds:
        decode(world, [always(0.5)] * 6, CHAIN, Planner(COSTS["cpu"]), rows=4)
    assert worlds[0].shapes == worlds[1].shapes


@pytest.mark.parametrize("rate", [0.5, 0.9])
def test_one_slow_block_changes_no_clear_choice(rate: float) -> None:
    slow, usual = (list[Any]([Text(0, replace(CHAIN, max_tokens=9999), always(rate))]) for _ in range(2))
    choices = list[Any]()
    for texts, factor in ((usual, 1.0), (slow, 50.0)):
        planner, world = Planner(COSTS["gpu"]), World(COSTS["gpu"])
        choices.append([])
        for number in range(140):
            used = planner.plan(texts)
            accepted, seconds = world.block(texts, used)
            planner.observe(texts, used, accepted, seconds * (factor if number == 90 else 1.0))
            choices[-1].append(planner._choice)
    assert choices[0] == choices[1]  # three more decisions


@pytest.mark.parametrize("rows", [1, 16])
def test_a_settled_choice_is_kept(rows: int) -> None:
    world = World(COSTS["gpu"], noise=0.05)
    decode(world, [always(0.7)] * rows, replace(CHAIN, max_tokens=1500), Planner(COSTS["gpu"]))
    late = world.shapes[len(world.shapes) // 2 :]
    changes = sum(a != b for a, b in pairwise(late))
    assert changes <= len(late) / 6


def test_times_follow_a_machine_that_slows_down_without_a_change_of_choice() -> None:
    texts: list[Any] = [Text(0, replace(CHAIN, max_tokens=9999), always(0.8))]
    planner, world = Planner(COSTS["gpu"]), World(COSTS["gpu"])
    for number in range(200):
        used = planner.plan(texts)
        accepted, seconds = world.block(texts, used)
        planner.observe(texts, used, accepted, seconds * (3.0 if number >= 100 else 1.0))
    shape = world.shapes[-1]
    assert shape == world.shapes[99]
    assert planner._expect(1, shape, 300) == pytest.approx(3 * COSTS["gpu"].block(1, shape, 320), rel=0.05)
    plain = BlockShape(0, 0, 0)
    assert planner._expect(1, plain, 300) == pytest.approx(3 * COSTS["gpu"].block(1, plain, 320), rel=0.15)


def test_blocks_with_prompts_beside_them_teach_no_times() -> None:
    texts: list[Any] = [Text(0, replace(CHAIN, max_tokens=9999), always(0.8))]
    planner, world = Planner(COSTS["gpu"]), World(COSTS["gpu"])
    for number in range(200):
        used, alone = planner.plan(texts), number % 2 > 0
        accepted, seconds = world.block(texts, used)
        planner.observe(texts, used, accepted, seconds if alone else 5 * seconds, alone)
    shape = world.shapes[-1]
    assert planner._expect(1, shape, 300) == pytest.approx(COSTS["gpu"].block(1, shape, 320), rel=0.05)


def test_a_draft_accepted_in_full_says_nothing_of_greater_depths() -> None:
    acceptance = Acceptance(deepest=4)
    for accepted in (2, 2, 2, 0):
        acceptance.add("speculative", 1, 2, accepted)
    before = acceptance.rates("speculative", 1)
    acceptance.add("speculative", 1, 4, 3)
    after = acceptance.rates("speculative", 1)
    assert before[0] < after[0]
    assert before[1] < after[1]
    prior, weight = Acceptance.PRIOR, Acceptance.WEIGHT
    first = (4 + weight * prior) / (5 + weight)
    second = (4 + weight * first) / (4 + weight)
    third = (1 + weight * second) / (1 + weight)
    assert after == pytest.approx([first, second, third, weight * third / (1 + weight)])
    gains = [sum(math.prod(after[:n]) for n in range(1, length + 1)) for length in range(5)]
    assert acceptance.gains("speculative", 1) == pytest.approx(gains)


def test_planning_a_full_batch_is_some_calls_per_row() -> None:
    texts: list[Any] = [Text(n, replace(CHAIN, max_tokens=9999), always(0.7)) for n in range(16)]
    planner, world, spent = Planner(COSTS["gpu"]), World(COSTS["gpu"]), list[int]()

    def count(frame: object, event: str, argument: object) -> None:
        spent[-1] += event in ("call", "c_call")

    for _ in range(400):
        spent.append(0)
        sys.setprofile(count)
        used = planner.plan(texts)
        sys.setprofile(None)
        accepted, seconds = world.block(texts, used)
        sys.setprofile(count)
        planner.observe(texts, used, accepted, seconds)
        sys.setprofile(None)
    assert statistics.median(spent) < 64 * len(texts)


def test_forgotten_requests_leave_nothing_but_what_was_learnt() -> None:
    planner = Planner(COSTS["gpu"])
    decode(World(COSTS["gpu"]), [always(0.9)] * 40, replace(CHAIN, max_tokens=64), planner, rows=4)
    assert not planner._rows
    unpredictable = Planner(COSTS["gpu"])
    decode(World(COSTS["gpu"]), [always(0.1)] * 40, replace(CHAIN, max_tokens=64), unpredictable, rows=4)
    new: list[Any] = [Text(1000, CHAIN, always(0.5))]
    assert planner.plan(new)[0].drafted > unpredictable.plan(new)[0].drafted


def test_no_request_is_no_plan() -> None:
    assert Planner(COSTS["cpu"]).plan([]) == []
