"""The processes of tensor parallelism: how they meet, what they exchange, and which of them has failed.

Rank 0 leads: it has the requests. The others follow. Rank 0 starts them, or `torchrun` has started all. They meet at a
store (a small key-value server of rank 0, or `torchrun`'s) and are then in two groups: one for commands, of host memory
(gloo), one for tensors (NCCL, gloo on CPUs).
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from engines.parallel.sharding import Ranks
from mtad.errors import Failed, InvalidInput

dist: Any = torch.distributed
"""Its stores are exported, but not declared to be; some builds of torch have none of it."""

HOST = "127.0.0.1"
"""Where rank 0 listens for ranks that it starts itself; no other machine can connect."""

TIMEOUT = 60.0
"""Seconds an exchange may take."""

SILENT = 5.0
"""Seconds in which a rank that lives says so, once an exchange has broken off."""

FOREVER = timedelta(days=365)
"""A follower waits for its next command, however long nobody asks for anything."""


class RankFailed(Failed):
    """A rank has ended, does not answer or has fallen out of step: the engine is broken for good.

    Attributes:
        ranks: who; () if nobody knows.
    """

    def __init__(self, ranks: Sequence[int], reason: str) -> None:
        self.ranks = tuple(ranks)
        who = f"rank {', '.join(map(str, ranks))}" if ranks else "some rank"
        super().__init__(f"tensor parallelism: {who} of the target: {reason}")


class ExchangeFailed(RuntimeError):
    """An exchange broke off, because of another rank."""


def launched_ranks(environment: Mapping[str, str] = os.environ) -> tuple[int, int] | None:
    """This process's rank and the number of ranks; None where nobody has started it as one of several."""
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= set(environment):
        return None
    return int(environment["RANK"]), int(environment["WORLD_SIZE"])


def check_launch(world: int, device: str) -> None:
    """Whether `world` ranks can meet.

    Raises:
        InvalidInput: they cannot.
    """
    if not (dist.is_available() and dist.is_gloo_available()):
        raise InvalidInput("tensor_parallel", world, "this build of torch has no torch.distributed with gloo")
    if dist.is_initialized():
        problem = "torch.distributed is already in use in this process; open one tensor-parallel pair at a time"
        raise InvalidInput("tensor_parallel", world, problem)
    launched = launched_ranks()
    if launched is not None and launched[1] != world:
        raise InvalidInput("tensor_parallel", world, f"torchrun started {launched[1]} processes; give that number")
    if device not in ("cpu", "cuda", "cuda:0"):
        problem = "ranks use the GPUs from cuda:0 on; give cuda, and choose GPUs with CUDA_VISIBLE_DEVICES"
        raise InvalidInput("device", device, problem)
    if device != "cpu":
        here = world if launched is None else int(os.environ.get("LOCAL_WORLD_SIZE", world))
        if (count := torch.cuda.device_count()) < here:
            raise InvalidInput("tensor_parallel", world, f"there are {count} GPUs; each rank needs one")
        if not dist.is_nccl_available():
            raise InvalidInput("tensor_parallel", world, "this build of torch has no NCCL")


