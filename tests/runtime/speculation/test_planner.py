"""Automatic drafts: never slower than none, close to the best fixed length, and nothing else is touched.

Blocks are simulated: seconds from two rates, accepted tokens from coins. Figures are tokens per second against the same
texts with the best fixed draft, or without one; what the planner spends on finding out is in the time.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest

from mtad.params import DecodingParams
from runtime.scheduler.request import CAUTION, EXPECTED, Acceptance, Request
from runtime.speculation.lengths import DraftCosts, draft_lengths, variants
from runtime.speculation.planner import INTERVAL, Planner

CHAIN = DecodingParams(method="speculative", max_tokens=10_000)
BEAMS = DecodingParams(method="mtad", beam_width=4, max_tokens=10_000)
PLAIN = DecodingParams(method="sample", max_tokens=10_000)
LENGTHS = (0, 1, 2, 4, 8, 16)


def cpu(rows: int, length: int) -> float:
    """Seconds of a block that is bound by arithmetic from the first token on."""
    return 2e-3 + 3.2e-4 * rows * (length + 1) + length * (5e-4 + 3e-5 * rows)


def gpu(rows: int, length: int) -> float:
    """Seconds of a block that is bound by reading the weights."""
    return 2e-2 + 1e-5 * rows * (length + 1) + length * 2.2e-3


@dataclass
class World:
    """A pair that decodes, on a machine whose speed may change.

    Attributes:
        cost: seconds of a block, by rows and length.
        noise: log-standard deviation of the seconds the planner is told; one block in a hundred is six times as slow.
        drift: the same of the machine's speed, which changes over some fifty blocks.
        catch_up: seconds to store a token of a row in the auxiliary's cache, where there was no draft for it.
        clock, tokens: so far; tokens at their expectation, and seconds without noise and drift.
    """

    cost: Callable[[int, int], float]
    noise: float = 0.0
    drift: float = 0.0
    catch_up: float = 0.0
    seed: int = 0
    clock: float = 0.0
    tokens: float = 0.0
    lengths: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._coin, self._jitter = random.Random(self.seed), random.Random(self.seed + 1)
        self._speed, self._missed = 0.0, 0

    def block(
        self, planner: Planner, texts: Sequence[Request], rate: float, alone: bool = True
    ) -> list[DecodingParams]:
        """Plan and run one block, in which each drafted token is accepted with probability `rate`."""
        planner.choose_own(texts)
        used = planner.plan(texts)
        drafted = [params.drafted for params in used]
        length = max(drafted)
        catch_up = self.catch_up * len(texts) * self._missed if length else 0.0
        self._missed = 0 if length else min(100, self._missed + 1)
        seconds = self.cost(len(texts), length)
        self.clock += seconds + catch_up
        self.lengths.append(length)
        accepted = []
        for text, count in zip(texts, drafted, strict=True):
            self.tokens += sum(rate**n for n in range(count + 1))
            accepted.append([*(self._coin.random() < rate for _ in range(count)), False].index(False))
            text.blocks += 1
        self._speed = 0.98 * self._speed + self._jitter.gauss(0, 0.2 * self.drift)
        seconds *= math.exp(self._speed + self._jitter.gauss(0, self.noise)) * (1 if alone else 5)
        seconds *= 6 if self.noise and self._jitter.random() < 0.01 else 1
        planner.observe(texts, used, drafted, accepted, seconds, catch_up, alone)
        return used


def texts_of(*params: DecodingParams) -> list[Request]:
    return [Request(number, [1], own, number) for number, own in enumerate(params)]


def speed(cost: Callable[[int, int], float], rows: int, rate: float, noisy: bool) -> float:
    """Tokens per second of automatic drafts, once the planner has learnt for some blocks; the mean of some worlds."""
    speeds = []
    for seed in range(2):
        planner, texts = Planner(), texts_of(*[CHAIN] * rows)
        world = World(cost, 0.1, 0.3, 3e-5, seed) if noisy else World(cost, seed=seed)
        for number in range(2000):
            if number == 200:
                world.clock = world.tokens = 0.0
            world.block(planner, texts, rate)
        speeds.append(world.tokens / world.clock)
    return statistics.mean(speeds)


def scaled(cost: Callable[[int, int], float], factor: float) -> Callable[[int, int], float]:
    return lambda rows, length: factor * cost(rows, length)


def fixed_speed(cost: Callable[[int, int], float], rows: int, rate: float, length: int) -> float:
    return rows * sum(rate**n for n in range(length + 1)) / cost(rows, length)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("rows", [1, pytest.param(16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("cost", [cpu, gpu])
def test_never_slower_than_no_draft_and_close_to_the_best_length(
    cost: Callable[[int, int], float], rows: int, rate: float
) -> None:
    speeds = {length: fixed_speed(cost, rows, rate, length) for length in LENGTHS}
    assert speed(cost, rows, rate, noisy=False) >= max(0.97 * speeds[0], 0.95 * max(speeds.values()))
    assert speed(cost, rows, rate, noisy=True) >= max(0.93 * speeds[0], 0.9 * max(speeds.values()))


def test_drafts_end_when_texts_stop_being_predictable_and_come_back() -> None:
    planner, world, texts = Planner(), World(gpu), texts_of(CHAIN)
    for rate in (0.9, 0.05, 0.9):
        for _ in range(1500):
            world.block(planner, texts, rate)
        usual = statistics.mode(world.lengths[-200:])
        assert usual == (8 if rate > 0.5 else 0)


def test_drafts_that_follow_the_load_ride_along_with_a_fixed_one() -> None:
    """A block has the length of its longest row; being drafted as far costs the others nothing."""
    planner, world = Planner(), World(cpu)
    fixed, plain, *others = texts_of(replace(CHAIN, draft_len=8), PLAIN, *[CHAIN] * 7)
    for _ in range(60):
        used = world.block(planner, [fixed, plain, *others], 0.7)
    assert (used[0], used[1]) == (fixed.params, PLAIN), "and it keeps its own parameters"
    assert min(params.drafted for params in used[2:]) >= 8
    for _ in range(200):
        used = world.block(planner, others, 0.3)
    assert max(params.drafted for params in used) < 8


def test_a_draft_has_one_of_few_lengths_within_the_limit_and_changes_nothing_else() -> None:
    """Each further length is another shape of a block, and another graph to capture while requests wait."""
    texts = texts_of(*[replace(BEAMS if n % 2 else CHAIN, temperature=n / 4) for n in range(8)])
    planner, world, seen = Planner(longest=9), World(gpu, noise=0.2), set[int]()
    for _ in range(300):
        for text, params in zip(texts, world.block(planner, texts, 0.6), strict=True):
            assert params in variants(text.params, 9)
            assert replace(params, method=text.params.method, draft_len="auto") == text.params
            seen.add(params.drafted)
    assert seen <= {*draft_lengths(9)} == {0, 1, 2, 4, 8}
    assert [len(variants(params)) for params in (CHAIN, BEAMS, PLAIN)] == [6, 5, 1]
    assert variants(replace(CHAIN, draft_len=3)) == [replace(CHAIN, draft_len=3)]


def test_a_plan_follows_from_the_past_alone() -> None:
    """The same observations give the same plans, made before a block; else a lossless method would not stay so."""
    worlds = [World(cpu, seed=3, noise=0.2) for _ in range(2)]
    for world in worlds:
        planner, texts = Planner(), texts_of(*[CHAIN] * 4)
        for _ in range(500):
            world.block(planner, texts, 0.5)
    assert worlds[0].lengths == worlds[1].lengths


def test_drafts_of_a_seed_or_a_lossy_method_depend_on_neither_clock_nor_batch() -> None:
    def lengths(world: World, others: int) -> list[list[int]]:
        planner, own = Planner(costs=DraftCosts(0.2, 0.02)), texts_of(replace(CHAIN, seed=3), BEAMS)
        rest, found = [Request(9 + n, [1], CHAIN, n) for n in range(others)], []
        for _ in range(60):
            planner.choose_own([*own, *rest])
            used = planner.plan([*own, *rest])
            found.append([params.drafted for params in used[:2]])
            accepted = [min(count, text.blocks // 8) for text, count in zip(own, found[-1], strict=True)]
            drafted = [params.drafted for params in used]
            seconds = world.cost(len(used), max(drafted))
            planner.observe([*own, *rest], used, drafted, [*accepted, *[0] * others], seconds, 0.0, True)
            for text in own:
                text.blocks += 1
        return found

    alone = lengths(World(cpu), 0)
    assert alone == lengths(World(gpu), 5)
    assert len({tuple(own) for own in alone}) > 1
    assert min(map(min, alone)) >= 1


def test_own_lengths_follow_how_much_is_accepted_and_what_it_costs() -> None:
    def settled(rate: float, costs: DraftCosts) -> int:
        planner, world, texts = Planner(costs=costs), World(cpu), texts_of(BEAMS)
        for _ in range(200):
            world.block(planner, texts, rate)
        return statistics.mode(world.lengths[100:])

    cheap, dear = DraftCosts(0.02, 0.0), DraftCosts(0.5, 0.0)
    assert settled(0.95, cheap) == 16
    assert settled(0.3, cheap) < settled(0.95, cheap)
    assert settled(0.95, dear) < 16


def test_neither_one_slow_block_nor_a_machine_that_slows_down_changes_a_clear_choice() -> None:
    for slow in (range(400, 401), range(400, 800)):
        planner, world, texts = Planner(), World(gpu), texts_of(CHAIN)
        for number in range(800):
            factor = (50.0 if len(slow) == 1 else 3.0) if number in slow else 1.0
            world.cost = scaled(gpu, factor)
            world.block(planner, texts, 0.9)
            assert number < 200 or planner._choice >= 8


def test_blocks_with_prompts_beside_them_teach_no_times() -> None:
    planner, world, texts = Planner(), World(gpu), texts_of(CHAIN)
    for number in range(400):
        world.block(planner, texts, 0.9, alone=number % 3 > 0)
    for (_, length), seconds in planner._times._seconds.items():
        assert statistics.median(seconds) == pytest.approx(gpu(1, length))


def test_probes_take_little_time_also_where_the_auxiliary_has_to_catch_up_first() -> None:
    planner, world, spent, texts = Planner(), World(cpu, catch_up=1e-4), 0.0, texts_of(CHAIN)
    for number in range(8000):
        before = world.clock
        world.block(planner, texts, 0.05)
        if number >= 1000 and world.lengths[-1]:
            spent += world.clock - before
    assert spent / world.clock < 0.03
    assert set(world.lengths[4000:]) >= {0, 1}, "the length beside the choice is still tried"


@pytest.mark.parametrize("rows", [1, 8])
def test_the_best_length_is_found_again_after_an_early_disturbance(rows: int) -> None:
    speeds = []
    for start in range(8, 72, 4):
        planner, world, texts = Planner(), World(gpu, noise=0.05, seed=start), texts_of(*[CHAIN] * rows)
        for number in range(start + 220):
            world.cost = scaled(gpu, 3.0 if start <= number < start + 20 else 1.0)
            if number == start + 70:
                world.clock = world.tokens = 0.0
            world.block(planner, texts, 0.8)
        speeds.append(world.tokens / world.clock)
    assert statistics.mean(speeds) > 0.95 * max(fixed_speed(gpu, rows, 0.8, length) for length in LENGTHS)


def test_a_length_is_chosen_when_one_half_as_long_was_measured() -> None:
    """A line through two noisy lengths made one four times as long seem free, and blocks of many rows took seconds."""
    for rows in (1, 16):
        planner, world, texts = Planner(), World(lambda rows, length: 1e-2), texts_of(*[CHAIN] * rows)
        for _ in range(60):
            world.block(planner, texts, 0.9)
        firsts = list(dict.fromkeys(world.lengths))
        assert firsts[:4] == [4, 0, 8, 16]


def test_a_text_that_ends_soon_gains_nothing_from_a_long_draft() -> None:
    planner, world, texts = Planner(), World(cpu), texts_of(CHAIN)
    for left, longest in ((1000, 8), (3, 2), (1, 0)):
        texts[0].tokens = [1] * (10_000 - left)
        world.lengths.clear()
        for _ in range(400):
            world.block(planner, texts, 0.95)
        assert statistics.mode(world.lengths[200:]) == longest


def either(rows: int, length: int) -> float:
    """Seconds of a block that is bound by reading the weights for one row, and by arithmetic for several."""
    return gpu(rows, length) if rows == 1 else 8 * cpu(rows, length)


def test_while_requests_join_drafts_are_those_of_the_batch_that_they_will_be_in() -> None:
    planner, world, texts = Planner(), World(either), texts_of(*[CHAIN] * 8)
    for rows in (8, 1):
        for _ in range(100):
            world.block(planner, texts[:rows], 0.6)
    assert planner.plan(texts[:1])[0].drafted > 0
    assert planner.plan(texts[:1], joining=7)[0].drafted == 0
    assert planner.plan(texts[:1])[0].drafted > 0
    assert [planner.plan(texts[:1], joining=7)[0].drafted > 0 for _ in range(100)][::99] == [False, True], "none came"


def test_texts_that_end_soon_are_not_stored_to_be_drafted_for() -> None:
    planner, world, (text, other) = Planner(), World(gpu), texts_of(CHAIN, CHAIN)
    for _ in range(100):
        world.block(planner, [text], 0.6)
    other.tokens, other.auxiliary_seconds, other.auxiliary_stored = [1], 0.1, 100
    planner.record_end(other)
    for left, drafts in ((1000, True), (10, False)):
        late = Request(3, [1] * 200, replace(CHAIN, max_tokens=left), 3)
        late.acceptance, planner.length = text.acceptance, 0
        planner._blocks_left = 0
        assert (planner.plan([late])[0].drafted > 0) is drafts


def test_drafts_have_to_pay_for_storing_prompts_in_the_auxiliarys_cache_too() -> None:
    """At 0.9, a draft of 8 saves 14 ms per token."""
    for auxiliary_seconds, length in ((0.5, 8), (2.5, 0)):
        planner, world, texts = Planner(), World(gpu), texts_of(CHAIN)
        for number in range(400):
            world.block(planner, texts, 0.9)
            if number % 16 == 0:
                ended = Request(99, [1] * 200, CHAIN, 0, tokens=[1] * 100, auxiliary_seconds=auxiliary_seconds)
                ended.auxiliary_stored = 200
                planner.record_end(ended)
        assert statistics.mode(world.lengths[200:]) == length


def test_a_draft_accepted_in_full_says_nothing_of_greater_depths() -> None:
    seen = Acceptance()
    seen.add(2, 2)
    first = (1 + CAUTION * EXPECTED) / (1 + CAUTION)
    second = (1 + CAUTION * first) / (1 + CAUTION)
    assert seen.rates(3) == pytest.approx([first, second, second])
    assert seen.tokens(2) == pytest.approx([1, 1 + first, 1 + first + first * second])
    usual = Acceptance(accepted=[0.0, 3.0], tried=[4.0, 4.0])
    assert Acceptance(usual).rates(2) == pytest.approx(usual.rates(2))


def test_what_has_ended_is_forgotten_and_no_request_is_no_plan() -> None:
    planner, world = Planner(), World(gpu)
    for number in range(40 * INTERVAL):
        world.block(planner, [Request(number // 10, [1], CHAIN, 0)], 0.9)
    assert len(planner._variants) == 1
    assert planner.plan([]) == []
