"""What the serving benchmark compares: this package's loop, Hugging Face `generate`, onnxruntime-genai.

One shape for all of them. A system is loaded with prompts by `begin`, then runs in slices of wall-clock time, so that
several can take turns on one machine; between slices it stands still, and so does its clock. Prompts go in as token
ids and tokens come out: tokenising and scoring are in nobody's time. Storing the prompt is in everybody's.

* `InFlight` serves a closed loop: a request that ends is replaced at once. A slice may end in the middle of requests;
  the next one goes on there.
* The batching baselines serve static batches, as many prompts as are in flight, the next batch when the last one has
  ended. Their requests count as submitted when their batch starts: waiting for it is not held against them.
* Assisted `generate` allows a batch of one only, so it serves requests one after another, whatever is in flight.
"""

from __future__ import annotations

import json
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteria

from mtad.errors import InvalidInput
from mtad.params import DecodingParams
from runtime.llm import LLM
from runtime.request import Request

ROOT = Path(__file__).resolve().parent.parent
GENAI = ROOT / "build" / "baselines"
"""Where scripts/baselines.sh puts onnxruntime-genai and the models its builder makes."""


@dataclass(frozen=True)
class Prompt:
    """One prompt: its number in the examples, and its token ids."""

    number: int
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Finished:
    """One answered prompt.

    Attributes:
        prompt: its number.
        tokens: new tokens up to the end of the text, a final end-of-sequence token included.
        first, whole: seconds from submission to the first token, and to the last one being there for the caller.
        first_tokens: tokens that were there with the first.
    """

    prompt: int
    tokens: list[int]
    first: float
    whole: float
    first_tokens: int = 1

    @property
    def per_token(self) -> float | None:
        """Seconds a token after the first; None for a single token."""
        return (self.whole - self.first) / (len(self.tokens) - 1) if len(self.tokens) > 1 else None


@dataclass(frozen=True)
class Slice:
    """What a system did in one slice: useful tokens, its wall-clock seconds, the requests that ended in it."""

    tokens: int
    seconds: float
    finished: list[Finished]


def useful(tokens: Sequence[int], eos: Sequence[int]) -> list[int]:
    """Tokens up to the first end-of-sequence token, itself included: what follows in a static batch is padding."""
    ends = [at for at, token in enumerate(tokens) if token in eos]
    return list(tokens[: ends[0] + 1] if ends else tokens)


class System(ABC):
    """One system under measurement."""

    name: str

    @abstractmethod
    def begin(self, prompts: Iterator[Prompt], load: int, params: DecodingParams) -> None:
        """Take up a stream of prompts, `load` in flight, and run until the system is warm; nothing of it is counted."""

    @abstractmethod
    def slice(self, seconds: float) -> Slice:
        """Run for `seconds`, or a little longer where requests cannot be interrupted."""

    @abstractmethod
    def end(self) -> None:
        """Let go of what is in flight."""

    @abstractmethod
    def run(self, prompts: Sequence[Prompt], load: int, params: DecodingParams) -> Slice:
        """Answer all prompts, at most `load` at a time; `finished` is in their order. Nothing may be in flight."""


