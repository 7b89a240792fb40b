"""Ranks 1 .. of a divided target: each runs the commands of rank 0 on its part, until it is told to stop."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import traceback
from dataclasses import replace
from pathlib import Path

import torch

from engines.folder import read_spec
from engines.parallel.launch import Launched
from engines.parallel.process_group import ProcessRanks
from engines.parallel.sharding import load_share
from engines.parallel.worker import Op, Worker
from engines.pytorch.hook import quiet_transformers


@torch.inference_mode()
def follow(launched: Launched) -> None:
    """Join rank 0 and do as it says; returns when it has closed the engine.

    Raises:
        Exception: whatever has gone wrong; rank 0 has been told.
    """
    for signals in (signal.SIGINT, signal.SIGTERM):  # sent to all ranks at once; rank 0 decides when it is over
        signal.signal(signals, signal.SIG_IGN)
    store = launched.connect()
    job = json.loads(store.get("job"))
    device = f"cuda:{launched.local}" if job["cuda"] else "cpu"
    ranks = ProcessRanks(launched, device, job["timeout"])
    try:
        torch.set_num_threads(job["threads"])
        quiet_transformers()
        folder = Path(job["folder"])
        spec = replace(read_spec(folder), rows=job["rows"], kv_heads=job["kv_heads"])
        ranks.publish("joined")
        ranks.init_groups()
        worker = Worker(load_share(folder, spec, ranks, ranks.device, job["attention"]), ranks)
        ranks.publish("ready")
        while (command := worker.recv_command())[0] is not Op.STOP:
            worker.run(*command)
    except Exception as error:
        with contextlib.suppress(RuntimeError):  # the store, and so rank 0, may be gone
            ranks.publish("failed", json.dumps(f"{type(error).__name__}: {error}"))
        raise
    finally:
        ranks.leave()


def main() -> None:
    """Entry point of a process that rank 0 has started."""
    launched = Launched.read()
    if launched is None or not launched.rank:
        sys.exit("engines.parallel.follower is started by rank 0 of a tensor-parallel pair, not by hand")
    try:
        follow(launched)
    except Exception:
        traceback.print_exc()
        sys.exit(1)
    sys.stderr.flush()
    os._exit(0)  # rank 0 waits for it: taking the libraries apart takes seconds, and nothing is left to be done


if __name__ == "__main__":
    main()
