"""One rank's part of a divided target, and what is done to it. The same code on rank 0 and on the others."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from operator import attrgetter
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from engines.base import EngineSpec, Step
from engines.buffers import Slab, size_of, views
from engines.parallel.ranks import ExchangeFailed, ProcessRanks, launched_ranks
from engines.parallel.sharding import load_share
from engines.placement import Placement
from engines.prefix_cache import PrefixCache
from engines.pytorch.engine import TorchEngine
from engines.quiet import quiet_transformers


class Worker:
    """A rank with its part of the target.

    A command is the name of a method of the worker, of its engine or of its prefixes (`engine.copy_row`), and the
    method's arguments.
    """

    engine: TorchEngine
    prefixes: PrefixCache

    def __init__(self, ranks: ProcessRanks) -> None:
        self.ranks = ranks
        self._saved: list[contextlib.ExitStack] = []
        self._seen = 0

    def send_command(self, name: str, *arguments: Any) -> None:
        """Rank 0: the others are to do this. Of tensors the shapes and types are sent."""
        self._exchange_command(name, *(x.to("meta") if isinstance(x, Tensor) else x for x in arguments))

    def recv_command(self) -> list[Any]:
        """The name and the arguments of rank 0's next command; for the other ranks."""
        return self._exchange_command()

    def _exchange_command(self, *command: Any) -> list[Any]:
        """What rank 0 gives; the other ranks give nothing."""
        found: list[Any] = self.ranks.broadcast_object(command)
        self._seen = crc32(repr(found).encode(), self._seen)
        return found

    def run(self, name: str, *arguments: Any) -> Any:
        """Run a command on this rank's part, once its tensors are copied from rank 0 to every rank.

        Returns:
            what the command gives on rank 0: logits of a step, columns of a restored prefix, fingerprints of all ranks.
        """
        tensors = tuple(x for x in arguments if isinstance(x, Tensor))
        if tensors:
            memory = self._slab.bytes(size_of(tensors))
            copies: tuple[Tensor, ...] = views(tensors, memory)
            if self.ranks.rank == 0:
                for copy, tensor in zip(copies, tensors, strict=True):
                    copy.copy_(tensor)
            self.ranks.broadcast(memory)
            rest = iter(copies)
            arguments = tuple(next(rest) if isinstance(x, Tensor) else x for x in arguments)
        return attrgetter(name)(self)(*arguments)

    def open(self, folder: Path, spec: EngineSpec, placement: Placement, threads: int) -> None:
        """Load this rank's part; `spec` is that of a part."""
        torch.set_num_threads(threads)
        self.ranks.init_tensors(placement.on_gpu)
        self.engine = load_share(folder, spec, self.ranks, self.ranks.device, placement.attention)
        self._slab = Slab(self.engine.device)

    def launch(self, *parts: Any) -> Tensor:
        return self.engine.launch(Step(*parts))

    def keep_prefixes(self, tokens: int) -> None:
        """Keep prefixes of as many tokens, and none of those before."""
        self.prefixes = self.engine.prefix_cache(tokens)

    def save(self, *columns: slice) -> None:
        """Keep columns of all rows until `load`."""
        self._saved.append(contextlib.ExitStack())
        self._saved[-1].enter_context(self.engine.kept(*columns))

    def load(self) -> None:
        """Put back the columns that were saved last."""
        self._saved.pop().close()

    def fingerprints(self) -> list[tuple[int, int]]:
        """Of all that was done, by rank: those of ranks that are in step are equal."""
        kept = self.prefixes.fingerprint if hasattr(self, "prefixes") else b""  # there are none without a runtime
        return self.ranks.gather_objects((self._seen, crc32(kept)))


@torch.inference_mode()
def follow() -> None:
    """Join rank 0 and do as it says; returns when it has closed the engine.

    Raises:
        Exception: whatever has gone wrong; rank 0 has been told.
    """
    for signals in (signal.SIGINT, signal.SIGTERM):  # sent to all ranks at once; rank 0 decides when it is over
        signal.signal(signals, signal.SIG_IGN)
    quiet_transformers()
    ranks = ProcessRanks.launched()
    try:
        ranks.publish("joined")
        ranks.init_commands()
        worker = Worker(ranks)
        while (command := worker.recv_command())[0] != "stop":
            worker.run(*command)
            if command[0] == "open":
                ranks.publish("open")
    except Exception as error:
        key = "alone" if isinstance(error, ExchangeFailed) else "failed"
        with contextlib.suppress(RuntimeError):  # the store, and so rank 0, may be gone
            ranks.publish(key, f"{type(error).__name__}: {error}")
        raise
    finally:
        ranks.leave()


def main() -> None:
    """Entry point of a process that rank 0 has started."""
    if (launched_ranks() or (0, 1))[0] == 0:
        sys.exit("engines.parallel.worker is started by rank 0 of a tensor-parallel pair, not by hand")
    try:
        follow()
    except Exception:
        traceback.print_exc()
        sys.exit(1)
    sys.stderr.flush()
    os._exit(0)  # rank 0 waits for it: taking the libraries apart takes seconds, and nothing is left to be done


if __name__ == "__main__":
    main()
