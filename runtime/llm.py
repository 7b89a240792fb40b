"""`LLM`: text in, text out."""

from __future__ import annotations

import itertools
import logging
import os
import secrets
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm

from engines.capture import CudaRecorder, Recorder
from mtad.errors import CapacityExceeded, InvalidInput, refused_as
from mtad.params import DecodingParams
from runtime.config import AT_OPENING, RuntimeConfig
from runtime.constraints.constraint import Constrainer
from runtime.constraints.follower import Grammar
from runtime.decoder.block import BlockRunner
from runtime.decoder.engine_role import EngineRole
from runtime.decoder.host_runner import HostRunner
from runtime.decoder.kv_cache import KvCaches
from runtime.loop import DecodingLoop
from runtime.output.processor import OutputProcessor
from runtime.pair import Pair, open_pair
from runtime.prompts import Prompt, several, token_ids
from runtime.scheduler.request import Request, Result, TokenScore
from runtime.scheduler.scheduler import Scheduler
from runtime.scheduler.thoughts import Thoughts, ends_with, known_tags
from runtime.speculation.lengths import variants

if TYPE_CHECKING:
    from runtime.decoder.cuda_graph.block_runner import CudaGraphRunner

log = logging.getLogger(__name__)

_SEED_STEP = 0x9E3779B97F4A7C15  # far from any small number: choices of requests with seeds 1, 2, .. do not meet


