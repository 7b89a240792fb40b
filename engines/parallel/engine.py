"""A target sharded over several processes: rank 0 decides everything, the others make the same calls on their shards.

Rank 0 sends what is done to the target's engine and its cache; requests, rules and the auxiliary are its own. So there
is nothing that ranks could decide differently, and it does not matter whether their logits agree to the bit.
"""

from __future__ import annotations

import itertools
import logging
import os
import sys
import weakref
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import ClassVar

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig

from engines.base import KV_PAGE, Engine, EngineSpec, Step
from engines.cache.base import KvCache
from engines.cache.prefix import PrefixCache
from engines.kinds import FORMATS
from engines.parallel.worker import Worker, broadcast, dist, follow, launched_rank
from engines.placement import Placement
from mtad.errors import InvalidInput, imported, refused_as

log = logging.getLogger(__name__)

TIMEOUT = timedelta(minutes=5)
"""How long rank 0 waits for the others in one collective operation; they may load their shards that far apart. Between
GPUs, NCCL's watchdog then ends the process, because there the host launches the operation and does not wait in it."""


class ParallelEngine(Engine):
    """The target's engine on rank 0. Once a call has failed on some rank, every call raises `RankFailed`.

    Attributes:
        spec: of rank 0's shard: `kv_heads` are those that a rank has.
        weights: bytes of rank 0's shard.
    """

    opened: ClassVar[bool] = False  # in this process

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker.engine.spec, ParallelCache(worker))
        self.weights, self._run = worker.weights, worker.call_on_all_ranks
        weakref.finalize(self, worker.stop)  # at the latest when the interpreter ends

    def step(self, step: Step) -> Tensor:
        self.cache.reserve(step.spans, step.first_row)
        return self.enqueue(step)

    def enqueue(self, step: Step) -> Tensor:
        """Run a step on all ranks; the logits are rank 0's."""
        parts = step.tokens, step.positions, step.write_at, step.mask, step.keep, step.first_row
        logits: Tensor = self._run("enqueue", *parts)
        return logits


class ParallelCache(KvCache):
    """The cache of all ranks: what is done to it, each of them does to its own."""

    page_columns = KV_PAGE

    def __init__(self, worker: Worker) -> None:
        self._worker, self._run, self._own = worker, worker.call_on_all_ranks, worker.engine.cache
        self.rows, self.capacity = self._own.rows, self._own.capacity
        self.pages, self.page_bytes = self._own.pages, self._own.page_bytes
        self._prefixes: ParallelPrefixCache | None = None

    @property
    def device(self) -> torch.device:
        return self._own.device

    def fits(self, spans: Sequence[tuple[int, int]]) -> bool:
        if self._worker.failed is not None:  # outside of any request, so that the loop stops
            raise self._worker.failed
        return self._own.fits(spans)

    def prefix_cache(self, tokens: int) -> PrefixCache:
        if self._prefixes is not None:
            self._prefixes.close()
        self._prefixes = ParallelPrefixCache(self._worker, tokens)
        return self._prefixes

    def allocate_pages(self, num_pages: int) -> None:
        self._run("engine.cache.allocate_pages", num_pages)
        self.pages = num_pages

    def reserve(self, spans: Sequence[tuple[int, int]], first_row: int = 0) -> None:
        self._run("engine.cache.reserve", spans, first_row)

    # once a rank is gone no row is read any more, and requests must be able to end

    def release(self, row: int) -> None:
        if self._worker.failed is None:
            self._run("engine.cache.release", row)

    def clear(self, row: int, start: int = 0) -> None:
        if self._worker.failed is None:
            self._run("engine.cache.clear", row, start)

    def copy(self, source: int, to: int, columns: int) -> None:
        if self._worker.failed is None:
            self._run("engine.cache.copy", source, to, columns)

    def keep(self, source: Tensor, to: Tensor) -> None:
        self._run("engine.cache.keep", source, to)