class ProcessRanks(Ranks):
    """All ranks, as one of them sees them; owns the groups.

    Attributes:
        store: for what is published before there are groups, and when there are none any more.
        processes: followers that this rank has started, by rank.
    """

    def __init__(self, rank: int, world: int, store: Any, processes: Mapping[int, Any] | None = None) -> None:
        super().__init__(rank, world)
        self.store, self.processes, self.device = store, processes or {}, "cpu"
        self._tensors: Any = None

    @classmethod
    def launched(cls) -> ProcessRanks:
        """The ranks of a process that was started as one of several."""
        store, rank, world = next(dist.rendezvous("env://"))
        return cls(rank, world, store)

    @classmethod
    def start(cls, world: int, threads: int) -> ProcessRanks:
        """Start ranks 1 .. on this machine, each a fresh interpreter; they end when rank 0 ends, however it does."""
        listening = socket.create_server((HOST, 0))
        port = listening.getsockname()[1]
        store = dist.TCPStore(
            HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach(), use_libuv=True
        )
        root = str(Path(__file__).parents[2])
        processes = {}
        for rank in range(1, world):
            environment = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world),
                "MASTER_ADDR": HOST,
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": str(threads),
            }
            command = [sys.executable, "-m", "engines.parallel.worker"]
            processes[rank] = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)
        return cls(0, world, store, processes)

    def init_commands(self) -> None:
        """Make the group for commands; all ranks call it at about the same time."""
        timeout = FOREVER if self.rank else timedelta(seconds=TIMEOUT)
        dist.init_process_group("gloo", store=self.store, rank=self.rank, world_size=self.world, timeout=timeout)

    def init_tensors(self, on_gpu: bool) -> None:
        """Make the group for tensors; all ranks call it at about the same time."""
        if on_gpu:
            self.device = f"cuda:{os.environ.get('LOCAL_RANK', self.rank)}"
            torch.cuda.set_device(torch.device(self.device))
        timeout = timedelta(seconds=TIMEOUT)
        self._tensors = dist.new_group(backend="nccl" if on_gpu else "gloo", timeout=timeout)

    def sum(self, part: Tensor) -> Tensor:
        part = part.contiguous()
        _exchange(dist.all_reduce, part, group=self._tensors)
        return part

    def gather(self, part: Tensor) -> Tensor:
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(self.world)]
        _exchange(dist.all_gather, parts, part.contiguous(), group=self._tensors)
        return torch.cat(parts, -1)

    def broadcast(self, tensor: Tensor) -> None:
        """Copy rank 0's tensor, of the ranks' device, over that of all."""
        _exchange(dist.broadcast, tensor, 0, group=self._tensors)

    def broadcast_object(self, value: object = None) -> Any:
        """Rank 0's value on every rank, however long it takes until rank 0 has one."""
        values = [value]
        _exchange(dist.broadcast_object_list, values, 0)
        return values[0]

    def gather_objects(self, value: object) -> list[Any]:
        values = [None] * self.world
        _exchange(dist.all_gather_object, values, value)
        return values

    def publish(self, key: str, value: str = "") -> None:
        self.store.set(f"{key}/{self.rank}", value)

    def wait_for(self, key: str) -> None:
        """Wait until all followers have published `key`, as long as they live.

        Raises:
            RankFailed: one has ended, or has published that it failed.
        """
        while not self.store.check([f"{key}/{rank}" for rank in range(1, self.world)]):
            self.raise_failed()
            time.sleep(0.02)

    def raise_failed(self) -> None:
        """Find out which follower has failed, other than because of another one.

        Raises:
            RankFailed: one has.
        """
        for rank in range(1, self.world):
            if self.store.check([f"failed/{rank}"]):
                raise RankFailed([rank], self.store.get(f"failed/{rank}").decode())
        for rank, process in self.processes.items():
            code = process.poll()
            if code is not None and not self.store.check([f"alone/{rank}"]):
                how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
                raise RankFailed([rank], how)

    def diagnose(self, error: Exception) -> RankFailed:
        """Why an exchange broke off on rank 0; waits a moment for signs of it."""
        until = time.monotonic() + SILENT
        try:
            while time.monotonic() < until:
                self.raise_failed()
                time.sleep(0.05)
            silent = [rank for rank in range(1, self.world) if not self.store.check([f"alone/{rank}"])]
        except RankFailed as found:
            return found
        except RuntimeError:  # the store is gone as well
            silent = []
        if silent:
            return RankFailed(silent, f"has not answered for {SILENT:g} s")
        reason = str(error).strip().splitlines()
        return RankFailed((), f"an exchange broke off: {reason[0] if reason else type(error).__name__}")

    def kill(self) -> None:
        for process in self.processes.values():
            process.kill()

    def leave(self, patience: float = 10.0) -> None:
        """Leave the groups; followers that do not end within `patience` seconds are killed."""
        if dist.is_initialized():
            dist.destroy_process_group()
        until = time.monotonic() + patience
        for process in self.processes.values():
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _exchange(operation: Callable[..., object], *arguments: object, **options: object) -> None:
    try:
        operation(*arguments, **options)
    except RuntimeError as error:
        raise ExchangeFailed(str(error)) from error