class InFlight(System):
    """This package's loop, through the synchronous `LLM.add` and `LLM.step`.

    Args:
        name: the method's name in tables.
        llm: an idle pair of engines with at least as many rows as are ever in flight; nobody else uses it.
    """

    def __init__(self, name: str, llm: LLM) -> None:
        self.name, self._llm, self.tokenizer = name, llm, llm.pair.tokenizer
        self._clock = 0.0
        self._seed = 0
        self._requests: dict[int, tuple[Request, Prompt, float]] = {}
        self._firsts: dict[int, float] = {}

    def begin(self, prompts: Iterator[Prompt], load: int, params: DecodingParams) -> None:
        """Start with texts of staggered lengths, so that requests do not end in step; go on until all of them ended."""
        self._prompts, self._params = prompts, params
        lengths = [max(1, params.max_tokens * (number + 1) // load) for number in range(load)]
        initial = [self._submit(next(prompts), self._clock, length) for length in lengths]
        started = time.perf_counter()
        while any(request.finish_reason is None for request in initial):
            self._turn(started)
        self._clock += time.perf_counter() - started

    def slice(self, seconds: float) -> Slice:
        """See `System.slice`."""
        started = time.perf_counter()
        tokens, finished = 0, []
        while time.perf_counter() - started < seconds:
            gained, ended = self._turn(started)
            tokens += gained
            finished += ended
        took = time.perf_counter() - started
        self._clock += took
        return Slice(tokens, took, finished)

    def end(self) -> None:
        """See `System.end`."""
        self._llm.cancel(*(request for request, _, _ in self._requests.values()))
        self._llm.step()
        self._requests.clear()
        self._firsts.clear()

    def run(self, prompts: Sequence[Prompt], load: int, params: DecodingParams) -> Slice:
        """See `System.run`; request seeds are the prompts' numbers."""
        waiting, found = list(prompts)[::-1], {}
        started = time.perf_counter()
        while waiting or self._requests:
            while waiting and len(self._requests) < load:
                prompt = waiting.pop()
                self._add(prompt, replace(params, seed=prompt.number), self._clock + time.perf_counter() - started)
            for one in self._step(started)[1]:
                found[one.prompt] = one
        took = time.perf_counter() - started
        self._clock += took
        finished = [found[prompt.number] for prompt in prompts]
        return Slice(sum(len(one.tokens) for one in finished), took, finished)

    def _submit(self, prompt: Prompt, now: float, max_tokens: int | None = None) -> Request:
        self._seed += 1
        params = replace(self._params, seed=self._seed, max_tokens=max_tokens or self._params.max_tokens)
        return self._add(prompt, params, now)

    def _add(self, prompt: Prompt, params: DecodingParams, now: float) -> Request:
        request = self._llm.add(prompt.ids, params)
        self._requests[request.id] = request, prompt, now
        return request

    def _turn(self, started: float) -> tuple[int, list[Finished]]:
        """One step; each request that ended in it is replaced."""
        gained, finished = self._step(started)
        for _ in finished:
            self._submit(next(self._prompts), self._clock + time.perf_counter() - started)
        return gained, finished

    def _step(self, started: float) -> tuple[int, list[Finished]]:
        before = sum(len(request.tokens) for request, _, _ in self._requests.values())
        ended = self._llm.step()
        now = self._clock + time.perf_counter() - started
        gained = sum(len(request.tokens) for request, _, _ in self._requests.values()) - before
        for id, (request, _, _) in self._requests.items():
            if request.tokens:
                self._firsts.setdefault(id, now)
        finished = []
        for request in ended:
            self._llm.result(request)  # raises if it failed
            _, prompt, submitted = self._requests.pop(request.id)
            first = self._firsts.pop(request.id)
            finished.append(Finished(prompt.number, request.tokens, first - submitted, now - submitted))
        return gained, finished


class Batched(System):
    """A system that runs one batch of prompts from beginning to end."""

    largest: int | None = None
    """Largest batch it takes; None: any."""

    def begin(self, prompts: Iterator[Prompt], load: int, params: DecodingParams) -> None:
        """See `System.begin`: one short batch."""
        self._prompts, self._params = prompts, params
        self._size = min(load, self.largest or load)
        self._run([next(prompts) for _ in range(self._size)], replace(params, max_tokens=8))

    def slice(self, seconds: float) -> Slice:
        """Whole batches, until `seconds` have gone by."""
        finished: list[Finished] = []
        started = time.perf_counter()
        while time.perf_counter() - started < seconds:
            finished += self._run([next(self._prompts) for _ in range(self._size)], self._params)
        return Slice(sum(len(one.tokens) for one in finished), time.perf_counter() - started, finished)

    def end(self) -> None:
        """See `System.end`; nothing is left in flight."""

    def run(self, prompts: Sequence[Prompt], load: int, params: DecodingParams) -> Slice:
        """See `System.run`."""
        size, started = min(load, self.largest or load), time.perf_counter()
        batches = [list(prompts[at : at + size]) for at in range(0, len(prompts), size)]
        finished = [one for batch in batches for one in self._run(batch, params)]
        return Slice(sum(len(one.tokens) for one in finished), time.perf_counter() - started, finished)

    @abstractmethod
    def _run(self, batch: list[Prompt], params: DecodingParams) -> list[Finished]: ...


class _FirstToken(StoppingCriteria):  # type: ignore[misc]
    """Notes when `generate` first had new tokens, and how many tokens there were then; stops nothing."""

    def __init__(self) -> None:
        self.at: float | None = None
        self.length = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        if self.at is None:
            self.at, self.length = time.perf_counter(), input_ids.shape[-1]
        return torch.zeros(len(input_ids), dtype=torch.bool)


class _StopStrings(StoppingCriteria):  # type: ignore[misc]
    """Ends a text that holds a stop string anywhere.

    The library's own criterion looks at the last token only, so that assisted generation, which adds several at once,
    goes on past what it should stop at; and it reaches the auxiliary, which then asks for a tokenizer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, stop: Sequence[str], prompt: int) -> None:
        assert tokenizer is not None, "stop strings need a tokenizer"
        self._tokenizer, self._stop, self._prompt = tokenizer, stop, prompt

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        texts = self._tokenizer.batch_decode(input_ids[:, self._prompt :], skip_special_tokens=True)
        return torch.tensor([any(string in text for string in self._stop) for text in texts])


class HuggingFace(Batched):
    """Hugging Face `generate` on left-padded batches; with an auxiliary, its assisted generation, a batch of one.

    The library's defaults for everything but the sampling parameters, or `search`. Each load runs with 1 torch thread
    or with all, whichever is faster in the warm-up.

    Args:
        target, auxiliary: checkpoint folders, or models that were loaded already.
        threads: CPU threads it may use.
        name: default: what it is.
        search: options of `generate` instead of sampling, such as `{"num_beams": 4}`.
        tokenizer: for stop strings, where requests have some.

    Attributes:
        passes: calls of the target so far.
    """

    def __init__(
        self,
        target: Path | PreTrainedModel,
        auxiliary: Path | PreTrainedModel | None = None,
        threads: int = 1,
        name: str | None = None,
        search: Mapping[str, Any] | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        self.name = name or ("huggingface" if auxiliary is None else "huggingface assisted")
        self.largest = None if auxiliary is None else 1
        self.model = load_checkpoint(target) if isinstance(target, Path) else target
        self._auxiliary = load_checkpoint(auxiliary) if isinstance(auxiliary, Path) else auxiliary
        self._choices = sorted({1, threads})
        self.threads: dict[int, int] = {}
        self.samples = search is None
        self.search = dict(search or {})
        self._tokenizer = tokenizer
        eos = self.model.generation_config.eos_token_id
        self._eos = [eos] if isinstance(eos, int) else list(eos)
        self.passes = 0
        self.model.register_forward_pre_hook(self._count)

    def _count(self, *_: object) -> None:
        self.passes += 1

    def describe(self) -> dict[str, Any]:
        """How it searches and drafts, for reports."""
        values = {"search": self.search or "sampling", "threads": self.threads}
        if self._auxiliary is not None:
            names = ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold")
            values["draft"] = {name: getattr(self._auxiliary.generation_config, name, None) for name in names}
        return values

    def begin(self, prompts: Iterator[Prompt], load: int, params: DecodingParams) -> None:
        """Also finds the number of threads for a load it has not met before."""
        super().begin(prompts, load, params)
        if self._size not in self.threads:
            batch, short = [next(prompts) for _ in range(self._size)], replace(params, max_tokens=12)
            took: dict[int, float] = {}
            for _ in range(2):
                for threads in self._choices:
                    self.threads[self._size] = threads
                    started = time.perf_counter()
                    self._run(batch, short)
                    took[threads] = min(took.get(threads, float("inf")), time.perf_counter() - started)
            self.threads[self._size] = min(took, key=lambda threads: took[threads])

    def _run(self, batch: list[Prompt], params: DecodingParams) -> list[Finished]:
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads.get(len(batch), self._choices[-1]))
        try:
            return self._generate(batch, params)
        finally:
            torch.set_num_threads(before)

    @torch.inference_mode()
    def _generate(self, batch: list[Prompt], params: DecodingParams) -> list[Finished]:
        longest, noted = max(len(prompt.ids) for prompt in batch), _FirstToken()
        padding = [longest - len(prompt.ids) for prompt in batch]
        pad = self._eos[0]
        options: dict[str, Any] = {"do_sample": False, **self.search}
        if self.samples:
            sampling = {"temperature": params.temperature, "top_k": params.top_k, "top_p": params.top_p}
            options = {"do_sample": True, **sampling}
        criteria: list[StoppingCriteria] = [noted]
        if params.stop_strings:
            criteria.append(_StopStrings(self._tokenizer, params.stop_strings, longest))
        started = time.perf_counter()
        out = self.model.generate(
            torch.tensor([[pad] * n + list(prompt.ids) for n, prompt in zip(padding, batch, strict=True)]),
            attention_mask=torch.tensor([[0] * n + [1] * (longest - n) for n in padding]),
            assistant_model=self._auxiliary,
            max_new_tokens=params.max_tokens,
            pad_token_id=pad,
            stopping_criteria=criteria,
            **options,
        )
        whole, first = time.perf_counter() - started, (noted.at or time.perf_counter()) - started
        texts = [useful(row, self._eos) for row in out[:, longest:].tolist()]
        at_once = max(noted.length - longest, 1)
        return [Finished(p.number, text, first, whole, at_once) for p, text in zip(batch, texts, strict=True)]


class GenAI(Batched):
    """onnxruntime-genai's `Generator` on right-padded batches, the library's defaults but for sampling and threads.

    Its continuous batching (`Engine`) needs paged attention, which its builder makes for GPUs only; on a CPU an
    `Engine` runs static batches of at most 4, so the batched `Generator` is the faster one. Right padding is what its
    models want: positions are counted from the left, and left-padded prompts give wrong text.

    Args:
        folder: what scripts/baselines.sh made.
        threads: CPU threads.
    """

    name = "onnxruntime-genai"

    def __init__(self, folder: Path = GENAI, threads: int = 1) -> None:
        if not (folder / "target" / "genai_config.json").is_file() or not (folder / "onnxruntime_genai").is_dir():
            remedy = "not installed there; run scripts/baselines.sh, or leave it out: --baselines huggingface or none"
            raise InvalidInput("baselines", str(folder), remedy)
        sys.path.append(str(folder))
        try:
            import onnxruntime_genai as genai  # type: ignore[import-not-found, unused-ignore]
        except ImportError as error:
            problem = f"onnxruntime-genai cannot be imported ({error}); run scripts/baselines.sh"
            raise InvalidInput("baselines", str(folder), problem) from error
        finally:
            sys.path.remove(str(folder))
        self._genai: Any = genai
        self.version = f"{genai.__version__} on {Path(os.environ['ORT_LIB_PATH']).name}"
        config = genai.Config(str(folder / "target"))
        config.clear_providers()
        config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}))
        self._model = genai.Model(config)
        values = json.loads((folder / "target" / "genai_config.json").read_text(encoding="utf-8"))["model"]
        eos = values["eos_token_id"]
        self._eos, self._pad = [eos] if isinstance(eos, int) else list(eos), int(values["pad_token_id"])
        self._seed = 0

    def _run(self, batch: list[Prompt], params: DecodingParams) -> list[Finished]:
        longest = max(len(prompt.ids) for prompt in batch)
        padded = [list(prompt.ids) + [self._pad] * (longest - len(prompt.ids)) for prompt in batch]
        self._seed += 1
        started = time.perf_counter()
        options = self._genai.GeneratorParams(self._model)
        options.set_search_options(
            batch_size=len(batch),
            max_length=longest + params.max_tokens,
            do_sample=True,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            random_seed=self._seed,
        )
        generator = self._genai.Generator(self._model, options)
        generator.append_tokens(np.array(padded, dtype=np.int32))
        first, ends = 0.0, [0.0] * len(batch)
        while not generator.is_done():
            generator.generate_next_token()
            now = time.perf_counter() - started
            first = first or now
            for row, token in enumerate(generator.get_next_tokens()):
                if not ends[row] and token in self._eos:
                    ends[row] = now
        whole = time.perf_counter() - started
        texts = [useful(generator.get_sequence(row)[longest:].tolist(), self._eos) for row in range(len(batch))]
        return [
            Finished(prompt.number, text, first, end or whole)
            for prompt, text, end in zip(batch, texts, ends, strict=True)
        ]


def load_checkpoint(folder: Path) -> PreTrainedModel:
    """A checkpoint in float32, for inference."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    return model.eval()
