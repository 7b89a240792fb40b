"""The requests of the soak, all made from one seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from mtad.methods import METHODS
from mtad.params import DecodingParams

Cancel = Literal["seconds", "pieces", "leave"]


@dataclass(frozen=True)
class Job:
    """One request and what its client does with it.

    Attributes:
        prompt: token ids.
        params: decoding parameters, with a seed.
        priority: of the submission.
        cancel: how it is cancelled; None: not.
        after: seconds or pieces after which.
    """

    prompt: list[int]
    params: DecodingParams
    priority: int
    cancel: Cancel | None
    after: float


def make_job(number: int, seed: int, prompts: Sequence[Sequence[int]], room: int) -> Job:
    """The `number`-th request; always the same for one seed.

    Args:
        number, seed: key of its random numbers.
        prompts: material for prompts, token ids.
        room: tokens that prompt and text may have together.
    """
    rng = random.Random(f"{seed}:{number}")
    max_tokens = min(rng.choice((1, 2, 16, 32, 32, 64)), room // 2)
    head = [token for prompt in prompts[:4] for token in prompt]
    kind, own = rng.random(), list(rng.choice(prompts))
    if kind < 0.1:
        prompt = own[:1]
    elif kind < 0.3:
        prompt = (own + head)[: rng.randint(1, 512)]
    elif kind < 0.5:
        prompt = head[: 64 * rng.randint(1, 3)] + own  # starts like others do
    else:
        prompt = own
    params = DecodingParams(
        method=rng.choice(list(METHODS)),
        draft_len=rng.randint(1, 4),
        beam_width=rng.randint(1, 3),
        branching=rng.choice(((2, 2), (3, 1, 1))),
        replacement=rng.random() < 0.5,
        draft_confidence=rng.choice((None, None, 0.1)),
        accept_threshold=rng.choice((0.0, 0.05, 0.3, 1.0)),
        temperature=rng.choice((0.0, 0.7, 1.0, 1.0)),
        top_k=0 if rng.random() < 0.01 else rng.choice((1, 5, 10, 20)),  # 0 makes every row of its batch dear
        top_p=rng.choice((0.9, 0.9, 1.0)),
        seed=rng.getrandbits(62),
        max_tokens=max_tokens,
        min_tokens=rng.choice((0, 0, max_tokens // 4)),
        stop=rng.choice(((), (), ("\n", " = "))),
        n=2 if rng.random() < 0.05 else 1,
        top_logprobs=rng.choice((0, 0, 3)),
        repetition_penalty=rng.choice((1.0, 1.0, 1.0, 1.2)),
        presence_penalty=rng.choice((0.0, 0.0, 0.0, 0.5)),
    )
    if rng.random() < 0.25 and params.flexible:
        params = replace(params, speculation="adaptive")
    cancel: Cancel | None = rng.choice(("seconds", "pieces", "leave")) if rng.random() < 0.2 else None
    after = rng.random() * 0.8 if cancel == "seconds" else rng.randint(0, 8)
    if cancel == "leave":
        params = replace(params, n=1)
    return Job(prompt[: room - max_tokens], params, rng.choice((0, 0, 0, 1, 5)), cancel, after)
