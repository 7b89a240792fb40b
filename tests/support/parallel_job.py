"""What torchrun runs on two ranks: a command, logits of shards, texts of a sharded pair; and then one of them hangs.

Given are a port for the ranks of the command to meet at, a folder for their errors, a pair's folder, and folders of
checkpoints.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from engines.base import EngineSpec
from engines.parallel import engine
from engines.parallel.worker import Worker, dist
from engines.placement import Placement
from engines.pytorch.hook import cache_shape
from export.verification.verify import expect, verify
from mtad import LLM, DecodingParams, RuntimeConfig
from runtime.commands.main import main as run_command
from runtime.scheduler.request import Request
from tests.support.fake_cuda import FakeRecorder
from tests.support.integrity import check_loop
from tests.support.waiting import STARTING

LONG = "SELECT name FROM singer WHERE age > 20 ORDER BY age DESC LIMIT 1 -- of the list, naïve " * 2
"""Longer than a kept page of 64 tokens, and than a chunk of prefill."""


def generate(port: str, errors: Path, folder: str) -> None:
    """`mtad generate` in a fork of each rank, as if torchrun had started it: it ends without an error."""
    child = os.fork()
    if child:
        assert os.waitpid(child, 0)[1] == 0
        return
    signal.alarm(int(STARTING))
    os.dup2(os.open(errors / f"errors-{os.environ['RANK']}", os.O_CREAT | os.O_WRONLY), 2)
    os.environ |= {"MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "False"}
    options = ["--method", "mtad", "--max-tokens", "8", "--seed", "2", "--json", "--tensor-parallel", "2"]
    sys.argv = ["mtad", "generate", folder, "def largest", *options]
    run_command()
    sys.exit()


def families(*folders: str) -> None:
    """Each rank opens its shards of these checkpoints, and has their logits.

    They meet at a file: where the pair's ranks meet, addresses of a group that has ended would be found.
    """
    rank, ranks = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    dist.init_process_group(init_method=f"file://{folders[0]}/ranks", rank=rank, world_size=ranks)
    for folder in folders:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        shape = cache_shape(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
        name = type(model).__name__
        spec = EngineSpec(name, *shape, "float32", 4, 256, (0,), "torch", "", {})
        shard = Worker(Path(folder), spec, Placement())
        verify(shard.engine, expect(model, spec))
        whole = sum(parameter.nbytes for parameter in model.parameters())
        assert shard.weights < whole, folder
        if name != "Phi3ForCausalLM":  # its plan shards the weights of attention, but not the heads
            assert shard.engine.spec == replace(spec, kv_heads=spec.kv_heads // 2), folder
    dist.destroy_process_group()


def course(llm: LLM) -> list[list[int]]:
    """Tokens of requests of many methods that join, leave and share prefixes."""
    llm.generate(LONG, DecodingParams(max_tokens=2))
    chosen, requests = random.Random(4), list[Request]()
    methods = ("sample", "speculative", "mtad", "mmtad", "block", "mmtad_sample", "traversal", "relaxed")
    for number, method in enumerate(methods):
        params = DecodingParams(
            method=method, max_tokens=chosen.randint(8, 24), seed=number, ignore_eos=True, draft_len=3, beam_width=2,
            temperature=0.0 if number == 1 else 1.0, repetition_penalty=1.2 if number == 3 else 1.0,
        )  # fmt: skip
        requests.append(llm.add(LONG[: chosen.choice((9, 70, 170))] if number % 2 else f"def largest{number}", params))
        if number == 4:
            llm.cancel(requests[2])
        for _ in range(chosen.randint(0, 2)):
            llm.step()
    while not llm.loop.scheduler.idle:
        llm.step()
    check_loop(llm.loop)
    assert requests[2].finish_reason == "cancelled"
    assert sum(request.statistics.reused_tokens for request in requests) >= 64
    return [request.tokens for request in requests]


def pair(folder: str) -> LLM:
    """A sharded pair that has decoded as the pair in one process does. Returns on rank 0 only."""
    two = LLM(folder, RuntimeConfig(tensor_parallel=2, max_prefill_tokens=32, memory="20MiB"))
    one = LLM(folder, RuntimeConfig(max_prefill_tokens=32, memory="20MiB"))
    assert isinstance(two.pair.target, engine.ParallelEngine)
    assert two.pair.target.cache.page_bytes * 2 == one.pair.target.cache.page_bytes
    assert two.memory.weights < one.memory.weights
    expected = course(one)
    assert course(two) == expected
    # as on a GPU, where a sharded target runs its steps between the parts of a block
    launched = LLM(two.pair, RuntimeConfig(max_prefill_tokens=32), recorder=FakeRecorder())
    assert course(launched) == expected
    return launched


def main(port: str, errors: str, folder: str, *checkpoints: str) -> None:
    """At the end, decode until another rank is gone."""
    generate(port, Path(errors), folder)
    families(*checkpoints)
    llm = pair(folder)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=5))
    while True:
        llm.generate("def", DecodingParams(max_tokens=2))
        print("decoded", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
