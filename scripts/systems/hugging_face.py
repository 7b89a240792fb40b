"""Hugging Face `generate`, plain and assisted."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteria

from mtad.params import DecodingParams
from scripts.systems.system import Batched, Finished, Prompt, useful


def load_checkpoint(folder: Path) -> PreTrainedModel:
    """A checkpoint in float32, for inference."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    return model.eval()


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
            min_new_tokens=params.max_tokens if params.ignore_eos else None,
            pad_token_id=pad,
            stopping_criteria=criteria,
            **options,
        )
        whole, first = time.perf_counter() - started, (noted.at or time.perf_counter()) - started
        texts = [useful(row, self._eos) for row in out[:, longest:].tolist()]
        at_once = max(noted.length - longest, 1)
        return [Finished(p.number, text, first, whole, at_once) for p, text in zip(batch, texts, strict=True)]
