"""`ExecutorLLM`: text in, text out, over two executors of TensorRT-LLM. Not executed with the library."""

from __future__ import annotations

import itertools
from dataclasses import fields
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch

from engines.tensorrt_llm_spec import ExecutorSpec, paths, read_executor_spec
from mtad.errors import InvalidInput
from mtad.params import DecodingParams
from runtime.config import RuntimeConfig
from runtime.constraints.constraint import Constrainer
from runtime.decoder.batch_builder import BatchBuilder
from runtime.decoder.block import run_block_on_host
from runtime.decoder.kv_cache import KvCaches
from runtime.llm import LLM
from runtime.loop import DecodingLoop
from runtime.output.processor import OutputProcessor
from runtime.pair import Pair, check_agreement, open_tokenizer, read_description
from runtime.prompts import Prompt, Prompts
from runtime.scheduler.request import Request
from runtime.scheduler.scheduler import Scheduler
from runtime.tensorrt_llm.auxiliary import ExecutorAuxiliary
from runtime.tensorrt_llm.compat import executor_bindings
from runtime.tensorrt_llm.executor import ExecutorClient
from runtime.tensorrt_llm.target import ExecutorTarget

OPTIONS = ("graphs", "max_waiting")
"""Options of `RuntimeConfig` that count here; the others were settled when the engines were built."""


class ExecutorLLM(LLM):
    """A pair of executors, ready to decode: `LLM`'s interface, and `AsyncLLM` takes it as one.

    Adaptive drafts are not there: a request that would have them by default drafts what it asks for.

    Args:
        folder: a pair folder of `mtad export --to tensorrt-llm`.
        config: how it runs; `graphs` and `max_waiting` count.
        bindings: `tensorrt_llm.bindings.executor`, or what takes its place.

    Raises:
        InvalidInput: the library is missing or another release, it is no such pair, or an option does not count.
    """

    def __init__(self, folder: Path | str, config: RuntimeConfig | None = None, *, bindings: Any = None) -> None:
        folder, self.config = Path(folder), config or RuntimeConfig()
        for field in fields(RuntimeConfig):
            if field.name not in OPTIONS and (value := getattr(self.config, field.name)) != field.default:
                problem = "settled when the engines of TensorRT-LLM were built, or theirs; leave it out"
                raise InvalidInput(field.name, value, problem)
        pair = read_pair(folder)
        target, auxiliary = (cast(ExecutorSpec, engine.spec) for engine in (pair.target, pair.auxiliary))
        of = executor_bindings() if bindings is None else bindings
        specs = target, auxiliary
        self.clients = [ExecutorClient.open(folder / s.role, of, s, pair.vocab_size, self.config.graphs) for s in specs]
        self.pair, self.blocks = pair, None
        self.memory = cast(Any, f"keys and values: {target.kv_tokens} and {auxiliary.kv_tokens} tokens")
        tokenizer = pair.tokenizer.backend_tokenizer
        self._constrainer = Constrainer(tokenizer, pair.vocab_size, pair.eos)
        sizes = target.rows, target.capacity, target.draft_len, target.beam_width
        scheduler = Scheduler(*sizes, self.config.max_waiting)
        self._prompts = Prompts(pair.tokenizer, pair.vocab_size, scheduler.room_for_tokens)
        scorer = ExecutorTarget(self.clients[0], scheduler.running)
        drafter = ExecutorAuxiliary(self.clients[1], scorer)
        self.loop = DecodingLoop(
            scheduler,
            KvCaches(drafter, scorer),
            BatchBuilder(pair.vocab_size, pair.eos, listed=pair.vocab_size),
            partial(run_block_on_host, drafter, scorer),
            OutputProcessor(tokenizer, pair.eos, self._constrainer),
            target.rows * target.capacity,  # prompts are stored by the executors
        )
        self._ids = itertools.count()

    def requests(self, prompt: Prompt, params: DecodingParams | None = None, *rest: Any, **more: Any) -> list[Request]:
        """Check prompts and parameters, and make requests of them, as `LLM.requests` does.

        Raises:
            InvalidInput: also where adaptive drafts are asked for by name, log-probabilities of prompts, or a tree that
                the target has no room for.
        """
        asked = self.pair.defaults if params is None else params
        if isinstance(asked, DecodingParams):
            if asked.speculation == "adaptive":
                raise InvalidInput("speculation", "adaptive", "not over TensorRT-LLM executors; leave it out")
            if asked.prompt_logprobs is not None:
                problem = "not over TensorRT-LLM executors; leave it out"
                raise InvalidInput("prompt_logprobs", asked.prompt_logprobs, problem)
            if paths(asked) > (built := self.clients[0].spec.paths):
                problem = f"the target has {built} path per row, not {paths(asked)}; export with --defaults for it"
                raise InvalidInput("method", asked.method, problem)
        return super().requests(prompt, params, *rest, **more)

    def measure(self, again: bool = False) -> None:
        """Nothing: see the class."""

    def close(self) -> None:
        """Release the GPUs; requests that run are given up."""
        self.loop.cancel(list(self.loop.scheduler.requests), report=False)
        for client in self.clients:
            client.close()


def read_pair(folder: Path) -> Pair:
    """What `mtad export --to tensorrt-llm` wrote; no engine is loaded, and of a `Pair`'s fields, caches' are missing.

    Raises:
        InvalidInput: the folder is not a usable pair.
    """
    values = read_description(folder)
    vocab_size, defaults, vocabulary = (values[name] for name in ("vocab_size", "defaults", "vocabulary_hash"))
    target, auxiliary = (read_executor_spec(folder / role) for role in ("target", "auxiliary"))
    check_agreement(target, auxiliary, ("rows", "capacity", "draft_len", "beam_width"), vocab_size)
    tokenizer = open_tokenizer(folder / "target", vocabulary)
    open_tokenizer(folder / "auxiliary", vocabulary)
    pair = SimpleNamespace(
        target=SimpleNamespace(spec=target),
        auxiliary=SimpleNamespace(spec=auxiliary),
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        eos=target.eos_token_ids,
        defaults=DecodingParams.from_dict(defaults),
        device=torch.device("cpu"),
        limited="max_tokens" in defaults,
        runs_on="",
    )
    return cast(Pair, pair)
