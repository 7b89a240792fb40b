"""A target divided over several processes: rank 0 decides everything, the others do the same steps on their part.

The followers are told what is done to the target's engine and its cache. Everything else is rank 0's alone, so there is
nothing that ranks could decide differently: it does not matter whether their logits agree to the bit, and no method
knows how many ranks there are. Ranks keep a fingerprint of their commands, so that one that has missed one is found.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engines.base import KV_PAGE, Engine, EngineSpec, Step
from engines.parallel.ranks import ProcessRanks, RankFailed, check_launch, launched_ranks
from engines.parallel.worker import Worker, follow
from engines.placement import Placement
from engines.prefix_cache import PrefixCache

log = logging.getLogger(__name__)


class ParallelEngine(Engine):
    """The target's engine on rank 0: whatever is done to it is done to all parts.

    Ranks wait for each other inside a step, so once one has failed no part can be used again: every call raises
    `RankFailed` from then on.

    Attributes:
        spec: of rank 0's part: `kv_heads` is what a rank has.
    """

    page_columns = KV_PAGE

    def __init__(self, worker: Worker) -> None:
        self.spec, self.worker, part = worker.engine.spec, worker, worker.engine
        self.pages, self.page_bytes = part.pages, part.page_bytes
        self._broken: list[RankFailed] = []
        self._end = weakref.finalize(self, _close, worker, self._broken)

    @property
    def device(self) -> torch.device:
        return self.worker.engine.device

    def step(self, step: Step) -> Tensor:
        self.reserve(step.spans, step.first_row)
        return self.launch(step)

    def launch(self, step: Step) -> Tensor:
        """Run a step on all parts. Logits are rank 0's; the others' are not looked at."""
        parts = step.tokens, step.positions, step.write_at, step.mask, step.keep, step.first_row
        logits: Tensor = self.run("launch", *parts)
        return logits

    def limit(self, pages: int) -> None:
        self.run("engine.limit", pages)
        self.pages = pages

    def fits(self, spans: Sequence[tuple[int, int]]) -> bool:
        return self.worker.engine.fits(spans)

    def reserve(self, spans: Sequence[tuple[int, int]], first_row: int = 0) -> None:
        if self.worker.engine.lacks(spans, first_row):  # not in most blocks
            self.run("engine.reserve", spans, first_row)

    def free_row(self, row: int) -> None:
        self.run("engine.free_row", row)

    def move_columns(self, source: Tensor, to: Tensor) -> None:
        self.run("engine.move_columns", source, to)

    def copy_row(self, source: int, to: int, columns: int) -> None:
        self.run("engine.copy_row", source, to, columns)

    def clear_row(self, row: int, start: int = 0) -> None:
        self.run("engine.clear_row", row, start)

    def prefix_cache(self, tokens: int) -> PrefixCache:
        return ParallelPrefixCache(self, tokens)

    @contextlib.contextmanager
    def kept(self, *columns: slice) -> Iterator[None]:
        self.run("save", *columns)
        try:
            yield
        finally:
            self.run("load")

    def check_integrity(self) -> None:
        """All ranks have done the same, in the same order.

        Raises:
            RankFailed: one has not, or is gone.
        """
        ours, *theirs = self.run("fingerprints")
        apart = [rank for rank, state in enumerate(theirs, 1) if state != ours]
        if apart:
            self._broken.append(RankFailed(apart, "has not done what rank 0 has, so its cache is of other texts"))
            raise self._broken[0]

    def run(self, name: str, *arguments: Any) -> Any:
        """Run a command on all ranks; what there is, and what it returns on rank 0, `Worker` says.

        Raises:
            RankFailed: one of them has failed, now or before.
        """
        if self._broken:
            rows_given_back = name in ("engine.copy_row", "engine.clear_row", "engine.free_row")  # nobody reads them
            if self._broken[0].ranks == (0,) and rows_given_back:
                return None
            raise self._broken[0]
        try:
            self.worker.send_command(name, *arguments)
            return self.worker.run(name, *arguments)
        except Exception as error:
            self._broken.append(self.worker.ranks.diagnose(error))
            raise self._broken[0] from error
        except BaseException:  # interrupted: the others are still inside
            self._broken.append(RankFailed([0], "was interrupted inside a step"))
            raise

    def close(self) -> None:
        """End the followers, and wait until they have ended; the engine cannot be used any more."""
        self._end()


def _close(worker: Worker, broken: list[RankFailed]) -> None:
    """End the followers; done as well when the engine is collected, and when the interpreter ends."""
    if broken:
        worker.ranks.kill()
    else:
        broken.append(RankFailed([0], "was closed"))
        with contextlib.suppress(RuntimeError, ValueError):  # they, or the groups, have ended already
            worker.send_command("stop")
    worker.ranks.leave()


class ParallelPrefixCache(PrefixCache):
    """The kept prefixes of a divided target: each rank keeps those of its own part."""

    _engine: Any

    def __init__(self, engine: ParallelEngine, tokens: int) -> None:
        engine.run("keep_prefixes", tokens)
        self.bytes = engine.worker.prefixes.bytes
        self._engine = weakref.proxy(engine)  # which has this, and ends its followers when it is collected

    def restore(self, row: int, tokens: Sequence[int], start: int = 0, salt: int = 0) -> int:
        columns: int = self._engine.run("prefixes.restore", row, list(tokens), start, salt)
        return columns

    def store(self, row: int, tokens: Sequence[int], salt: int = 0) -> None:
        self._engine.run("prefixes.store", row, list(tokens), salt)

    def check_integrity(self) -> None:
        """Check rank 0's prefixes, and that all ranks have done the same."""
        self._engine.worker.prefixes.check_integrity()
        self._engine.check_integrity()


def open_parallel(folder: Path, spec: EngineSpec, world: int, placement: Placement) -> ParallelEngine:
    """Open a target divided over `world` processes, of which this one is rank 0.

    The others are those that `torchrun` has started, else new ones on this machine.

    Args:
        spec: of each part, see `engines.parallel.sharding.share`.
        placement: of each part. Ranks take GPUs from `cuda:0` on, and threads as torch has them.

    Raises:
        InvalidInput: these processes cannot meet.
        RankFailed: one of them did not start.
    """
    check_launch(world, placement.device)
    threads = torch.get_num_threads()
    ranks = ProcessRanks.start(world, threads) if launched_ranks() is None else ProcessRanks.launched()
    worker = Worker(ranks)
    job = "open", folder.resolve(), spec, placement, threads
    try:
        ranks.wait_for("joined")
        ranks.init_commands()
        worker.send_command(*job)
        worker.run(*job)
        ranks.wait_for("open")
    except BaseException:
        ranks.kill()
        ranks.leave()
        raise
    log.info("the target is divided over %d ranks on %s", world, placement.device)
    return ParallelEngine(worker)


def follow_if_told() -> None:
    """In a process that `torchrun` has started as another rank than 0: follow rank 0, then end the process.

    Anywhere else it does nothing. To be called before anything that only one process may do.
    """
    launched = launched_ranks()
    if launched is not None and launched[0]:
        follow()
        sys.exit(0)
