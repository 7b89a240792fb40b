"""Blocks on a device: recorded, padded, replayed, they give the tokens that the host's give."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

from engines import Engine, EngineSpec, Step
from engines.buffers import leaves
from engines.folder import read_spec
from engines.graphs.capture import CudaRecorder, NoRecorder, Recorder, Uncapturable
from engines.pytorch.engine import TorchEngine
from mtad.errors import InvalidInput
from mtad.methods import METHODS
from mtad.params import DecodingParams
from mtad.rows import LISTED
from mtad.stacking import block_shape
from runtime import LLM, RuntimeConfig
from runtime.constraints.constraint import Constrainer
from runtime.decoder.batch import Batch
from runtime.decoder.batch_builder import BatchBuilder
from runtime.decoder.block import run_block
from runtime.decoder.buckets import Buckets
from runtime.decoder.cuda_graph.block_runner import DeviceBlocks
from runtime.decoder.cuda_graph.device_roles import DeviceAuxiliary, DeviceTarget
from runtime.decoder.cuda_graph.fused import FusedFunctions
from runtime.decoder.eager import TorchFunctions
from runtime.decoder.kv_cache import KvCaches
from runtime.loop import DecodingLoop
from runtime.output.processor import OutputProcessor
from runtime.pair import Pair, open_pair
from runtime.scheduler.request import Request
from runtime.scheduler.scheduler import Scheduler
from scripts.evaluation.decoders import Ours
from scripts.gpu.setup import METHODS as METHODS_TIMED
from tests.runtime.test_schedules import CAPACITY, make_mock, pick_prompt, pick_values
from tests.support.fake_cuda import FakeTorchCuda
from tests.support.fake_gpu import fake_gpu
from tests.support.launches import counted
from tests.support.mock_engine import EOS, VOCAB, CapturableMock, MockEngine, PagedMock, mock_spec, mock_tokenizer
from tests.support.noise import device_numbers
from tests.support.replayed import NoReads, ReplayRecorder

CPU = torch.device("cpu")
NODES = 16


class Device:
    """A loop whose blocks run as on a device, on mock engines.

    Attributes:
        auxiliary, target, recorder, blocks, loop: its parts.
    """

    def __init__(
        self,
        rows: int,
        recorder: Recorder,
        prefill: int = 64,
        prefix_tokens: int = 0,
        engine: Callable[..., MockEngine] = CapturableMock,
        functions: TorchFunctions | None = None,
    ) -> None:
        self.auxiliary, self.target = (engine(mock_spec(rows, CAPACITY), noise) for noise in (0.3, 0.0))
        roles = (
            DeviceAuxiliary(self.auxiliary, VOCAB, functions, self.target, CPU),
            DeviceTarget(self.target, VOCAB, functions),
        )
        self.recorder, self.blocks = recorder, DeviceBlocks.of(*roles, (EOS,), recorder)
        prefixes = self.auxiliary.prefix_cache(prefix_tokens), self.target.prefix_cache(prefix_tokens)
        self.loop = DecodingLoop(
            Scheduler(rows, CAPACITY, max_draft_len=4, max_beam_width=4, max_waiting=64),
            KvCaches(*roles, prefixes, (self.auxiliary, self.target)),
            self.blocks.batches,
            self.blocks.run_block,
            OutputProcessor(
                mock_tokenizer(),
                (EOS,),
                Constrainer(mock_tokenizer(), VOCAB, (EOS,)),
                self.blocks.unrecorded,
            ),
            prefill,
        )

    @property
    def read_back(self) -> Tensor:
        """The memory that the host reads."""
        return self.blocks._read.bytes(0)

    def generate(self, requests: Sequence[tuple[list[int], DecodingParams]], chance: random.Random) -> list[Request]:
        """Requests that join at random times."""
        left = list(reversed([Request(at, prompt, p, p.seed or 0) for at, (prompt, p) in enumerate(requests)]))
        added = left[::-1]
        while left or not self.loop.scheduler.idle:
            for _ in range(min(len(left), chance.choice([0, 1, 3]))):
                self.loop.submit(left.pop())
            self.loop.step()
            self.loop.check_integrity()
        return added


class Copies(TorchDispatchMode):
    """Counts copies to the memory that the host reads."""

    def __init__(self, device: Device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device, self.count = device, 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        if operation.overloadpacket is torch.ops.aten.copy_:
            self.count += args[0].untyped_storage().data_ptr() == self._device.read_back.untyped_storage().data_ptr()
        return result


def fixed(values: dict[str, Any]) -> DecodingParams:
    return DecodingParams.from_dict(values | {"speculation": "fixed"})


@cache
def pool() -> list[tuple[list[int], DecodingParams, list[int], list[float]]]:
    """Requests of every method, and what each gets alone, on the host."""
    chance, entries = random.Random(1), []
    for number in range(60):
        values = pick_values(chance) | {"method": [*METHODS][number % len(METHODS)]}
        prompt, params = pick_prompt(chance), fixed(values)
        request = alone_on_the_host(prompt, params)
        entries.append((prompt, params, request.tokens, request.log_probs))
    return entries


def alone_on_the_host(prompt: list[int], params: DecodingParams) -> Request:
    """A request that has ended. It has drawn the numbers of a device."""
    mock, request = make_mock(rows=1), Request(0, prompt, params, params.seed or 0)
    mock.loop.submit(request)
    with device_numbers():
        while not mock.loop.scheduler.idle:
            mock.loop.step()
    return request


@pytest.mark.parametrize("engine", [CapturableMock, PagedMock, partial(PagedMock, pages=6)])
@pytest.mark.parametrize("seed", [*(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3)), 3])
def test_recorded_blocks_give_every_request_the_tokens_it_gets_alone_on_the_host(
    seed: int, engine: Callable[..., MockEngine]
) -> None:
    """Methods mixed; rows join and leave; prompts are stored beside padded rows; several lengths of masks."""
    chance = random.Random(seed)
    sizes = chance.choice([3, 4, 6]), ReplayRecorder(), chance.choice([3, 64]), chance.choice([0, 256])
    device = Device(*sizes, engine)
    chosen = chance.sample(pool(), 14)
    found = device.generate([entry[:2] for entry in chosen], chance)
    for request, (_, params, tokens, log_probs) in zip(found, chosen, strict=True):
        assert request.tokens == tokens, params
        assert request.log_probs == pytest.approx(log_probs, abs=1e-5)
    assert not device.blocks.unrecorded
    assert device.recorder.replayed > device.blocks.recorded > 3  # type: ignore[attr-defined]


def batch_of(device: Device, params: Sequence[DecodingParams], committed: int = 9) -> Batch:
    rows = len(params)
    last_two, keys = [(3 + row, 5) for row in range(rows)], [(row, 0) for row in range(rows)]
    return device.blocks.batches.build(params, last_two, [committed + row for row in range(rows)], keys)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.slow
def test_the_host_waits_once_a_block_and_reads_one_copy(method: str, rows: int) -> None:
    device = Device(4, recorder := ReplayRecorder())
    params = [DecodingParams(method=method, seed=row, draft_confidence=0.1) for row in range(rows)]
    for _ in range(3):
        batch = batch_of(device, params)
        before = recorder.waits
        with torch.inference_mode(), NoReads(lambda: device.read_back) as reads, Copies(device) as copies:
            block = device.blocks.run_block(batch)
        assert recorder.waits == before + 1
        assert copies.count == 1
        assert reads.count
        assert len(block.tokens) == len(block.log_probs) == len(block.lengths) == len(block.finite) == rows
    assert (device.blocks.recorded, recorder.replayed) == (1, 3)


class OneDevice(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operations on tensors of two devices. One of the host without dimensions may be copied, with a wait."""

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        devices = {tensor.device.type for tensor in leaves((args, kwargs or {}))}
        assert len(devices) < 2, f"{operation} of tensors of {devices}"
        return operation(*args, **(kwargs or {}))


