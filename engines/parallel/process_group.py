"""The processes of tensor parallelism: what they exchange, and which of them has failed.

Rank 0 leads: it has the requests. The others follow. Once they have met (`engines.parallel.launch`) they are in two
groups: one for commands, of host memory (gloo), one for tensors (NCCL, gloo on CPUs).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engines.parallel.launch import Launched, dist
from mtad.errors import Failed

if TYPE_CHECKING:  # some builds of torch have none of it
    from torch._C._distributed_c10d import Store

BEAT = 1.0
"""Seconds between two signs of life."""

SILENT = 5.0
"""Seconds without one, after which a rank is said not to answer."""

TIMEOUT = 60.0
"""Seconds an exchange of tensors, or the silence of rank 0, may take."""

FOREVER = timedelta(days=365)
"""A follower waits for its next command, however long nobody asks for anything; rank 0 never waits that long."""


class RankFailed(Failed):
    """A rank has ended, does not answer or has fallen out of step: the engine is broken for good.

    Attributes:
        ranks: who; () if nobody knows.
    """

    def __init__(self, ranks: Sequence[int], reason: str) -> None:
        self.ranks = tuple(ranks)
        who = f"rank {', '.join(map(str, ranks))}" if ranks else "some rank"
        super().__init__(f"tensor parallelism: {who} of the target: {reason}")


class Heartbeat(threading.Thread):
    """Publishes every second that this rank lives, and reads whether others do.

    Args:
        launched: this rank.
        watched: ranks whose signs of life are read.
        limit: seconds; where rank 0 is silent for longer, or its store is gone, this process ends at once: it may be
            inside an exchange that nothing will ever end.
    """

    def __init__(self, launched: Launched, watched: Sequence[int], limit: float) -> None:
        super().__init__(name="mtad-heartbeat", daemon=True)
        self._launched, self._limit, self._store = launched, limit, launched.connect()
        self._heard = dict.fromkeys(watched, (b"", time.monotonic()))
        self._ended = threading.Event()

    def run(self) -> None:
        """Send and read signs of life until `stop` is called."""
        count = 0
        while not self._ended.wait(BEAT):
            count += 1
            try:
                self._store.set(f"beat/{self._launched.rank}", str(count))
                for rank, (last, _) in self._heard.items():
                    if self._store.check([f"beat/{rank}"]):
                        beat = self._store.get(f"beat/{rank}")
                        if beat != last:
                            self._heard[rank] = beat, time.monotonic()
            except RuntimeError:
                if self._launched.rank and not self._ended.is_set():
                    _give_up("the store of rank 0 is gone")
                return
            if self._launched.rank and self.silent(self._limit):
                _give_up(f"rank 0 has been silent for {self._limit:g} s")

    def silent(self, seconds: float) -> list[int]:
        """Watched ranks without a sign of life for that long."""
        now = time.monotonic()
        return [rank for rank, (_, heard) in self._heard.items() if now - heard > seconds]

    def stop(self) -> None:
        """Send no more signs of life; returns when the thread has ended."""
        self._ended.set()
        if self.is_alive():
            self.join()


def _give_up(reason: str) -> None:
    print(f"mtad: a rank of a tensor-parallel target ends: {reason}", file=sys.stderr, flush=True)
    os._exit(3)


@dataclass
class ProcessRanks:
    """All ranks, as one of them sees them (`engines.parallel.sharding.Ranks`); owns the groups of `init_groups`.

    Attributes:
        launched: this one.
        device: where its tensors are: `cpu` or `cuda:<local rank>`.
        timeout: seconds an exchange of tensors may take.
        store: for what is published before there are groups, and when there are none any more.
        processes: followers that this rank has started, by rank.
        server: the store itself, if it is in this process.
    """

    launched: Launched
    device: str
    timeout: float
    processes: Mapping[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    server: Store | None = None

    def __post_init__(self) -> None:
        self.rank, self.world, self.store = self.launched.rank, self.launched.world, self.launched.connect()
        others = range(1, self.world) if self.rank == 0 else [0]
        self._heartbeat = Heartbeat(self.launched, others, max(self.timeout, 2 * SILENT))
        self._heartbeat.start()
        self._tensors: Any = None

    def init_groups(self) -> None:
        """Make the groups; all ranks call it at about the same time."""
        limit = timedelta(seconds=self.timeout)
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore("commands", self.store),
            rank=self.rank,
            world_size=self.world,
            timeout=FOREVER if self.rank else limit,
        )
        cuda = self.device != "cpu"
        if cuda:
            torch.cuda.set_device(torch.device(self.device))
        self._tensors = dist.new_group(backend="nccl" if cuda else "gloo", timeout=limit)

    def sum(self, part: Tensor) -> Tensor:
        part = part.contiguous()
        dist.all_reduce(part, group=self._tensors)
        return part

    def gather(self, part: Tensor) -> Tensor:
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(self.world)]
        dist.all_gather(parts, part.contiguous(), group=self._tensors)
        return torch.cat(parts, -1)

    def broadcast(self, tensor: Tensor) -> None:
        """Copy rank 0's tensor, of the ranks' device, over that of all."""
        dist.broadcast(tensor, 0, group=self._tensors)

    def broadcast_words(self, words: Tensor) -> None:
        """The same for host memory, however long it takes until rank 0 has something to send."""
        dist.broadcast(words, 0)

    def compare(self, words: Sequence[int]) -> list[list[int]]:
        """What each rank says, by rank."""
        said = [torch.zeros(len(words), dtype=torch.int64) for _ in range(self.world)]
        dist.all_gather(said, torch.tensor(words, dtype=torch.int64), group=None)
        return [each.tolist() for each in said]

    def publish(self, key: str, value: str = "") -> None:
        """Write a value to the store, under this rank's number."""
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
        """Find out which follower has failed.

        Raises:
            RankFailed: one has.
        """
        for rank in range(1, self.world):
            if self.store.check([f"failed/{rank}"]):
                raise RankFailed([rank], json.loads(self.store.get(f"failed/{rank}")))
        for rank, process in self.processes.items():
            code = process.poll()
            if code is not None:
                how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
                raise RankFailed([rank], how)

    def diagnose(self, error: Exception) -> RankFailed:
        """Why an exchange broke off on rank 0; waits a moment for signs of it."""
        until = time.monotonic() + SILENT + 2 * BEAT
        while time.monotonic() < until:
            try:
                self.raise_failed()
            except RankFailed as found:
                return found
            except RuntimeError:
                break  # the store is gone as well
            time.sleep(0.05)
        # silence comes last: a process that was killed closes its sockets before it has ended
        silent = self._heartbeat.silent(SILENT)
        if silent:
            return RankFailed(silent, f"has not answered for {SILENT:g} s")
        reason = str(error).strip().splitlines()
        return RankFailed((), f"an exchange broke off: {reason[0] if reason else type(error).__name__}")

    def leave(self, patience: float = 10.0) -> None:
        """Leave the groups; followers that do not end within `patience` seconds are killed."""
        self._heartbeat.stop()
        if dist.is_initialized():
            dist.destroy_process_group()
        until = time.monotonic() + patience
        for process in self.processes.values():
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
