"""`LLM`: text in, text out."""

from __future__ import annotations

import contextlib
import itertools
import logging
import secrets
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import cast

import torch
from tqdm import tqdm

from engines.graphs.runner import MOST, CudaRecorder, NoRecorder, Recorder
from engines.memory import Memory
from engines.parallel.engine import prefix_cache
from engines.placement import Placement, cores
from mtad.errors import InvalidInput
from mtad.params import DecodingParams
from runtime.constraints.constraint import Constrainer
from runtime.decoder.auxiliary import EngineAuxiliary
from runtime.decoder.compiled.functions import CompiledFunctions
from runtime.decoder.cuda_graph.block_runner import DeviceBlocks
from runtime.decoder.eager import TorchFunctions
from runtime.decoder.kv_cache import Caches
from runtime.decoder.target import EngineTarget
from runtime.loop import DecodingLoop
from runtime.pair import Pair, open_pair
from runtime.scheduler.request import Request, Result
from runtime.scheduler.scheduler import Scheduler
from runtime.speculation.cost_cache import KnownCosts, machine
from runtime.speculation.planner import Planner
from runtime.speculation.profiler import measure_costs
from runtime.speculation.step_costs import StepCosts

log = logging.getLogger(__name__)

Prompt = str | Sequence[int]
"""Text, or token ids."""

_SEED_STEP = 0x9E3779B97F4A7C15  # far from any small number: choices of requests with seeds 1, 2, .. do not meet


