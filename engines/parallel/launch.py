"""How the processes of tensor parallelism come to be, and where they meet.

Rank 0 starts the others, or `torchrun` has started all. They meet at a store (a small key-value server of rank 0, or
`torchrun`'s).
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed

from mtad.errors import InvalidInput

if TYPE_CHECKING:  # some builds of torch have none of it
    from torch._C._distributed_c10d import Store

dist: Any = torch.distributed
"""Its stores are exported, but not declared to be."""

HOST = "127.0.0.1"
"""Where rank 0 listens for ranks that it starts itself; no other machine can connect."""


@dataclass(frozen=True)
class Launched:
    """What `torchrun`, or rank 0, says to a process in its environment.

    Attributes:
        rank, world: of all processes.
        local: rank among those of this machine; its GPU.
        host, port: of the store.
        agent: the store is there already, and not rank 0's to open.
        attempt: how often all have been started again.
    """

    rank: int
    world: int
    local: int
    host: str
    port: int
    agent: bool
    attempt: int

    @classmethod
    def read(cls, environment: Mapping[str, str] = os.environ) -> Launched | None:
        """What this process was told; None where nobody has started it as one of several."""
        if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= set(environment):
            return None
        return cls(
            rank=int(environment["RANK"]),
            world=int(environment["WORLD_SIZE"]),
            local=int(environment.get("LOCAL_RANK", environment["RANK"])),
            host=environment["MASTER_ADDR"],
            port=int(environment["MASTER_PORT"]),
            agent=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            attempt=int(environment.get("TORCHELASTIC_RESTART_COUNT", 0)),
        )

    def connect(self) -> Store:
        """A connection to the store; each thread needs one of its own, for a waiting call holds it."""
        store = dist.TCPStore(
            self.host,
            self.port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=300),
        )
        found: Store = dist.PrefixStore(f"mtad/{self.attempt}", store)
        return found


def serve_store(launched: Launched | None, world: int) -> tuple[Launched, Store | None]:
    """Where the ranks meet: the store that is there, or a new one, which lives as long as what is returned."""
    if launched is not None and launched.agent:
        return launched, None
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind((HOST, 0) if launched is None else ("", launched.port))
    listening.listen()
    host, port = (HOST, listening.getsockname()[1]) if launched is None else (launched.host, launched.port)
    server = dist.TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach(), use_libuv=True
    )
    return launched or Launched(0, world, 0, host, port, agent=True, attempt=0), server


def start(launched: Launched, threads: int) -> dict[int, subprocess.Popen[bytes]]:
    """Start ranks 1 .. on this machine, each a fresh interpreter; they end when rank 0 ends, however it does."""
    root = str(Path(__file__).parents[2])
    paths = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    processes = {}
    for rank in range(1, launched.world):
        environment = {
            **os.environ,
            "PYTHONPATH": paths,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(launched.world),
            "MASTER_ADDR": launched.host,
            "MASTER_PORT": str(launched.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "OMP_NUM_THREADS": str(threads),
        }
        processes[rank] = subprocess.Popen(
            [sys.executable, "-m", "engines.parallel.follower"], env=environment, stdin=subprocess.DEVNULL
        )
    return processes


def check_launch(world: int, device: str) -> Launched | None:
    """What started this process, once it is clear that `world` ranks can meet.

    Raises:
        InvalidInput: they cannot.
    """
    if not (dist.is_available() and dist.is_gloo_available()):
        raise InvalidInput("tensor_parallel", world, "this build of torch has no torch.distributed with gloo")
    if dist.is_initialized():
        problem = "torch.distributed is already in use in this process; open one tensor-parallel pair at a time"
        raise InvalidInput("tensor_parallel", world, problem)
    launched = Launched.read()
    if launched is not None and launched.world != world:
        raise InvalidInput("tensor_parallel", world, f"torchrun started {launched.world} processes; give that number")
    if device not in ("cpu", "cuda", "cuda:0"):
        problem = "ranks use the GPUs from cuda:0 on; give cuda, and choose GPUs with CUDA_VISIBLE_DEVICES"
        raise InvalidInput("device", device, problem)
    if device != "cpu":
        here = world if launched is None else int(os.environ.get("LOCAL_WORLD_SIZE", world))
        if torch.cuda.device_count() < here:
            raise InvalidInput(
                "tensor_parallel", world, f"there are {torch.cuda.device_count()} GPUs; each rank needs one"
            )
        if not dist.is_nccl_available():
            raise InvalidInput("tensor_parallel", world, "this build of torch has no NCCL")
    return launched