class ParallelPrefixCache(PrefixCache):
    """Kept prefixes: rank 0 knows which, and every rank keeps those of its shard."""

    def __init__(self, worker: Worker, tokens: int) -> None:
        super().__init__(tokens // KV_PAGE)
        self._run = worker.call_on_all_ranks
        self._run("engine.cache.prefix_cache", tokens)

    def load(self, slots: Sequence[int], row: int, start: int, tokens: Sequence[int]) -> None:
        self._run("engine.cache.prefixes.load", slots, row, start, tokens)

    def save(self, slot: int, row: int, start: int) -> None:
        self._run("engine.cache.prefixes.save", slot, row, start)

    def close(self) -> None:
        """Keep nothing from now on: the ranks keep others."""
        super().__init__(0)


def open_parallel(folder: Path, spec: EngineSpec, ranks: int, placement: Placement) -> ParallelEngine:
    """Open a target that is sharded over all ranks, on rank 0; the others are in `follow_if_launched`.

    Args:
        spec: of the whole target.
        placement: of rank 0; the others use the GPU that torchrun gives each of them.

    Raises:
        InvalidInput: the ranks were not started by torchrun, the target cannot be sharded, or not there.
    """
    check_ranks(ranks, placement.device)
    check_plan(folder, spec, ranks)
    dist.init_process_group(timeout=TIMEOUT)
    ParallelEngine.opened = True
    opened = folder.resolve(), spec, placement
    broadcast(opened)
    with refused_as("tensor_parallel", ranks, f"transformers {transformers.__version__} cannot shard the target"):
        worker = Worker(*opened)
    log.info("the target is sharded over %d ranks on %s", ranks, placement.device)
    return ParallelEngine(worker)


def check_ranks(ranks: int, device: str) -> None:
    """`InvalidInput`, unless torchrun has started these ranks, and each of them has what it needs."""
    started = 0 if launched_rank() is None else int(os.environ["WORLD_SIZE"])
    if started != ranks:
        remedy = f"start the command with torchrun --nproc-per-node {ranks} --no-python"
        raise InvalidInput("tensor_parallel", ranks, f"torchrun has started {started} ranks; {remedy}")
    if dist.is_initialized() or ParallelEngine.opened:  # the other ranks ended with it
        problem = "torch.distributed is in use, or was: a process opens one tensor-parallel pair, once"
        raise InvalidInput("tensor_parallel", ranks, problem)
    imported("accelerate", "tensor_parallel", ranks, "the extra gpu installs it")
    accelerator = torch.accelerator.current_accelerator()
    wanted = "cpu" if accelerator is None else f"{accelerator.type}:0"
    if device != wanted:
        problem = f"with this build of torch, transformers puts shards on {wanted} and the devices behind it"
        raise InvalidInput("device", device, f"{problem}; choose GPUs with CUDA_VISIBLE_DEVICES")
    here = int(os.environ["LOCAL_WORLD_SIZE"])
    if device != "cpu" and (count := torch.cuda.device_count()) < here:
        raise InvalidInput("tensor_parallel", ranks, f"there are {count} GPUs for {here} ranks; each needs one")


def check_plan(folder: Path, spec: EngineSpec, ranks: int) -> None:
    """`InvalidInput`, unless transformers has a plan to shard the model of a folder, and heads can be divided."""
    if FORMATS[spec.format].stored != "checkpoint":
        problem = f"an engine of the format {spec.format} runs on one device; export the pair with --to torch"
        raise InvalidInput("tensor_parallel", ranks, problem)
    with refused_as("folder", str(folder), "its config.json cannot be read, export again"):
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False).get_text_config()
    if not config.base_model_tp_plan:
        problem = f"transformers {transformers.__version__} has no tensor-parallel plan for {spec.architecture}"
        raise InvalidInput("tensor_parallel", ranks, f"{problem}; leave it out")
    layers = getattr(config, "per_layer_config", [config])  # which transformers 4 does not have
    for layer, name in itertools.product(layers, ("num_attention_heads", "num_key_value_heads")):
        if (count := getattr(layer, name, ranks)) % ranks:
            problem = f"{spec.architecture}'s {name}, {count}, cannot be divided by it"
            raise InvalidInput("tensor_parallel", ranks, problem)


def follow_if_launched() -> None:
    """On another rank of torchrun than 0: follow rank 0, then end the process. Does nothing anywhere else.

    To be called before anything that only one process may do.
    """
    if launched_rank():
        follow()
        sys.exit(0)
