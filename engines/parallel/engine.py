"""A target divided over several processes: rank 0 decides everything, the others do the same steps on their part.

What the followers are told is what is done to the target's engine and its cache: run this step, move these columns,
copy or zero this row, keep or bring back this prefix. The auxiliary, drafting, constraints and acceptance are rank 0's
alone, and so are scheduler, clocks and texts. So there is nothing that ranks could decide differently: it does not
matter whether their logits agree to the bit, and no method knows how many ranks there are. A block costs one message
for its scoring step and one more where accepted columns move. Were each rank to draft and decide from the same noise,
that would save the broadcast of a step's tokens and mask, and cost all of this; nothing would be ready any sooner, for
the draft comes before the step in either case.

The order of messages is that of rank 0's calls. Each carries its number, so a follower that has missed one says so.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engines.base import Engine, EngineSpec, Step
from engines.parallel.follower import follow
from engines.parallel.launch import Launched, check_launch, serve_store, start
from engines.parallel.process_group import TIMEOUT, ProcessRanks, RankFailed
from engines.parallel.sharding import load_share
from engines.parallel.worker import Op, Tensors, Worker
from engines.placement import Placement
from engines.prefix_cache import PrefixCache

log = logging.getLogger(__name__)


class ParallelEngine(Engine):
    """The target's engine on rank 0: whatever is done to it is done to all parts.

    Ranks wait for each other inside a step, so once one has failed no part can be used again: every call raises
    `RankFailed` from then on.

    Args:
        worker: rank 0's.

    Attributes:
        spec, kv: of rank 0's part: `kv_heads` is what a rank has.
        worker: rank 0's.
    """

    def __init__(self, worker: Worker) -> None:
        self.spec, self.kv, self.worker = worker.engine.spec, worker.engine.kv, worker
        self._broken: list[RankFailed] = []
        self._end = weakref.finalize(self, _close, worker, self._broken)

    def step(self, step: Step) -> Tensor:
        """Run a step on all parts. Logits are rank 0's; the others' are not looked at."""
        rows, steps = step.tokens.shape
        sizes = rows, steps, step.mask.shape[3], len(step.keep)
        given = step.tokens, step.positions, step.write_at, step.keep, step.mask
        logits: Tensor = self.run(Op.STEP, *sizes, step.first_row, given=given)
        return logits

    def move_columns(self, source: Tensor, to: Tensor) -> None:
        self.run(Op.MOVE, *source.shape, given=(source, to))

    def copy_row(self, source: int, to: int, columns: int) -> None:
        self.run(Op.COPY, source, to, columns)

    def clear_row(self, row: int, start: int = 0) -> None:
        self.run(Op.CLEAR, row, start)

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        self.run(Op.SAVE)
        try:
            yield
        finally:
            self.run(Op.LOAD)

    def check_integrity(self) -> None:
        """All ranks have done the same, in the same order.

        Raises:
            RankFailed: one has not, or is gone.
        """
        ours, *theirs = self.run(Op.CHECK)
        apart = [rank for rank, state in enumerate(theirs, 1) if state != ours]
        if apart:
            self._broken.append(RankFailed(apart, "has not done what rank 0 has, so its cache is of other texts"))
            raise self._broken[0]

    def run(self, op: Op, *about: int, tokens: Sequence[int] = (), given: Tensors | None = None) -> Any:
        """Run a command on all ranks; what it is about, and what it returns on rank 0, `Worker.run` says.

        Raises:
            RankFailed: one of them has failed, now or before.
        """
        if self._broken:
            if self._broken[0].ranks == (0,) and op in (Op.COPY, Op.CLEAR):  # rows are given back; nobody reads them
                return None
            raise self._broken[0]
        try:
            self.worker.send_command(op, about, tokens)
            return self.worker.run(op, about, tokens, given)
        except RankFailed as error:
            self._broken.append(error)
            raise
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
        for process in worker.ranks.processes.values():
            process.kill()
    else:
        broken.append(RankFailed([0], "was closed"))
        with contextlib.suppress(RuntimeError, ValueError):  # they, or the groups, have ended already
            worker.send_command(Op.STOP)
    worker.ranks.leave()


class ParallelPrefixCache(PrefixCache):
    """The kept prefixes of a divided target: each rank keeps those of its own part."""

    def __init__(self, engine: ParallelEngine, tokens: int) -> None:
        engine.run(Op.PREFIXES, tokens)
        self.bytes = engine.worker.prefixes.bytes
        self._engine = weakref.proxy(engine)  # which has this, and ends its followers when it is collected

    def restore(self, row: int, tokens: Sequence[int], start: int = 0, salt: int = 0) -> int:
        columns: int = self._engine.run(Op.RESTORE, row, start, len(tokens), salt, tokens=tokens)
        return columns

    def store(self, row: int, tokens: Sequence[int], salt: int = 0) -> None:
        self._engine.run(Op.STORE, row, 0, len(tokens), salt, tokens=tokens)

    def check_integrity(self) -> None:
        """Check rank 0's prefixes, and that all ranks have done the same."""
        self._engine.worker.prefixes.check_integrity()
        self._engine.check_integrity()


def prefix_cache(engine: Engine, tokens: int) -> PrefixCache:
    """Kept prefixes of an engine, divided or not."""
    return ParallelPrefixCache(engine, tokens) if isinstance(engine, ParallelEngine) else PrefixCache(engine.kv, tokens)


def open_parallel(
    folder: Path,
    spec: EngineSpec,
    world: int,
    placement: Placement,
) -> ParallelEngine:
    """Open a target divided over `world` processes, of which this one is rank 0.

    The others are those that `torchrun` has started, else new ones on this machine.

    Args:
        spec: of each part, see `engines.parallel.sharding.share`.
        placement: of each part. Ranks take GPUs from `cuda:0` on, and threads as torch has them.

    Raises:
        InvalidInput: these processes cannot meet.
        RankFailed: one of them did not start.
    """
    launched = check_launch(world, placement.device)
    here, server = serve_store(launched, world)
    threads = torch.get_num_threads()
    processes = start(here, threads) if launched is None else {}
    ranks = ProcessRanks(here, f"cuda:{here.local}" if placement.on_gpu else "cpu", TIMEOUT, processes, server)
    job = {
        "folder": str(folder.resolve()),
        "rows": spec.rows,
        "kv_heads": spec.kv_heads,
        "cuda": placement.on_gpu,
        "attention": placement.attention,
        "timeout": TIMEOUT,
        "threads": threads,
    }
    try:
        ranks.store.set("job", json.dumps(job))
        ranks.wait_for("joined")
        ranks.init_groups()
        worker = Worker(load_share(folder, spec, ranks, ranks.device, placement.attention), ranks)
        ranks.wait_for("ready")
    except BaseException:
        for process in processes.values():
            process.kill()
        ranks.leave()
        raise
    log.info("the target is divided over %d ranks on %s", world, placement.device)
    return ParallelEngine(worker)


def follow_if_told() -> None:
    """In a process that `torchrun` has started as another rank than 0: follow rank 0, then end the process.

    Anywhere else it does nothing. To be called before anything that only one process may do.
    """
    launched = Launched.read()
    if launched is not None and launched.rank:
        follow(launched)
        sys.exit(0)
