"""Tensor parallelism on two processes of this machine, over gloo: the same logits and tokens as one process has.

Sums over two halves are rounded otherwise than sums over the whole, so logits agree to 1e-5, not to the bit. The
sampled texts below are equal because no decision in them is that close; their seeds are fixed.
"""

from __future__ import annotations

import copy
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    LlamaForCausalLM,
    MixtralConfig,
    OPTConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from engines.folder import read_spec
from engines.parallel.engine import ParallelEngine
from engines.parallel.ranks import ExchangeFailed, ProcessRanks, RankFailed, check_launch, launched_ranks
from engines.parallel.sharding import OWN, Ranks, plan_of, shard, share
from engines.parallel.worker import Worker
from engines.prefix_cache import PrefixCache
from engines.pytorch.hook import StepModel, cache_shape
from export.options import ExportOptions
from export.pair import export_pair
from export.verification.verify import expect, verify
from mtad.errors import InvalidInput
from runtime import LLM, DecodingParams, RuntimeConfig
from runtime.scheduler.request import Request, RequestFailed
from tests.support.fake_cuda import FakeRecorder
from tests.support.families import FAMILIES, GROUPED, HEADS, write_model
from tests.support.steps import columns_of

PairFolders = Callable[[str], Path]

LONG = "SELECT name FROM singer WHERE age > 20 ORDER BY age DESC LIMIT 1 -- of the list, naïve " * 2
"""Longer than a kept block of 64 tokens, and than a turn's prefill."""


class Threads(Ranks):
    """Ranks that are threads of this process."""

    def __init__(self, rank: int, parts: list[Tensor | None], barrier: threading.Barrier) -> None:
        super().__init__(rank, len(parts))
        self._parts, self._barrier = parts, barrier

    def sum(self, part: Tensor) -> Tensor:
        return torch.stack(self._all(part)).sum(0)

    def gather(self, part: Tensor) -> Tensor:
        return torch.cat(self._all(part), -1)

    def _all(self, part: Tensor) -> list[Tensor]:
        self._parts[self.rank] = part
        self._barrier.wait()
        found = [each for each in self._parts if each is not None]
        self._barrier.wait()
        return found


@torch.inference_mode()
def logits(model: PreTrainedModel, layers: int, heads: int, dim: int) -> Tensor:
    """Logits of 2 texts of 8 tokens, through the hook."""
    tokens, at = torch.arange(16).view(2, 8) * 7, torch.arange(8)
    caches = [[torch.zeros(2, heads, 64, dim) for _ in range(layers)] for _ in range(2)]
    mask = (torch.arange(64) <= at[:, None]).expand(2, 1, 8, 64)
    step = StepModel(model)
    found: Tensor = step(tokens, at.expand(2, 8), mask, torch.zeros(2, dtype=torch.int64), at, *caches)[0]
    return found


@pytest.mark.parametrize(
    ("family", "world", "vocab_size"),
    [
        ("qwen2", 2, 320),
        ("qwen3", 2, 320),
        ("mistral", 2, 320),
        ("gemma-3", 2, 320),
        ("gemma-2", 2, 320),
        ("gpt-neox", 4, 320),
        ("phi-3", 2, 320),
        ("llama-3", 2, 319),
        ("opt", 4, 320),
        ("opt-350m", 2, 319),
    ],
)
def test_each_rank_has_its_heads_and_all_have_the_models_logits(family: str, world: int, vocab_size: int) -> None:
    config = FAMILIES[family](2)
    config.vocab_size = vocab_size
    torch.manual_seed(1)
    whole = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    layers, heads, dim, _ = cache_shape(whole)
    barrier, parts, found = threading.Barrier(world), list[Tensor | None]([None] * world), dict[int, Tensor]()
    mine = heads if family == "phi-3" else heads // world  # the plan of Phi-3 divides its weights, but not its heads

    def run(rank: int) -> None:
        model = copy.deepcopy(whole)
        shard(model, Threads(rank, parts, barrier))
        found[rank] = logits(model, layers, mine, dim)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wanted = logits(whole, layers, heads, dim)
    assert wanted.std() > 0.1
    for rank in range(world):
        torch.testing.assert_close(found[rank], wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (BloomConfig(vocab_size=320, hidden_size=64, n_layer=1, n_head=4), "no tensor-parallel plan for Bloom"),
        (
            OPTConfig(**{**HEADS, "num_attention_heads": 1}, ffn_dim=96, num_hidden_layers=1),
            "1 num_heads of .* are not divisible",
        ),
        (FAMILIES["gpt-2"](1), "no tensor-parallel plan for GPT2LMHeadModel; leave it out"),
        (FAMILIES["llama-3"](1).__class__(**{**GROUPED, "intermediate_size": 97}), "97 outputs .* are not divisible"),
        (MixtralConfig(**GROUPED, num_hidden_layers=1, num_local_experts=2), "MixtralForCausalLM shards .* by '"),
    ],
)
def test_what_cannot_be_divided_is_refused_by_name(config: PretrainedConfig, problem: str) -> None:
    with pytest.raises(InvalidInput, match=problem):
        shard(AutoModelForCausalLM.from_config(config), Ranks(0, 2))


