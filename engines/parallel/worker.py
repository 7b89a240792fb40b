"""One rank's shard of a target, and how the ranks that torchrun has started work on theirs together."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from datetime import timedelta
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from engines.base import EngineSpec, Step
from engines.placement import Placement
from engines.pytorch.engine import TorchEngine
from engines.pytorch.hook import cache_shape
from engines.quiet import quiet_transformers
from mtad.errors import Failed, first_line

dist: Any = torch.distributed
"""Some builds of torch have none of it."""

UNLIMITED = timedelta(days=365)
"""How long another rank waits for rank 0's next call; torchrun ends it when rank 0 ends."""


class RankFailed(Failed):
    """A call that all ranks make together failed on one of them or took too long; the engine cannot be used again."""


def launched_rank() -> int | None:
    """This process's rank; None if torchrun has not started it."""
    return int(os.environ["RANK"]) if "TORCHELASTIC_RUN_ID" in os.environ else None


class Worker:
    """A rank with its shard of the target. Every rank opens one at the same time; not executed on a GPU.

    Args:
        folder: the target's engine folder.
        spec: of the whole target.

    Attributes:
        engine: runs the shard; its `kv_heads` are those that this rank has.
        failed: of the call that has failed on some rank.
    """

    def __init__(self, folder: Path, spec: EngineSpec, placement: Placement) -> None:
        options: dict[str, Any] = {"tp_plan": "auto"}
        if hasattr(DistributedConfig, "tp_size"):  # of transformers 5, which deprecates the other way
            options = {"distributed_config": DistributedConfig(tp_size=dist.get_world_size())}
        shown = sys.stdout, sys.stderr
        try:
            model = AutoModelForCausalLM.from_pretrained(
                folder, dtype=spec.torch_dtype, local_files_only=True, trust_remote_code=False, **options
            )
        finally:  # up to 5.3, transformers silences all GPUs but the first for good, errors too
            sys.stdout, sys.stderr = shown
        _, kv_heads, _, _ = cache_shape(model)
        device = f"cuda:{os.environ['LOCAL_RANK']}" if placement.on_gpu else "cpu"
        # fusing runs layers by themselves, which would have to happen on all ranks
        self.engine = TorchEngine(model, replace(spec, kv_heads=kv_heads), placement.attention, device, fused=False)
        self.failed: RankFailed | None = None

    @property
    def weights(self) -> int:
        """Bytes of the shard's weights."""
        parameters: list[Any] = list(self.engine.model.parameters())
        return sum((p.to_local() if hasattr(p, "to_local") else p).nbytes for p in parameters)

    def enqueue(self, *step: Any) -> Tensor:
        return self.engine.enqueue(Step(*step))

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a method of this worker or of its cache, such as `engine.cache.copy`; tensors may be anywhere."""
        device = self.engine.device
        return attrgetter(name)(self)(*(x.to(device) if isinstance(x, Tensor) else x for x in arguments))

    def call_on_all_ranks(self, name: str, *arguments: Any) -> Any:
        """On rank 0: `call` on every rank; returns what it returns here.

        Raises:
            RankFailed: it failed, here or on another rank, or an earlier call did.
        """
        if self.failed is not None:
            raise self.failed
        try:
            # a copy, because of a view all the memory behind it would be sent
            broadcast((name, *(x.to("cpu", copy=True) if isinstance(x, Tensor) else x for x in arguments)))
            return self.call(name, *arguments)
        except BaseException as error:  # also where it was interrupted: the others wait inside the call
            problem = f"tensor parallelism: a call on all ranks failed on rank 0 ({first_line(error)})"
            self.failed = RankFailed(f"{problem}; torchrun's report names the rank that failed first")
            raise self.failed from error

    def stop(self) -> None:
        """On rank 0: let the other ranks end. Those of a call that failed are ended by torchrun."""
        if self.failed is None:
            broadcast(None)
            dist.destroy_process_group()


def broadcast(value: object = None) -> Any:
    """Rank 0's value, on every rank; the others give none. Tensors must be on the CPU."""
    values = [value]
    dist.broadcast_object_list(values, device=torch.device("cpu"))
    return values[0]


def follow() -> None:
    """On another rank than 0: open what rank 0 opens, and make its calls, until it stops."""
    quiet_transformers()
    dist.init_process_group(timeout=UNLIMITED)
    worker = Worker(*broadcast())
    for each in (signal.SIGINT, signal.SIGTERM):  # torchrun sends them to all ranks, and rank 0 may finish its requests
        signal.signal(each, signal.SIG_IGN)
    with torch.inference_mode():
        while call := broadcast():
            worker.call(*call)
    dist.destroy_process_group()
