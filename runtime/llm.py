"""`LLM`: text in, text out."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from tqdm import tqdm

from mtad.errors import InvalidInput
from mtad.params import DecodingParams
from runtime.loop import DecodingLoop
from runtime.pair import Pair, open_pair
from runtime.request import Request, Result
from runtime.roles import EngineAuxiliary, EngineTarget
from runtime.scheduler import Scheduler

Prompt = str | Sequence[int]
"""Text, or token ids."""


class LLM:
    """A pair of engines, ready to decode.

    `generate` is for batches. `add` and `step` are the same loop, one block at a time: requests may be added between
    any two steps.

    Args:
        pair: a pair folder, or an opened pair.
        threads: CPU threads of the target; default: all cores.
        max_draft_len, max_beam_width: largest draft a request may ask for; their product of KV columns is kept free
            in every row.
        prefill_chunk: prompt tokens a prefill step runs.

    Raises:
        InvalidInput: the folder is not a usable pair.
    """

    def __init__(
        self,
        pair: Pair | Path | str,
        threads: int | None = None,
        max_draft_len: int = 8,
        max_beam_width: int = 8,
        prefill_chunk: int = 128,
    ) -> None:
        self.pair = pair if isinstance(pair, Pair) else open_pair(pair, threads)
        spec = self.pair.target.spec
        if max_draft_len * max_beam_width >= spec.capacity:
            problem = f"max_draft_len x max_beam_width must stay below the capacity, {spec.capacity}"
            raise InvalidInput("max_draft_len", max_draft_len, problem)
        if prefill_chunk < 1:
            raise InvalidInput("prefill_chunk", prefill_chunk, "give at least 1")
        self.loop = DecodingLoop(
            EngineAuxiliary(self.pair.auxiliary, self.pair.vocab_size),
            EngineTarget(self.pair.target, self.pair.vocab_size),
            Scheduler(spec.rows, spec.capacity, max_draft_len, max_beam_width),
            self.pair.tokenizer.backend_tokenizer,
            self.pair.vocab_size,
            self.pair.eos,
        )
        self._ids = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: DecodingParams | Sequence[DecodingParams] | None = None,
        progress: bool = False,
    ) -> list[Result]:
        """Decode prompts, as many at once as the engines have rows.

        Args:
            prompts: one prompt or several; text or token ids.
            params: for all of them, or one each; None takes the pair's defaults.
            progress: show a progress bar.

        Returns:
            results in the order of the prompts.

        Raises:
            InvalidInput: a prompt or parameter is unusable; nothing was run.
        """
        one = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
        many = cast("Sequence[Prompt]", [prompts] if one else prompts)
        each = [params] * len(many) if params is None or isinstance(params, DecodingParams) else list(params)
        if len(each) != len(many):
            raise InvalidInput("params", f"{len(each)} given", f"give one for all, or one for each of {len(many)}")
        requests = [self._request(prompt, p) for prompt, p in zip(many, each, strict=True)]
        self.loop.scheduler.submit(*requests)
        pending = {request.id for request in requests}
        try:
            with tqdm(total=len(requests), unit="request", disable=not progress) as bar:
                while pending:
                    finished = pending & {request.id for request in self.step()}
                    pending -= finished
                    bar.update(len(finished))
        finally:
            if pending:  # interrupted, or an engine failed: nobody will ask for these any more
                self.loop.drop(requests)
        return [self.result(request) for request in requests]

    def add(self, prompt: Prompt, params: DecodingParams | None = None) -> Request:
        """Queue one request.

        Raises:
            InvalidInput: prompt or parameters are unusable.
        """
        request = self._request(prompt, params)
        self.loop.scheduler.submit(request)
        return request

    def step(self) -> list[Request]:
        """Run one block of every running request; returns those that finished."""
        return self.loop.turn()

    @staticmethod
    def result(request: Request) -> Result:
        """The result of a finished request."""
        assert request.finish_reason is not None, "the request has not finished"
        return Result(
            text=request.text,
            token_ids=request.tokens,
            finish_reason=request.finish_reason,
            logprobs=request.log_probs,
            statistics=request.statistics,
            seed=request.seed,
            prompt_token_ids=request.prompt,
        )

    def _request(self, prompt: Prompt, params: DecodingParams | None) -> Request:
        params = params or self.pair.defaults
        if isinstance(prompt, str):
            ids = list(self.pair.tokenizer(prompt).input_ids)
        elif isinstance(prompt, bytes) or not isinstance(prompt, Sequence):
            raise InvalidInput("prompt", prompt, "give text or a sequence of token ids")
        else:
            ids = list(prompt)
            for token in ids:
                if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < self.pair.vocab_size:
                    raise InvalidInput("prompt", token, f"token ids are integers from 0 to {self.pair.vocab_size - 1}")
        if not ids:
            raise InvalidInput("prompt", prompt, "empty; give at least one token")
        seed = secrets.randbits(63) if params.seed is None else params.seed
        return Request(next(self._ids), ids, params, seed)