@pytest.mark.slow
def test_a_pair_that_cannot_be_divided_is_refused_before_a_process_starts(
    pair_folders: PairFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*args: object, **kwargs: object) -> None:
        pytest.fail("a process was started")

    monkeypatch.setattr(subprocess, "Popen", started)
    for world, problem in ((0, "at least 1"), (3, "4 attention heads"), (4, "2 KV heads")):
        with pytest.raises(InvalidInput, match=problem):
            LLM(pair_folders("torch"), RuntimeConfig(tensor_parallel=world))
    with pytest.raises(InvalidInput, match="format onnx runs on one device"):
        LLM(pair_folders("onnx"), RuntimeConfig(tensor_parallel=2))
    with pytest.raises(InvalidInput, match="option of format onnx"):
        LLM(pair_folders("torch"), RuntimeConfig(tensor_parallel=2, provider="cpu"))
    told = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InvalidInput, match="torchrun started 4 processes"):
        LLM(pair_folders("torch"), RuntimeConfig(tensor_parallel=2))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(InvalidInput, match="there are 1 GPUs; each rank needs one"):
        check_launch(4, "cuda")
    with pytest.raises(InvalidInput, match="CUDA_VISIBLE_DEVICES"):
        check_launch(4, "cuda:1")


def test_a_plan_of_ours_never_replaces_transformers_own() -> None:
    model = AutoModelForCausalLM.from_config(FAMILIES["opt"](1))
    assert plan_of(model) == OWN[type(model).__name__]
    model.config.base_model_tp_plan = {"all.of.it": "colwise"}
    assert plan_of(model) == {f"{model.base_model_prefix}.all.of.it": "colwise"}


def test_a_plan_of_ours_that_does_not_fit_the_installed_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OWN, "OPTForCausalLM", {"model.decoder.blocks.*.fc1": "colwise"})
    with pytest.raises(InvalidInput, match=r"has no model.decoder.blocks.\*.fc1"):
        shard(AutoModelForCausalLM.from_config(FAMILIES["opt"](1)), Ranks(0, 2))