class LLM:
    """A pair of engines, ready to decode.

    `generate` is for batches. `add` and `step` are the same loop, one turn at a time: requests may be added and
    cancelled between any two steps. Not for several threads at once; `AsyncLLM` is.

    Args:
        config: how it runs; by default, `RuntimeConfig()`. Of an opened pair, what decides how it is opened is settled.
        record: parameters of requests whose blocks are captured as CUDA graphs at start, for all that batches are
            padded to; others are captured when they first come. By default, the pair's own; () captures none at start.
        recorder: what captures blocks and steps; by default, CUDA's, on a GPU. Given one, blocks run as on a GPU,
            wherever the engines are.

    Attributes:
        blocks: runs blocks on a device; None where they run on the host.
        tags: by which the pair's tokenizer opens and closes thoughts; None where they are not known.
        grammars: compiles those of constrained requests.

    Raises:
        InvalidInput: the folder is not a usable pair, or an option does not fit it.
    """

    def __init__(
        self,
        pair: Pair | Path | str,
        config: RuntimeConfig | None = None,
        *,
        record: Sequence[DecodingParams] | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self.config = config = config or RuntimeConfig()
        if not isinstance(config, RuntimeConfig):
            raise InvalidInput("config", config, "give a RuntimeConfig")
        for name in AT_OPENING if isinstance(pair, Pair) else ():
            if (value := getattr(config, name)) != getattr(RuntimeConfig, name):
                raise InvalidInput(name, value, "the pair is already open; give the option to open_pair")
        self.pair = pair = pair if isinstance(pair, Pair) else open_pair(pair, config)
        spec, device = pair.target.spec, pair.device
        if config.nodes >= spec.capacity:
            problem = f"max_draft_len x max_beam_width must stay below the capacity, {spec.capacity}"
            raise InvalidInput("max_draft_len", config.max_draft_len, problem)
        for engine in (pair.auxiliary, pair.target):
            if engine.max_tokens is not None and config.nodes >= engine.max_tokens:
                problem = f"there is room for {engine.max_tokens - 1} drafted tokens, max_draft_len x max_beam_width"
                raise InvalidInput("max_draft_len", config.max_draft_len, problem)
        if recorder is None and device.type == "cuda":
            recorder = CudaRecorder(str(device)) if config.graphs else Recorder(str(device))
        self._auxiliary = EngineRole(pair.auxiliary, pair.vocab_size, recorder)
        self._target = EngineRole(pair.target, pair.vocab_size, recorder)
        host = HostRunner(self._auxiliary, self._target, pair.eos)
        self.blocks: CudaGraphRunner | None = None
        if recorder:
            from runtime.decoder.cuda_graph.block_runner import CudaGraphRunner

            self.blocks = CudaGraphRunner(host, pair.eos, recorder)
        self.runner: BlockRunner = self.blocks or host
        kept = config.prefix_columns(spec.capacity)
        prefixes = pair.auxiliary.cache.prefix_cache(kept), pair.target.cache.prefix_cache(kept)
        whole = pair.memory(config, kept)
        self.memory = replace(whole, pages=max(pair.target.cache.pages, pair.auxiliary.cache.pages))
        log.info("%s", self.memory)
        tokenizer = pair.tokenizer.backend_tokenizer
        self._constrainer = Constrainer(tokenizer, pair.vocab_size, pair.eos)
        self.grammars = self._constrainer.grammars
        unrecorded = self.blocks.unrecorded if self.blocks else None
        self.loop = DecodingLoop(
            Scheduler(spec.rows, spec.capacity, config.max_draft_len, config.max_beam_width, config.max_waiting),
            KvCaches(self._auxiliary, self._target, prefixes),
            self.runner,
            OutputProcessor(tokenizer, pair.eos, self._constrainer, unrecorded),
            config.max_prefill_tokens,
            pair.costs,
            config.lookup_tokens,
        )
        self.tags = known_tags(pair.tokenizer)
        self.record([pair.defaults] if record is None else record)
        self._ids, self._process, self._generating = itertools.count(), os.getpid(), threading.Lock()

    def record(self, params: Sequence[DecodingParams]) -> None:
        """Capture the blocks of requests with these parameters, where blocks are captured. Only while none is running.

        Of automatic drafts, those of each length.

        Raises:
            InvalidInput: they ask for the auxiliary, and the pair has none.
        """
        assert not self.loop.scheduler.holders, "rows in use would be overwritten"
        settled = [self.pair.settled(p) for p in params]
        if self.blocks:
            self.loop.caches.claim()
            self.blocks.prepare([own for p in settled for own in variants(p, self.config.max_draft_len)])

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: DecodingParams | Sequence[DecodingParams] | None = None,
        progress: bool = False,
    ) -> list[Result]:
        """Decode prompts, as many at once as the engines have rows. Threads that call it wait for each other.

        Args:
            prompts: one prompt or several; text or token ids.
            params: for all of them, or one each; None takes the pair's defaults.
            progress: show a progress bar.

        Returns:
            results in the order of the prompts; the `n` choices of a prompt one after another.

        Raises:
            InvalidInput: a prompt or parameter is unusable; nothing was run.
            RequestFailed: something broke under one of them; the others are given up.
        """
        many = several(prompts)
        each = list(params) if isinstance(params, Sequence) else [params] * len(many)
        if len(each) != len(many):
            raise InvalidInput("params", f"{len(each)} given", f"give one, or one for each of the {len(many)} prompts")
        requests = [r for prompt, p in zip(many, each, strict=True) for r in self.requests(prompt, p)]
        backlog, pending, others = deque(requests), {request.id for request in requests}, list[Request]()
        with self._generating:
            try:
                with tqdm(total=len(requests), unit="request", disable=not progress) as bar:
                    while pending:
                        while backlog and self.loop.scheduler.counts[1] < self.config.max_waiting:
                            self.loop.scheduler.submit(backlog.popleft())
                        ended = self.step()
                        others += [request for request in ended if request.id not in pending]
                        mine = [request for request in ended if request.id in pending]
                        pending.difference_update(request.id for request in mine)
                        bar.update(len(mine))
                        for request in mine:
                            Result.of(request)  # raises if it failed
            finally:
                # interrupted, or something broke: nobody asks for the rest any more
                self.loop.cancel(requests, report=False)
                self.loop.ended += others
        return [Result.of(request) for request in requests]

    async def compiled(self, params: DecodingParams | None) -> Grammar | None:
        """What `requests` needs of a constrained request's parameters, without blocking the event loop.

        Raises:
            InvalidInput: the parameters are unusable.
        """
        params = self._checked(params)
        return await self.grammars.compile_soon(params) if params.constrained else None

    def requests(
        self,
        prompt: Prompt,
        params: DecodingParams | None = None,
        priority: int = 0,
        *,
        client: str = "",
        cache_salt: str = "",
        grammar: Grammar | None = None,
        fit: bool = False,
    ) -> list[Request]:
        """The requests of a prompt, one per choice, checked but not queued. Safe for several threads at once.

        Args:
            params: None takes the pair's defaults.
            client: who asks; rows are shared out fairly among clients.
            cache_salt: prompts and kept texts are reused by requests with the same salt only.
            grammar: what `compiled` returned; by default, this thread waits for it.
            fit: where `max_tokens` do not fit behind the prompt, it is what fits.

        Raises:
            InvalidInput: prompt or parameters are unusable.
        """
        params = self._checked(params)
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise InvalidInput("priority", priority, "give an integer")
        grammar = self._constrainer.check(params, grammar)
        ids = token_ids(prompt, self.pair.vocab_size, self.tokenize)
        left = max(1, params.min_tokens, self.loop.scheduler.room_for_tokens - len(ids))
        if params.max_tokens is None or (fit and params.max_tokens > left):
            params = replace(params, max_tokens=left)
        seed = secrets.randbits(53) if params.seed is None else params.seed  # what JavaScript holds
        seeds = [(seed + index * _SEED_STEP) % 2**63 for index in range(params.n)]
        salted = blake2b(cache_salt.encode(errors="surrogatepass"), digest_size=7).digest()
        salt = int.from_bytes(salted) + 1 if cache_salt else 0
        scores: list[TokenScore] = []
        requests = [
            Request(next(self._ids), ids, params, s, i, priority, client, salt, grammar=grammar, prompt_scores=scores)
            for i, s in enumerate(seeds)
        ]
        for request in requests:
            request.thoughts = self._thoughts(ids, params)
        self.loop.scheduler.check(requests[0])
        return requests

    def _thoughts(self, prompt: list[int], params: DecodingParams) -> Thoughts | None:
        tags = params.thinking_tags or self.tags
        if tags is None:
            for name in ("thinking_method", "thinking_threshold", "thinking_divergence", "thinking_token_budget"):
                if (value := getattr(params, name)) is not None:
                    raise InvalidInput(name, value, "no tags of thoughts are known of this pair; give thinking_tags")
            return None
        opening, closing = (self.tokenize(tag, special_tokens=False) for tag in tags)
        if not (opening and closing):
            raise InvalidInput("thinking_tags", tags, "the tokenizer makes no tokens of one of them")
        inside, over = (ends_with(prompt, tag, self.pair.tokenizer) for tag in (opening, closing))
        return Thoughts(opening, closing, inside, params.thinking_token_budget, bool(params.thinking_tags) and not over)

    def add(self, prompt: Prompt, params: DecodingParams | None = None, priority: int = 0) -> Request:
        """Queue one request.

        Raises:
            InvalidInput: prompt or parameters are unusable, or ask for several choices.
            QueueFull: try again later.
        """
        if (n := (params or self.pair.defaults).n) > 1:
            raise InvalidInput("n", n, "add one request per choice, or use generate")
        request = self.requests(prompt, params, priority)[0]
        self.loop.scheduler.submit(request)
        return request

    def cancel(self, *requests: Request) -> None:
        """End requests now, with what they have; those that have ended already stay as they are."""
        self.loop.cancel(requests)

    def step(self) -> list[Request]:
        """One step of the loop; returns the requests that ended since the last one."""
        return self.loop.step()

    def tokenize(self, text: str, special_tokens: bool = True) -> list[int]:
        """Token ids of a text, with the special tokens that the tokenizer adds to every text or without.

        For several threads at once.

        Raises:
            CapacityExceeded: the text could not fit even if all its tokens were as long as the vocabulary's longest;
                it is not tokenized then.
            InvalidInput: the tokenizer cannot read it.
        """
        room = self.loop.scheduler.room_for_tokens
        if len(text) > room * self._longest_token:
            problem = f"give fewer than {room} tokens, of {self._longest_token} characters at most"
            raise CapacityExceeded("prompt", f"{len(text)} characters", problem)
        with refused_as("prompt", text, "the tokenizer cannot read it"):  # such as half of a surrogate pair
            return list(self.pair.tokenizer.backend_tokenizer.encode(text, add_special_tokens=special_tokens).ids)

    @cached_property
    def _longest_token(self) -> int:
        """Characters of the longest token: a byte-level vocabulary has a character per byte, so text has no more."""
        return max(map(len, self.pair.tokenizer.get_vocab()))

    def _checked(self, params: DecodingParams | None) -> DecodingParams:
        if os.getpid() != self._process:
            raise InvalidInput("llm", None, "opened before this process was forked, without its threads; open it here")
        params = self.pair.defaults if params is None else params
        if not isinstance(params, DecodingParams):
            raise InvalidInput("params", params, "give DecodingParams; DecodingParams.from_dict makes them from a dict")
        return self.pair.settled(params)
