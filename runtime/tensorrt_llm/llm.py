"""`ExecutorLLM`: text in, text out, over two executors of TensorRT-LLM. Not executed with the library."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from engines.folder import read_json
from engines.tensorrt_llm_spec import ExecutorSpec, read_executor_spec
from mtad.errors import InvalidInput
from mtad.params import DecodingParams
from runtime.constraints.constraint import Constrainer
from runtime.llm import LLM, Prompt
from runtime.pair import Pair, open_tokenizer
from runtime.scheduler.request import Request
from runtime.scheduler.scheduler import Scheduler
from runtime.tensorrt_llm.compat import executor_bindings, load
from runtime.tensorrt_llm.drafting import Drafting
from runtime.tensorrt_llm.exchange import Exchange
from runtime.tensorrt_llm.executor import Client
from runtime.tensorrt_llm.loop import ExecutorLoop
from runtime.tensorrt_llm.roles import ExecutorAuxiliary, ExecutorTarget


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
    """

    target: OpenExecutor
    auxiliary: OpenExecutor
    tokenizer: PreTrainedTokenizerBase
    vocab_size: int
    eos: tuple[int, ...]
    defaults: DecodingParams


class ExecutorLLM(LLM):
    """A pair of executors, ready to decode: `LLM`'s interface, and `AsyncLLM` takes it as one.

    Adaptive drafts are not there: what a block costs is the executors' affair, and a request that would have them by
    default drafts what it asks for.

    Args:
        folder: a pair folder of `mtad export --to tensorrt-llm`.
        drafting: how the beams of a draft are found, see `runtime.tensorrt_llm.drafting.Drafting`.
        cache_fractions: of the GPU memory that is free once a model is loaded, what its keys and values take; the
            target is loaded first, so the second number is of what the first leaves.
        cuda_graphs: replay the auxiliary's generation steps.
        devices: GPUs of the target and of the auxiliary; None for the first ones.
        workers: give each executor processes of its own, as NVIDIA's own draft-target driver does. Without, both run
            in this one.
        max_waiting: requests that may wait for a row.
        bindings: `tensorrt_llm.bindings.executor`, or what takes its place.

    Raises:
        InvalidInput: the library is missing or another one than this is written for, or the folder is no such pair.
    """

    def __init__(
        self,
        folder: Path | str,
        drafting: Drafting = "search",
        cache_fractions: tuple[float, float] = (0.7, 0.8),
        cuda_graphs: bool = True,
        devices: tuple[Sequence[int], Sequence[int]] | None = None,
        workers: bool = False,
        max_waiting: int = 1024,
        bindings: Any = None,
    ) -> None:
        folder = Path(folder)
        pair = read_pair(folder)
        target, auxiliary = pair.target.spec, pair.auxiliary.spec
        if drafting == "search" and auxiliary.max_beam_width < auxiliary.beam_width:
            problem = f"the auxiliary's engine has {auxiliary.max_beam_width} beam; export again with --drafting search"
            raise InvalidInput("drafting", drafting, problem)
        for fraction in cache_fractions:
            if not 0 < fraction < 1:
                raise InvalidInput("cache_fractions", fraction, "give numbers between 0 and 1")
        if bindings is None:
            bindings = executor_bindings()
        worker = Path(load("tensorrt_llm").__file__).parent / "bin" / "executorWorker" if workers else None
        clients = [
            Client.open(
                folder / spec.role,
                bindings,
                spec,
                pair.vocab_size,
                memory_fraction=fraction,
                cuda_graphs=cuda_graphs,
                devices=devices[at] if devices else None,
                worker=worker,
            )
            for at, (spec, fraction) in enumerate(zip((target, auxiliary), cache_fractions, strict=True))
        ]
        self.clients = tuple(clients)
        # of a pair, what this class does not override reads the fields that an `ExecutorPair` has
        self.pair = cast(Pair, pair)
        tokenizer = pair.tokenizer.backend_tokenizer
        self._constrainer = Constrainer(tokenizer, pair.vocab_size, pair.eos)
        scorer = ExecutorTarget(clients[0], Exchange())
        self.loop = ExecutorLoop(
            ExecutorAuxiliary(clients[1], scorer, drafting),
            scorer,
            Scheduler(target.rows, target.capacity, target.draft_len, target.beam_width, max_waiting),
            tokenizer,
            pair.vocab_size,
            pair.eos,
            self._constrainer,
        )
        self._ids = itertools.count()

    def requests(
        self, prompt: Prompt, params: DecodingParams | None = None, priority: int = 0, **others: Any
    ) -> list[Request]:
        """See `LLM.requests`.

        Raises:
            InvalidInput: also where adaptive drafts are asked for by name.
        """
        asked = self.pair.defaults if params is None else params
        if isinstance(asked, DecodingParams) and asked.speculation == "adaptive":
            raise InvalidInput("speculation", "adaptive", "not over TensorRT-LLM executors; leave it out")
        return super().requests(prompt, params, priority, **others)

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
    values = read_json(folder, "pair.json")
    try:
        vocab_size, defaults = int(values["vocab_size"]), dict(values["defaults"])
        vocabulary = str(values["vocabulary_hash"])
    except (KeyError, TypeError, ValueError):
        raise InvalidInput("pair.json", str(folder), "fields missing; export again") from None
    target, auxiliary = (read_executor_spec(folder / role) for role in ("target", "auxiliary"))
    for name in ("rows", "capacity", "draft_len", "beam_width"):
        ours, theirs = getattr(target, name), getattr(auxiliary, name)
        if ours != theirs:
            raise InvalidInput(name, f"{ours} and {theirs}", "the two engines must agree; export the pair again")
    if min(target.vocab_size, auxiliary.vocab_size) < vocab_size:
        raise InvalidInput("pair.json vocab_size", vocab_size, "an engine's logits are narrower; export the pair again")
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