def test_a_tensor_of_the_host_without_dimensions_is_not_overlooked() -> None:
    mode, gpu = fake_gpu()
    with mode, OneDevice():  # type: ignore[no-untyped-call]
        given = torch.ones(3, device=gpu)
        torch.where(given > 0, given, 0.0)
        with pytest.raises(AssertionError, match="tensors of"):
            torch.where(given > 0, given, torch.tensor(0.0))


class Blank(Engine):
    """A step without work."""

    capturable = True

    def step(self, step: Step) -> Tensor:
        given = step.tokens, step.positions, step.write_at, step.mask, step.keep
        assert {tensor.device for tensor in given} == {self.kv.device}
        return torch.zeros(len(step.tokens), len(step.keep), self.spec.vocab_size, device=self.kv.device)


@pytest.mark.parametrize("functions", [TorchFunctions(), FusedFunctions()])
@pytest.mark.parametrize("listed", [LISTED, 5])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.slow
def test_a_block_on_a_gpu_mixes_no_devices_and_asks_it_for_nothing(
    method: str, listed: int, functions: TorchFunctions
) -> None:
    mode, gpu = fake_gpu()
    params = [DecodingParams(method=method, seed=1), DecodingParams(method="bild"), DecodingParams(method=method)]
    params[2] = replace(params[2], top_k=4)  # with few tokens listed, a list beside tables
    batches = BatchBuilder(VOCAB, (EOS,), Buckets(4, CAPACITY, pad=True, pinned=False), listed)
    batch = batches.build(params, [(1, 2)] * 3, [9] * 3, [(0, 0)] * 3)
    with mode, OneDevice(), counted(), torch.inference_mode():  # type: ignore[no-untyped-call]
        auxiliary, target = (Blank(mock_spec(4, CAPACITY), "gpu:0") for _ in range(2))
        roles = (
            DeviceAuxiliary(auxiliary, VOCAB, functions, target, gpu),
            DeviceTarget(target, VOCAB, functions, gpu),
        )
        assert batch.padded
        memory = torch.empty(len(batch.padded.memory), dtype=torch.uint8, device=gpu)
        results = run_block(*roles, batch.padded.over(memory)).results(batch.stops)
        assert {tensor.device for tensor in leaves(results)} == {gpu}
        with pytest.raises(DataDependentOutputException):
            results.length.tolist()