class LLM:
    """A pair of engines, ready to decode.

    `generate` is for batches. `add` and `step` are the same loop, one turn at a time: requests may be added and
    cancelled between any two steps. Not for several threads at once; `AsyncLLM` is.

    Args:
        pair: a pair folder, or an opened pair.
        threads, device, graphs, provider, attention: where both engines run, and how, see `engines.Placement`; threads
            are the target's, default: all cores.
        rows: requests decoded at once; default: what the pair was exported with.
        memory: instead of `rows`: as many as fit this many bytes (or `"4GiB"`), with weights, both caches and logits.
        max_draft_len, max_beam_width: largest draft a request may ask for; their product of KV columns is kept free
            in every row.
        max_prefill_tokens: prompt tokens stored a turn at most: bounds how long a new prompt delays those that run.
        prefix_tokens: prompt tokens whose keys and values are kept for prompts that start alike, in multiples of 64;
            0 keeps none. Default: as many as two rows hold.
        max_waiting: requests that may wait for a row.
        costs: what steps cost; default: what an earlier start measured here, else measured when first needed.
        eager: run what lies between the engines' steps in torch rather than compiled for ONNX Runtime; pairs of the
            torch engine, and whatever runs on a GPU, always do.
        tensor_parallel: ranks that the target is divided over, one GPU (or, on a CPU, one process) each; see
            docs/tensor-parallel.md. Under `torchrun`, on other ranks than 0, this follows rank 0 and ends the process.
        record: parameters of requests whose blocks are recorded at start, for every bucket of rows and columns; others
            are when they first come. Default: the pair's; () records none at start.
        recorder: what records blocks; default: CUDA's, on a GPU. Given one, blocks run as on a GPU, wherever the
            engines are.

    Attributes:
        pair: the opened pair.
        memory: what it takes.
        loop: the decoding loop.

    Raises:
        InvalidInput: the folder is not a usable pair, or a limit is not one.
    """

    def __init__(
        self,
        pair: Pair | Path | str,
        threads: int | None = None,
        rows: int | None = None,
        memory: int | str | None = None,
        max_draft_len: int = 8,
        max_beam_width: int = 8,
        max_prefill_tokens: int = 256,
        prefix_tokens: int | None = None,
        max_waiting: int = 1024,
        costs: StepCosts | None = None,
        eager: bool = False,
        tensor_parallel: int = 1,
        device: str = "cpu",
        graphs: bool = True,
        provider: str | None = None,
        attention: str | None = None,
        record: Sequence[DecodingParams] | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        for name, value, least in (
            ("max_draft_len", max_draft_len, 1),
            ("max_beam_width", max_beam_width, 1),
            ("max_prefill_tokens", max_prefill_tokens, 1),
            ("prefix_tokens", prefix_tokens or 0, 0),
            ("max_waiting", max_waiting, 1),
            ("tensor_parallel", tensor_parallel, 1),
        ):
            if value < least:
                raise InvalidInput(name, value, f"give at least {least}")
        nodes = max_draft_len * max_beam_width
        if isinstance(pair, Pair):
            opening = {"threads": threads, "rows": rows, "memory": memory, "provider": provider, "attention": attention}
            opening |= {"device": device if device != "cpu" else None}
            opening |= {"tensor_parallel": tensor_parallel if tensor_parallel > 1 else None}
            for name, given in opening.items():
                if given is not None:
                    raise InvalidInput(name, given, "the pair is open already; give it to open_pair")
        else:
            placement = Placement(device, cores() if threads is None else threads, graphs, provider, attention)
            pair = open_pair(pair, placement, rows, memory, nodes, prefix_tokens, tensor_parallel)
        self.pair = pair
        spec = self.pair.target.spec
        if nodes >= spec.capacity:
            problem = f"max_draft_len x max_beam_width must stay below the capacity, {spec.capacity}"
            raise InvalidInput("max_draft_len", max_draft_len, problem)
        keep = 2 * spec.capacity if prefix_tokens is None else prefix_tokens
        where = self.pair.device
        if recorder is None and where.type == "cuda":
            recorder = CudaRecorder(str(where)) if graphs else NoRecorder(str(where))
        functions = TorchFunctions() if eager or recorder or spec.format != "onnx" else CompiledFunctions()
        self._auxiliary = EngineAuxiliary(pair.auxiliary, pair.vocab_size, functions, pair.target, where)
        self._target = EngineTarget(pair.target, pair.vocab_size, functions, where)
        blocks = None
        if recorder:
            blocks = DeviceBlocks.of(self._auxiliary, self._target, pair.eos, recorder, nodes + 1)
        recorded = MOST if blocks and blocks.records else 0
        scratch = pair.target.scratch
        self.memory = Memory.of(spec, pair.auxiliary.spec, pair.weights, nodes + 1, keep, scratch, recorded)
        log.info("%s", self.memory)
        prefixes = prefix_cache(pair.auxiliary, keep), prefix_cache(pair.target, keep)
        tokenizer = self.pair.tokenizer.backend_tokenizer
        self._constrainer = Constrainer(tokenizer, self.pair.vocab_size, self.pair.eos, where)
        self.loop = DecodingLoop(
            Caches(self._auxiliary, self._target, prefixes),
            Scheduler(spec.rows, spec.capacity, max_draft_len, max_beam_width, max_waiting),
            tokenizer,
            self.pair.vocab_size,
            self.pair.eos,
            self._constrainer,
            max_prefill_tokens,
            blocks,
        )
        if blocks:
            blocks.prepare([pair.defaults] if record is None else record)
        self.loop.planner = Planner(costs, max_draft_len) if costs else None
        self._ids = itertools.count()

    @property
    def device(self) -> str:
        """Where it runs: the GPU's name and number, or `cpu`."""
        where = self.pair.device
        return f"{torch.cuda.get_device_name(where)}, {where}" if where.type == "cuda" else str(where)

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
            results in the order of the prompts; the `n` choices of a prompt one after another.

        Raises:
            InvalidInput: a prompt or parameter is unusable; nothing was run.
            RequestFailed: something broke under one of them; the others are given up.
        """
        one = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
        many = cast("Sequence[Prompt]", [prompts] if one else prompts)
        each = [params] * len(many) if params is None or isinstance(params, DecodingParams) else list(params)
        if len(each) != len(many):
            raise InvalidInput("params", f"{len(each)} given", f"give one for all, or one for each of {len(many)}")
        requests = [r for prompt, p in zip(many, each, strict=True) for r in self.requests(prompt, p)]
        backlog, pending = deque(requests), {request.id for request in requests}
        try:
            with tqdm(total=len(requests), unit="request", disable=not progress) as bar:
                while pending:
                    while backlog and self.loop.scheduler.room:
                        self.submit(backlog.popleft())
                    ended = [request for request in self.step() if request.id in pending]
                    pending.difference_update(request.id for request in ended)
                    bar.update(len(ended))
                    for request in ended:
                        Result.of(request)  # raises if it failed
        finally:
            # interrupted, or something broke: nobody asks for the rest any more
            self.loop.drop(requests, report=False)
        return [Result.of(request) for request in requests]

    def requests(self, prompt: Prompt, params: DecodingParams | None = None, priority: int = 0) -> list[Request]:
        """The requests of a prompt, one a choice, checked but not queued.

        Raises:
            InvalidInput: prompt or parameters are unusable.
        """
        params = self.pair.defaults if params is None else params
        if not isinstance(params, DecodingParams):
            raise InvalidInput("params", params, "give DecodingParams; DecodingParams.from_dict makes them from a dict")
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise InvalidInput("priority", priority, "give an integer")
        self._constrainer.check(params)
        ids = self._token_ids(prompt)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        seeds = [(seed + index * _SEED_STEP) % 2**63 for index in range(params.n)]
        requests = [Request(next(self._ids), ids, params, s, i, priority) for i, s in enumerate(seeds)]
        self.loop.scheduler.check(requests[0])
        return requests

    def add(self, prompt: Prompt, params: DecodingParams | None = None, priority: int = 0) -> Request:
        """Queue one request.

        Raises:
            InvalidInput: prompt or parameters are unusable, or ask for several choices.
            QueueFull: try again later.
        """
        if params and params.n > 1:
            raise InvalidInput("n", params.n, "add one request a choice, or use generate")
        request = self.requests(prompt, params, priority)[0]
        self.submit(request)
        return request

    def cancel(self, *requests: Request) -> None:
        """End requests now, with what they have; those that have ended already stay as they are."""
        self.loop.drop(requests)

    def step(self) -> list[Request]:
        """One turn of the loop; returns the requests that ended since the last one."""
        return self.loop.turn()

    def measure(self, again: bool = False) -> None:
        """See to it that step costs are known, for adaptive drafts: those kept from an earlier start, or measured now.

        Measuring takes about two seconds. Done by the first request that needs it; a server does it at start. Not while
        a turn runs.

        Args:
            again: measure whatever is known: the machine was busy the last time.
        """
        loop, engines = self.loop, (self.pair.auxiliary, self.pair.target)
        if loop.planner is not None and not again:
            return
        limits = loop.scheduler.max_draft_len, loop.scheduler.max_beam_width
        known = KnownCosts(self._setting(*limits))
        costs = None if again else known.load()
        if costs:
            log.info("step costs: from %s", known.path)
        else:
            with contextlib.ExitStack() as caches:
                for engine in engines if loop.scheduler.holders else ():
                    caches.enter_context(engine.kept())
                costs = measure_costs(self._auxiliary, self._target, *limits, blocks=loop.blocks)
            known.save(costs)
            log.info("step costs: measured, kept in %s", known.path)
        loop.planner = Planner(costs, limits[0])

    def _setting(self, max_draft_len: int, max_beam_width: int) -> dict[str, object]:
        """What the times of this pair's steps depend on."""
        return {
            "target": asdict(self.pair.target.spec),
            "auxiliary": asdict(self.pair.auxiliary.spec),
            "threads": self.pair.threads,
            "functions": type(self._target.functions).__name__,
            "device": self.device,
            "graphs": self.loop.blocks is not None and self.loop.blocks.records,
            "max_draft_len": max_draft_len,
            "max_beam_width": max_beam_width,
            **machine(),
        }

    def submit(self, *requests: Request) -> None:
        """Queue what `requests` made, all or none.

        Raises:
            QueueFull: try again later.
        """
        if requests[0].params.adaptive:
            self.measure()
        self.loop.submit(*requests)

    @staticmethod
    def result(request: Request) -> Result:
        """The result of a request that ended; see `Result.of`."""
        return Result.of(request)

    def _token_ids(self, prompt: Prompt) -> list[int]:
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
        return ids