@pytest.mark.parametrize(
    ("family", "divided"),
    [
        ("llama-3", r".*_proj\.weight"),
        ("opt", r".*([qkv]_proj|fc1)\.(weight|bias)|.*(out_proj|fc2)\.weight"),
    ],
)
def test_memory_counts_what_a_rank_has(pair_folders: PairFolders, tmp_path: Path, family: str, divided: str) -> None:
    model = AutoModelForCausalLM.from_config(FAMILIES[family](2))
    model.config.save_pretrained(tmp_path)
    heads = cache_shape(model)[1]
    spec = replace(read_spec(pair_folders("torch") / "target"), kv_heads=heads)
    half, weights = share(tmp_path, spec, 2)
    assert half == replace(spec, kv_heads=heads // 2)
    sizes = {name: each.numel() for name, each in model.named_parameters(remove_duplicate=False)}  # a tied head, too
    halves = [name for name in sizes if re.fullmatch(rf"{divided}|lm_head\.weight", name)]
    assert weights == (sum(sizes.values()) - sum(sizes[name] for name in halves) // 2) * 4


def parallel(llm: LLM) -> ParallelEngine:
    assert isinstance(llm.pair.target, ParallelEngine)
    return llm.pair.target


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sent", "problem"), [(signal.SIGKILL, "was ended by SIGKILL"), (signal.SIGSTOP, "has not answered")]
)
def test_a_rank_that_is_gone_is_named_and_nothing_hangs(
    pair_folders: PairFolders, monkeypatch: pytest.MonkeyPatch, sent: signal.Signals, problem: str
) -> None:
    monkeypatch.setattr("engines.parallel.ranks.TIMEOUT", 10.0 if sent == signal.SIGSTOP else 60.0)
    llm = LLM(pair_folders("torch"), RuntimeConfig(tensor_parallel=2))
    (process,) = parallel(llm).worker.ranks.processes.values()
    try:
        llm.generate("def", DecodingParams(max_tokens=2))
        os.kill(process.pid, sent)
        with pytest.raises(RankFailed, match=f"rank 1 of the target: {problem}") as failed:
            llm.generate("def", DecodingParams(max_tokens=8))
        assert failed.value.ranks == (1,)
    finally:
        parallel(llm).close()
    assert process.poll() is not None, "it is left behind"


class Signs:
    """A store with what ranks have published, and processes with exit codes."""

    def __init__(self, published: dict[str, str], codes: dict[int, list[int | None]]) -> None:
        self.published = published
        polls = {rank: chain(each, repeat(each[-1])) for rank, each in codes.items()}
        self.processes = {rank: Mock(poll=Mock(side_effect=each)) for rank, each in polls.items()}

    def check(self, keys: list[str]) -> bool:
        return all(key in self.published for key in keys)

    def get(self, key: str) -> bytes:
        return self.published[key].encode()


@pytest.mark.parametrize(
    ("published", "codes", "expected"),
    [
        ({}, {1: [None, None, -9], 2: [None]}, "rank 1 of the target: was ended by SIGKILL"),
        ({"alone/2": ""}, {1: [None, 1], 2: [1]}, "rank 1 of the target: ended with exit code 1"),
        ({"alone/1": "", "failed/2": "KeyError: 7"}, {1: [1], 2: [1]}, "rank 2 of the target: KeyError: 7"),
        ({"alone/1": ""}, {1: [1], 2: [None]}, "rank 2 of the target: has not answered"),
        ({"alone/1": ""}, {}, "rank 2 of the target: has not answered"),
        ({"alone/1": "", "alone/2": ""}, {}, "some rank of the target: an exchange broke off: reset by peer"),
    ],
)
def test_the_rank_that_others_broke_off_because_of_is_named(
    monkeypatch: pytest.MonkeyPatch, published: dict[str, str], codes: dict[int, list[int | None]], expected: str
) -> None:
    monkeypatch.setattr("engines.parallel.ranks.SILENT", 0.3)
    signs = Signs(published, codes)
    found = ProcessRanks(0, 3, signs, signs.processes).diagnose(ExchangeFailed("reset by peer\n.."))
    assert expected in str(found)


@pytest.mark.slow
def test_a_pair_divided_by_a_plan_of_ours_has_the_logits_and_tokens_of_one_process(tmp_path: Path) -> None:
    config = FAMILIES["opt"](2)
    target, auxiliary = (write_model(tmp_path / str(noise), config, noise) for noise in (0.0, 0.1))
    export_pair(tmp_path / "pair", ExportOptions(str(target), str(auxiliary), rows=4, capacity=256, format="torch"))
    params = [DecodingParams(method=method, max_tokens=12, seed=2) for method in ("sample", "speculative", "mtad")]
    expected = [each.token_ids for each in LLM(tmp_path / "pair").generate(["def largest"] * 3, params)]
    llm = LLM(tmp_path / "pair", RuntimeConfig(tensor_parallel=2))
    try:
        reference = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32, attn_implementation="eager")
        engine = parallel(llm)
        assert verify(engine, expect(reference.eval(), engine.spec, seed=1)) <= 1e-5
        assert [each.token_ids for each in llm.generate(["def largest"] * 3, params)] == expected
    finally:
        parallel(llm).close()


@pytest.mark.slow
def test_under_torchrun_one_process_prints_and_all_end(pair_folders: PairFolders) -> None:
    params = DecodingParams(method="mtad", max_tokens=8, seed=2)
    options = ["--method", "mtad", "--max-tokens", "8", "--seed", "2", "--json", "--tensor-parallel", "2"]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launch, "-m", "runtime.commands.main", "generate", str(pair_folders("torch")), "def largest", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1200)
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    expected = LLM(pair_folders("torch")).generate("def largest", params)
    assert [answer["token_ids"] for answer in answers] == [expected[0].token_ids]
    assert "Traceback" not in done.stderr


@pytest.fixture(scope="module")
def two(pair_folders: PairFolders) -> Iterator[LLM]:
    """The pair, its target on two ranks."""
    llm = LLM(pair_folders("torch"), RuntimeConfig(tensor_parallel=2, max_prefill_tokens=32))
    yield llm
    parallel(llm).close()
    assert [process.returncode for process in parallel(llm).worker.ranks.processes.values()] == [0]
    with pytest.raises(RequestFailed, match="was closed"):
        llm.generate("def")


@pytest.fixture(scope="module")
def one(pair_folders: PairFolders) -> LLM:
    return LLM(pair_folders("torch"), RuntimeConfig(max_prefill_tokens=32))