def test_a_prompt_is_sent_to_a_gpu_without_a_wait() -> None:
    sent: list[bool] = []

    class Sent(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if operation is torch.ops.aten._to_copy.default:
                sent.append(kwargs["non_blocking"])
            return operation(*args, **(kwargs or {}))

    mode, gpu = fake_gpu()
    with mode:
        role = DeviceTarget(Blank(mock_spec(4, CAPACITY), "gpu:0"), VOCAB, device=gpu)
        with Sent():  # type: ignore[no-untyped-call]
            role.prefill(2, [3, 4, 5], 0)
    assert sent == [True]


def test_a_mixture_that_looks_at_its_routing_is_found_out_and_runs_unrecorded() -> None:
    class Looking(CapturableMock):
        def step(self, step: Step) -> Tensor:
            return self.run(step) * float(step.tokens.float().mean() >= 0)

    device = Device(2, ReplayRecorder())
    device.target.__class__ = Looking
    entry = pool()[4]
    (found,) = device.generate([entry[:2]], random.Random(0))
    assert found.tokens == entry[2]
    assert device.blocks.recorded == 0
    ((reason, count),) = device.loop.totals.unrecorded.items()
    assert reason == "__float__ of a tensor of the device"
    assert count == found.blocks


def test_a_capture_that_breaks_off_ends_in_an_unrecorded_block_and_is_reported_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    problem = "CUDA error: operation not permitted when stream is capturing"
    cuda = FakeTorchCuda(monkeypatch, problem + "\nCUDA kernel errors might be asynchronously reported")
    device = Device(3, CudaRecorder("cuda"))
    params = [entry[1] for entry in pool()[:2]]
    device.blocks.prepare(params)
    prepared, chosen = cuda.captures, pool()[:6]
    found = device.generate([entry[:2] for entry in chosen], random.Random(4))
    assert [request.tokens for request in found] == [entry[2] for entry in chosen]
    assert device.blocks.recorded == 0
    assert set(device.blocks.unrecorded) == {problem}
    said = [record.getMessage() for record in caplog.records if record.name.startswith("runtime.decoder.cuda_graph")]
    assert [message for message in said if "unrecorded" in message] == [
        f"blocks run unrecorded, as separate kernels: {problem}"
    ]
    before = cuda.captures
    device.generate([entry[:2] for entry in chosen[:1]], random.Random(4))
    device.generate([entry[:2] for entry in chosen[:1]], random.Random(4))
    assert prepared <= before <= cuda.captures <= before + 3, "a kind of block is tried once"


def test_a_wait_is_found_before_anything_is_captured_and_torch_checks_no_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = FakeTorchCuda(monkeypatch)
    recorder = CudaRecorder("cuda")
    with pytest.raises(Uncapturable, match="synchronizing"):
        recorder.record(cuda.wait)
    assert (cuda.captures, cuda.mode) == (0, "default")
    recorder.record(lambda: None)
    assert (cuda.captures, cuda.mode) == (1, "default")
    with pytest.raises(ZeroDivisionError):  # the work's own, which it raises without graphs as well
        recorder.record(lambda: 1 / 0)  # type: ignore[arg-type, return-value]


def test_what_a_recording_reads_lives_as_long_as_it_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph has addresses only: another tensor would have the memory of a timed step's tokens."""
    FakeTorchCuda(monkeypatch)
    device, tokens = Device(1, CudaRecorder("cuda")), torch.zeros(1)
    run = device.blocks.timed(partial(torch.clone, tokens), again=False)
    alive = weakref.ref(tokens)
    del tokens
    run()
    assert alive() is not None
    del run
    assert alive() is None
    device.blocks.prepare([DecodingParams(method="sample")])
    block = weakref.ref(next(iter(device.blocks._blocks.values()))[0])
    gc.disable()
    device.blocks._blocks.clear()
    gc.enable()
    assert block() is None, "a graph that is dropped gives its memory back at once"


def test_what_a_device_draws_is_not_drawn_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtad.noise.host.Draws.into", None)
    device = Device(2, ReplayRecorder())
    batch = batch_of(device, [DecodingParams(method="mmtad", top_k=0, seed=row) for row in range(2)])
    with torch.inference_mode():
        blocks = [device.blocks.run_block(batch).tokens for _ in range(2)]
    assert blocks[0] == blocks[1]


def test_all_methods_that_the_gpu_check_times_need_nine_recordings() -> None:
    class OwnColumns(CapturableMock):
        reads_mask = False

    device = Device(16, ReplayRecorder(), engine=OwnColumns)
    params = [DecodingParams(method=method, speculation="fixed", seed=1, max_tokens=6) for method in METHODS_TIMED]
    device.blocks.prepare(params)
    before = device.blocks.recorded
    assert before == 9
    for p, count in product(params, (1, 2, 5)):
        device.generate([([3, row], p) for row in range(count)], random.Random(count))
    assert device.blocks.recorded == before


def test_blocks_are_padded_as_far_as_costs_nothing_and_to_masks_that_an_engine_has_to_read() -> None:
    def buckets(rows: int, reads_mask: bool = False, capacity: int = 4096) -> Buckets:
        return Buckets(rows, capacity, pad=True, pinned=False, reads_mask=reads_mask)

    plain, chain, tree = (block_shape([DecodingParams(method=m)], VOCAB) for m in ("sample", "speculative", "mmtad"))
    assert (plain.scored, chain.scored, tree.scored) == (0, 4, 16)
    assert [buckets(16).counts(shape) for shape in (plain, chain, tree)] == [[1, 16], [1, 16], [1, 4, 16]]
    assert [buckets(64).counts(shape) for shape in (plain, chain, tree)] == [[1, 64], [1, 16, 64], [1, 4, 16, 64]]
    assert [buckets(rows).counts(tree) for rows in (1, 2, 5, 12)] == [[1], [1, 2], [1, 5], [1, 3, 12]]
    assert [buckets(16).padded(rows, tree) for rows in (1, 2, 4, 5, 16)] == [1, 4, 4, 16, 16]
    assert buckets(16).lengths == [4096]
    assert buckets(16, reads_mask=True).lengths == [1024, 4096]
    assert buckets(16, reads_mask=True, capacity=320).lengths == [320]
    assert [buckets(16, True).length(longest, chain) for longest in (9, 1000, 1021, 4095)] == [1024, 1024, 4096, 4096]


def test_engines_that_cannot_be_part_of_a_graph_run_unpadded_on_the_same_path() -> None:
    """They have no columns behind the capacity, and check that nothing is written there."""
    device = Device(4, ReplayRecorder(), engine=MockEngine)
    chosen = pool()[:13]
    found = device.generate([entry[:2] for entry in chosen], random.Random(3))
    assert [request.tokens for request in found] == [entry[2] for entry in chosen]
    assert device.blocks.recorded == 0
    assert set(device.blocks.unrecorded) == {"steps of MockEngine cannot be part of a recording"}


@pytest.mark.parametrize("straight", [True, False])
def test_weights_for_a_gpu_are_read_straight_to_their_device_or_without_accelerate_moved_there(
    straight: bool, pair_folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only device beside the CPU that every torch has is the one that holds nothing."""
    if not straight:
        monkeypatch.setattr("engines.pytorch.engine.find_spec", lambda name: None)
    folder = pair_folders("torch") / "target"
    engine = TorchEngine(folder, read_spec(folder), "sdpa", "meta")
    assert {p.device.type for p in engine.model.parameters()} == {engine.device.type} == {"meta"}


def test_constrained_blocks_run_unrecorded_and_give_the_tokens_of_the_host() -> None:
    params = DecodingParams(method="mmtad", seed=3, max_tokens=12, min_tokens=9, logit_bias={4: 2.0}, ignore_eos=True)
    params = replace(params, repetition_penalty=1.3, frequency_penalty=0.2, speculation="fixed")
    prompt, plain = [5, 3, 7], pool()[0]
    alone = alone_on_the_host(prompt, params)
    device = Device(4, ReplayRecorder())
    found = device.generate([(prompt, params), plain[:2], (prompt, replace(params, seed=4))], random.Random(1))
    assert found[0].tokens == alone.tokens
    assert found[1].tokens == plain[2]
    assert set(device.blocks.unrecorded) == {"constraints are followed on the host"}


@pytest.mark.parametrize("recorder", [ReplayRecorder, partial(NoRecorder, "cpu")])
def test_prepared_blocks_are_not_recorded_when_they_come(recorder: Callable[[], Recorder]) -> None:
    device = Device(3, recorder())
    params = DecodingParams(method="mmtad", draft_len=3, beam_width=2, seed=1, max_tokens=8, ignore_eos=True)
    device.blocks.prepare([params])
    before = device.blocks.recorded
    assert before == (2 if device.blocks.records else 0)  # of 1 and of 3 rows
    sizes = [key.size for key in device.blocks.keys]
    assert sizes == sorted(sizes, reverse=True)
    assert not device.target.kv.any()
    device.generate([([4, 5], params), ([6], replace(params, seed=2)), ([9] * 70, params)], random.Random(2))
    assert device.blocks.recorded == before
    assert bool(device.blocks.unrecorded) != device.blocks.records


def test_the_block_that_was_not_used_for_longest_goes_first() -> None:
    device = Device(2, ReplayRecorder())
    blocks = device.blocks = DeviceBlocks(
        *(device.blocks._auxiliary, device.blocks._target, device.blocks.batches, device.blocks._buckets),
        *(device.recorder, 2),
    )
    with torch.inference_mode():
        for length in (1, 2, 1, 3, 1):
            blocks.run_block(batch_of(device, [DecodingParams(method="speculative", draft_len=length)]))
    assert [key.shape.draft_len for key in blocks.keys] == [3, 1]
    assert blocks.recorded == 3


def test_a_padded_row_writes_behind_the_capacity_only() -> None:
    """Row 3 of four is padding, and holds a prompt that is being stored."""
    device = Device(4, ReplayRecorder())
    for method in ("mmtad", "specinfer", "mtjd", "sample", "dsbd"):
        for engine in (device.auxiliary, device.target):
            engine.kv.normal_()
        before = [engine.kv[:, :, 3, :, :CAPACITY].clone() for engine in (device.auxiliary, device.target)]
        for _ in range(2):
            with torch.inference_mode():
                device.blocks.run_block(batch_of(device, [DecodingParams(method=method, seed=1)] * 3))
        for engine, kept in zip((device.auxiliary, device.target), before, strict=True):
            assert torch.equal(engine.kv[:, :, 3, :, :CAPACITY], kept), method


class TestTheStandIn:
    """Recorded operations: what a graph would do, and what it would refuse."""

    def test_a_replay_runs_no_python_and_writes_where_the_results_lay(self) -> None:
        given, kept, branch = torch.tensor([1.0, 2.0]), [], [1.0]

        def work() -> None:
            kept.append((given + branch[0]).sort(descending=True).values)

        recorder = ReplayRecorder()
        with recorder.ordered():
            replay = recorder.record(work)
            branch[0] = 100.0
            given.copy_(torch.tensor([7.0, 9.0]))
            replay()
        assert len(kept) == 2
        assert kept[1].tolist() == [10.0, 8.0]

    @pytest.mark.parametrize(
        "look",
        [
            lambda x: x.any().item(),
            lambda x: bool(x.any()),
            lambda x: x.tolist(),
            lambda x: x.numpy(),
            lambda x: x[x > 0],
            lambda x: x.nonzero(),
            lambda x: x.masked_fill_(x > 0, 1.0)[x.long() > 0],
        ],
    )
    def test_work_that_looks_at_its_tensors_cannot_be_recorded(self, look: Callable[[Tensor], object]) -> None:
        recorder = ReplayRecorder()
        with recorder.ordered(), pytest.raises(Uncapturable):
            recorder.record(lambda: look(torch.ones(3)))  # type: ignore[arg-type, return-value]


def test_a_device_that_is_not_there_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    for device in ("cuda", "cuda:3", "gpu", "mps", ""):
        with pytest.raises(InvalidInput, match="device"):
            LLM(tmp_path / "nothing", RuntimeConfig(device=device))


@pytest.fixture(scope="module")
def torch_pair(pair_folders: Callable[[str], Path]) -> Pair:
    """The random Llama pair."""
    return open_pair(pair_folders("torch"))


def test_a_compared_setting_has_its_blocks_recorded_before_its_first_answer(torch_pair: Pair) -> None:
    llm = LLM(torch_pair, RuntimeConfig(prefix_tokens=0), recorder=ReplayRecorder(), record=())
    setting = Ours("sample", llm, DecodingParams(method="sample", max_tokens=60, ignore_eos=True))
    setting.warm_up([[5] * 20])
    assert llm.blocks
    before = llm.blocks.recorded
    assert len(setting.run([[5] * 20], [1])()[0].tokens) == 60
    assert llm.blocks.recorded == before


@pytest.mark.slow
def test_recorded_blocks_of_a_llama_pair_give_the_tokens_of_unrecorded_ones(torch_pair: Pair) -> None:
    """`LLM` as it runs on a GPU, on memory of the host."""
    base = DecodingParams(max_tokens=12, ignore_eos=True, seed=5)
    prompts = ["SELECT name FROM", "def largest(values):", "S", "where do they live? " * 4]
    params = [replace(base, method=m, seed=n) for n, m in enumerate(("mtad", "mmtad", "speculative", "dsbd"))]
    with device_numbers():
        expected = LLM(torch_pair, RuntimeConfig(prefix_tokens=0)).generate(prompts, params)
    device = LLM(torch_pair, RuntimeConfig(max_prefill_tokens=16), recorder=ReplayRecorder(), record=())
    found = device.generate(prompts, params)
    assert [result.token_ids for result in found] == [result.token_ids for result in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
    assert device.blocks
    assert device.blocks.recorded > 2
    assert not device.blocks.unrecorded
    asked = replace(base, top_logprobs=2)
    with device_numbers():
        tops = [
            llm.generate(prompts[:3], asked)[2].top_logprobs
            for llm in (device, LLM(torch_pair, RuntimeConfig(prefix_tokens=0)))
        ]
    assert [[pair[0] for pair in row] for row in tops[0]] == [[pair[0] for pair in row] for row in tops[1]]
    device.measure(again=True)
    adaptive = replace(base, method="speculative", temperature=0.0, speculation="adaptive")
    greedy = replace(base, method="sample", temperature=0.0)
    assert device.generate(prompts[0], adaptive)[0].token_ids == device.generate(prompts[0], greedy)[0].token_ids


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_a_models_step_on_a_gpu_mixes_no_devices_and_asks_it_for_nothing(family: str) -> None:
    mode, gpu = fake_gpu()
    sizes = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    if family == "llama":
        model: Any = LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=32))
    else:
        model = OPTForCausalLM(OPTConfig(**sizes, ffn_dim=32, word_embed_proj_dim=32))
    spec = EngineSpec("Any", 1, 2, 16, 40, "float32", 4, 128, (0,), "torch", "", {})
    with mode, torch.inference_mode():
        for module in model.modules():
            for own in (module._parameters, module._buffers):
                for name, tensor in own.items():
                    if tensor is not None:
                        moved = torch.empty(tensor.shape, dtype=tensor.dtype, device=gpu)
                        own[name] = torch.nn.Parameter(moved, False) if own is module._parameters else moved
        engine = TorchEngine(model, spec, "sdpa", "gpu:0")
        tokens = torch.zeros(4, 3, dtype=torch.int64, device=gpu)
        mask = torch.ones(4, 1, 3, 64, dtype=torch.bool, device=gpu)
        engine.reserve([(0, 3)] * 4)
        logits = engine.launch(Step(tokens, tokens, tokens[:, 0], mask, tokens[0, :2]))
    assert logits.device == gpu
    assert logits.shape == (4, 2, 40)
