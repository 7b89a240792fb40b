"""`ExecutorLLM`: text in, text out, over two executors of TensorRT-LLM. Not executed with the library."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedTokenizerBase

from engines.tensorrt_llm_spec import ExecutorSpec, paths, read_executor_spec
from mtad.errors import InvalidInput
from mtad.params import DecodingParams
from runtime.config import RuntimeConfig
from runtime.constraints.constraint import Constrainer
from runtime.decoder.batch_builder import BatchBuilder
from runtime.decoder.block import run_block_on_host
from runtime.decoder.kv_cache import KvCaches
from runtime.llm import LLM, Prompt
from runtime.loop import DecodingLoop
from runtime.output.processor import OutputProcessor
from runtime.pair import Pair, check_agreement, open_tokenizer, read_description
from runtime.scheduler.request import Request
from runtime.scheduler.scheduler import Scheduler
from runtime.tensorrt_llm.auxiliary import ExecutorAuxiliary
from runtime.tensorrt_llm.compat import executor_bindings
from runtime.tensorrt_llm.executor import Client
from runtime.tensorrt_llm.target import ExecutorTarget

OPTIONS = ("graphs", "max_waiting")
"""Options of `RuntimeConfig` that count here; the others were settled when the engines were built."""


@dataclass(frozen=True)
class OpenExecutor:
    """What is to be seen of an engine from outside: its description, as `engines.Engine` has it."""

    spec: ExecutorSpec


@dataclass(frozen=True)
class ExecutorPair:
    """Two executors that decode together; the fields of `runtime.pair.Pair` that do not concern caches.

    Attributes:
        target, auxiliary: the engines.
        tokenizer: the one they share.
        vocab_size: token ids both know.
        eos: tokens that end a text, the target's.
        defaults: decoding parameters of `pair.json`.
        device: where the loop's own tensors are.
    """

    target: OpenExecutor
    auxiliary: OpenExecutor
    tokenizer: PreTrainedTokenizerBase
    vocab_size: int
    eos: tuple[int, ...]
    defaults: DecodingParams
    device: torch.device = torch.device("cpu")  # noqa: RUF009


class ExecutorLLM(LLM):
    """A pair of executors, ready to decode: `LLM`'s interface, and `AsyncLLM` takes it as one.

    Adaptive drafts are not there: what a block costs is the executors' affair, and a request that would have them by
    default drafts what it asks for.

    Args:
        folder: a pair folder of `mtad export --to tensorrt-llm`.
        config: how it runs; `graphs` and `max_waiting` count.
        bindings: `tensorrt_llm.bindings.executor`, or what takes its place.

    Raises:
        InvalidInput: the library is missing or another one than this is written for, the folder is no such pair, or an
            option does not count here.
    """

    def __init__(self, folder: Path | str, config: RuntimeConfig | None = None, *, bindings: Any = None) -> None:
        folder, self.config = Path(folder), config or RuntimeConfig()
        for field in fields(RuntimeConfig):
            if field.name not in OPTIONS and (value := getattr(self.config, field.name)) != field.default:
                problem = "settled when the engines of TensorRT-LLM were built, or theirs; leave it out"
                raise InvalidInput(field.name, value, problem)
        pair = read_pair(folder)
        target, auxiliary = pair.target.spec, pair.auxiliary.spec
        if bindings is None:
            bindings = executor_bindings()
        self.clients = [
            Client.open(folder / spec.role, bindings, spec, pair.vocab_size, self.config.graphs)
            for spec in (target, auxiliary)
        ]
        # of a pair, what this class does not override reads the fields that an `ExecutorPair` has
        self.pair, self.blocks = cast(Pair, pair), None
        self.memory = cast(Any, f"keys and values: {target.kv_tokens} and {auxiliary.kv_tokens} tokens")
        tokenizer = pair.tokenizer.backend_tokenizer
        self._constrainer = Constrainer(tokenizer, pair.vocab_size, pair.eos)
        scorer = ExecutorTarget(self.clients[0])
        drafter = ExecutorAuxiliary(self.clients[1], scorer)
        self.loop = DecodingLoop(
            Scheduler(target.rows, target.capacity, target.draft_len, target.beam_width, self.config.max_waiting),
            KvCaches(drafter, scorer),
            BatchBuilder(pair.vocab_size, pair.eos),
            partial(run_block_on_host, drafter, scorer),
            OutputProcessor(tokenizer, pair.eos, self._constrainer),
            target.rows * target.capacity,  # prompts are stored by the executors
        )
        self._ids = itertools.count()

    def requests(self, prompt: Prompt, params: DecodingParams | None = None, priority: int = 0) -> list[Request]:
        """See `LLM.requests`.

        Raises:
            InvalidInput: also where adaptive drafts are asked for by name, or a tree that the target has no room for.
        """
        asked = self.pair.defaults if params is None else params
        if isinstance(asked, DecodingParams):
            if asked.speculation == "adaptive":
                raise InvalidInput("speculation", "adaptive", "not over TensorRT-LLM executors; leave it out")
            spec = cast(ExecutorSpec, self.pair.target.spec)
            if paths(asked) > spec.paths:
                problem = (
                    f"the target was built to score {spec.paths} path per row, this method has up to {paths(asked)}; "
                    f"export again with --defaults for it"
                )
                raise InvalidInput("method", asked.method, problem)
        return super().requests(prompt, params, priority)

    def submit(self, *requests: Request) -> None:
        """See `LLM.submit`; nothing is ever measured."""
        self.loop.submit(*requests)

    def measure(self, again: bool = False) -> None:
        """Nothing: see the class."""

    def close(self) -> None:
        """Release the GPUs; requests that run are given up."""
        self.loop.cancel(list(self.loop.scheduler.requests), report=False)
        for client in self.clients:
            client.close()


def read_pair(folder: Path) -> ExecutorPair:
    """Read what `mtad export --to tensorrt-llm` wrote; no engine is loaded.

    Raises:
        InvalidInput: the folder is not a usable pair.
    """
    vocab_size, defaults, vocabulary = read_description(folder)
    target, auxiliary = (read_executor_spec(folder / role) for role in ("target", "auxiliary"))
    check_agreement(target, auxiliary, ("rows", "capacity", "draft_len", "beam_width"), vocab_size)
    tokenizer = open_tokenizer(folder / "target", vocabulary)
    open_tokenizer(folder / "auxiliary", vocabulary)
    return ExecutorPair(
        OpenExecutor(target),
        OpenExecutor(auxiliary),
        tokenizer,
        vocab_size,
        target.eos_token_ids,
        DecodingParams.from_dict(defaults),
    )