@pytest.mark.slow
def test_logits_of_ragged_rows_with_chain_and_tree_are_the_checkpoints(two: LLM, reference: LlamaForCausalLM) -> None:
    assert verify(parallel(two), expect(reference, parallel(two).spec, seed=1)) <= 1e-5


@pytest.mark.slow
def test_each_rank_has_half_of_the_cache(two: LLM, one: LLM) -> None:
    params = DecodingParams(method="speculative", max_tokens=8, seed=1, ignore_eos=True)
    for llm in (one, two):
        llm.generate(LONG, params)
    ours, whole = parallel(two).worker.engine, one.pair.target
    assert ours.spec.kv_heads == 1
    assert ours.kv.nbytes * 2 == whole.kv.nbytes
    assert two.memory.page < one.memory.page
    stored = []
    for llm, engine in ((two, ours), (one, whole)):
        assert llm.loop.caches.prefixes is not None
        count = llm.loop.caches.prefixes[1].restore(0, one.pair.tokenizer(LONG).input_ids)
        assert count >= 64
        stored.append(columns_of(engine)[:, :, 0, 0, :count])
        llm.pair.target.free_row(0)
    torch.testing.assert_close(*stored, rtol=1e-5, atol=1e-5)


def course(llm: LLM) -> list[list[int]]:
    """Tokens of requests of many methods that join, leave and share prefixes, over a cache that is kept meanwhile."""
    llm.generate(LONG, DecodingParams(max_tokens=2))
    chosen, requests = random.Random(4), list[Request]()
    methods = ("sample", "speculative", "mtad", "mmtad", "specinfer", "mmtad_sample", "traversal", "modal")
    for number, method in enumerate(methods):
        params = DecodingParams(
            method=method, max_tokens=chosen.randint(8, 24), seed=number, ignore_eos=True, draft_len=3, beam_width=2,
            temperature=0.0 if number == 1 else 1.0, repetition_penalty=1.2 if number == 3 else 1.0,
        )  # fmt: skip
        requests.append(llm.add(LONG[: chosen.choice((9, 70, 170))] if number % 2 else f"def largest{number}", params))
        if number == 4:
            llm.cancel(requests[2])
        if number == 5:
            with llm.pair.target.kept(slice(None)), torch.inference_mode():
                for row in range(llm.pair.target.spec.rows):
                    llm.pair.target.clear_row(row)
        for _ in range(chosen.randint(0, 2)):
            llm.step()
    while not llm.loop.scheduler.idle:
        llm.step()
    llm.loop.check_integrity()
    assert requests[2].finish_reason == "cancelled"
    assert sum(request.statistics.reused_tokens for request in requests) >= 64
    return [request.tokens for request in requests]


@pytest.mark.slow
def test_a_mixed_batch_has_the_tokens_of_one_process(two: LLM, one: LLM) -> None:
    assert course(two) == course(one)


@pytest.mark.slow
def test_blocks_launched_without_waiting_are_done_on_every_rank(two: LLM, one: LLM) -> None:
    """As on a GPU, where the target of a divided pair runs its steps between the parts of a block."""
    launched = LLM(two.pair, RuntimeConfig(max_prefill_tokens=32), recorder=FakeRecorder())
    assert course(launched) == course(LLM(one.pair, RuntimeConfig(max_prefill_tokens=32)))
    assert launched.blocks is not None
    assert not launched.blocks.records


@pytest.mark.slow
def test_ranks_that_have_not_done_the_same_are_found(two: LLM) -> None:
    engine = parallel(two)
    engine.check_integrity()
    engine.reserve([(0, 64)])
    engine.worker.send_command("prefixes.store", 0, list(range(64)))  # and rank 0 does not
    with pytest.raises(RankFailed, match=r"rank 1 .* has not done what rank 0 has"):
        two.loop.check_integrity()
    with pytest.raises(RankFailed, match="rank 1"):  # from then on
        engine.clear_row(0)
    engine._broken.clear()
    PrefixCache.store(engine.worker.prefixes, 0, range(64))  # now it has, too
    engine.free_row(0)
    two.loop.check_integrity()


def test_ranks_that_no_runtime_has_asked_to_keep_prefixes_can_be_compared() -> None:
    assert Worker(Mock(gather_objects=lambda state: [state])).fingerprints() == [(0, 0)]


def test_only_what_was_launched_as_a_rank_is_one() -> None:
    assert launched_ranks({"RANK": "1"}) is None
    told = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "here", "MASTER_PORT": "7"}
    assert launched_ranks(told) == (1, 2)
