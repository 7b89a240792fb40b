"""What a worker of the comparison reads and writes: lines of one JSON object each. Standard library only.

A worker is `python -m MODULE SETTINGS`. It writes {"ready": {package: version}} once it can decode, and then answers
each job with {"texts": [[number, [id, ..]], ..]}: the new tokens of each prompt, whose number is its place in the job.

* Settings: checkpoints, a folder with `target` and `auxiliary`; pair, our export of them; folder, where a worker keeps
  what it makes of them; draft_len, tokens of drafts, 0 for none; lookup, where given: they are looked up in the text,
  and not the auxiliary's; threads; rows, most texts at once.
* Jobs: prompts, token ids of each; in_flight, how many are decoded at once, at most; tokens, new ones of each text, no
  fewer and no more, whatever token ends it otherwise; temperature, top_k, top_p, seed. With top_k 1 texts are greedy.

The catalog adds what single workers want to know.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROLES = ("target", "auxiliary")
Job = dict[str, Any]
Answer = Callable[[Job], list[tuple[int, list[int]]]]


def serve(open_peer: Callable[[dict[str, Any]], tuple[dict[str, str], Answer]]) -> None:
    """Answer jobs until there are no more. `open_peer` gets the settings, and gives versions and what answers a job."""
    with os.fdopen(os.dup(1), "w") as lines:
        os.dup2(2, 1)  # what a library prints is no answer
        versions, answer = open_peer(json.loads(sys.argv[1]))
        print(json.dumps({"ready": versions}), file=lines, flush=True)
        for line in sys.stdin:
            print(json.dumps({"texts": answer(json.loads(line))}), file=lines, flush=True)


def made_once(folder: Path, write: Callable[[Path], object]) -> Path:
    """`folder`, which `write` fills when it is asked for first; a broken attempt leaves nothing there."""
    if not folder.is_dir():
        new = folder.with_name(f"{folder.name}.incomplete")
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        write(new)
        new.rename(folder)
    return folder
