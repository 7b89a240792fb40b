"""What a worker of the comparison reads and writes: lines of one JSON object each. Standard library only.

A worker is `python -m MODULE SETTINGS`. It writes {"ready": {package: version}} once it can decode, and then answers
each job with {"texts": [[number, [id, ..]], ..]}: the new tokens of each prompt, whose number is its place in the job.
A job says

* prompts: token ids of each prompt; in_flight: how many of them are decoded at once, at most;
* tokens: new tokens of each text, no fewer and no more, whatever token ends a text otherwise;
* temperature, top_k, top_p, seed: of sampling. With top_k 1 the texts are greedy;
* whatever else the worker's module wants to know.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

Job = dict[str, Any]
Answer = Callable[[Job], Iterable[tuple[int, list[int]]]]


def serve(open_peer: Callable[[dict[str, Any]], tuple[dict[str, str], Answer]]) -> None:
    """Answer jobs until there are no more.

    Args:
        open_peer: given the settings, returns versions of packages, and what answers a job.
    """
    with os.fdopen(os.dup(1), "w") as lines:
        os.dup2(2, 1)  # what a library prints is no answer
        versions, answer = open_peer(json.loads(sys.argv[1]))
        print(json.dumps({"ready": versions}), file=lines, flush=True)
        for line in sys.stdin:
            print(json.dumps({"texts": list(answer(json.loads(line)))}), file=lines, flush=True)
