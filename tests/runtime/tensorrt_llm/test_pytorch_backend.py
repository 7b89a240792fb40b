"""TensorRT-LLM's PyTorch backend, a fake of its loop: its texts are those of this package's own blocks."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mtad.errors import InvalidInput
from mtad.params import METHODS, DecodingParams
from runtime.decoder.batch_builder import BatchBuilder
from runtime.decoder.block import run_block_on_host
from runtime.decoder.engine_roles import EngineAuxiliary, EngineTarget
from runtime.tensorrt_llm import pytorch_backend as pytorch
from runtime.tensorrt_llm.pytorch_drafts import Speculation
from scripts.gpu import tensorrt_llm_check as check
from tests.support.fake_executor import BEYOND, mock_logits, torch_model
from tests.support.mock_engine import EOS, VOCAB, MockEngine, mock_spec

SUPPORTED = [name for name, method in METHODS.items() if method.drafter == "auxiliary" and not method.tree]


class LlmRequest:
    """What the library's requests have, of what is used."""

    def __init__(self, number: int, slot: int, prompt: list[int], new: int) -> None:
        self.py_request_id, self.py_seq_slot, self.py_end_id = number, slot, EOS
        self.py_draft_tokens: list[int] = []
        self.prompt, self.tokens, self.new = len(prompt), list(prompt), new
        self.finished = False
        self.rewound: list[int] = []

    def get_tokens(self, beam: int) -> list[int]:
        assert beam == 0
        return self.tokens

    def add_new_token(self, token: int, beam: int) -> None:
        assert beam == 0
        assert not self.finished, "a token behind the end"
        self.tokens.append(token)


class Drafter:
    """`tensorrt_llm._torch.speculative.drafter.Drafter`."""

    def __init__(
        self,
        max_draft_len: int | None = None,
        max_total_draft_tokens: int | None = None,
        max_concurrency: int | None = None,
        draft_len_schedule: dict[int, int] | None = None,
    ) -> None:
        self._static_max_total_draft_tokens = max_total_draft_tokens

    def prepare_draft_tokens(self, scheduled_requests: Any, resource_manager: Any = None) -> None:
        raise NotImplementedError

    def pad_draft_tokens_for_cuda_graph(self, scheduled_requests: Any) -> None:
        assert self._static_max_total_draft_tokens is not None, "the sizes were not passed on"
        for request in scheduled_requests.generation_requests:
            missing = self._static_max_total_draft_tokens - len(request.py_draft_tokens)
            request.py_draft_tokens.extend([0] * missing)


class TorchSampler:
    """`tensorrt_llm._torch.pyexecutor._util.TorchSampler`, greedy."""

    max_seq_len = 10_000

    def __init__(self, arguments: Any) -> None:
        self.arguments = arguments

    def sample_async(
        self,
        scheduled_requests: Any,
        model_outputs: dict[str, Tensor],
        num_context_logits_prefix_sum: list[int],
        resource_manager: Any = None,
    ) -> Any:
        return SimpleNamespace(new_tokens=model_outputs["logits"][:, :-BEYOND].argmax(-1))

    def process_draft_tokens(
        self,
        request: Any,
        new_tokens_tensor: Tensor,
        new_tokens_list: list[list[list[int]]],
        finish_reasons: Any,
        resource_manager: Any = None,
    ) -> int:
        raise AssertionError("every draft is decided by our rules")

    @classmethod
    def _handle_stop_criteria(cls, request: LlmRequest, new_token: int, *, max_seq_len: int, beam_idx: int) -> bool:
        assert max_seq_len == cls.max_seq_len
        assert beam_idx == 0
        request.finished = new_token == request.py_end_id or len(request.tokens) - request.prompt >= request.new
        return request.finished


class Backend:
    """The loop of the library's `py_executor`: draft, pad, forward, sample, update; requests come and go."""

    def __init__(
        self, drafter: Any, sampler: Any, slots: int, logits: Callable[[list[int]], Tensor] | None = None
    ) -> None:
        self.drafter, self.sampler, self.slots = drafter, sampler, slots
        self.logits = logits or (lambda tokens: mock_logits(tokens, 0.0))
        self.passes = 0

    def run(self, requests: list[LlmRequest]) -> None:
        waiting, running = list(requests), list[LlmRequest]()
        while waiting or running:
            context = [waiting.pop(0)] if waiting and len(running) < self.slots else []
            scheduled = SimpleNamespace(context_requests=context, generation_requests=list(running))
            self.drafter.prepare_draft_tokens(scheduled, None)
            self.drafter.pad_draft_tokens_for_cuda_graph(scheduled)
            rows = [self._logits(request.tokens) for request in context]
            for request in running:
                drafts = request.py_draft_tokens
                rows += [self._logits([*request.tokens, *drafts[:count]]) for count in range(len(drafts) + 1)]
            self.passes += 1
            outputs = {"logits": torch.stack(rows)}
            state = self.sampler.sample_async(scheduled, outputs, list(range(len(context) + 1)), resource_manager=None)
            for request, token in zip(context, state.new_tokens.tolist(), strict=False):
                request.add_new_token(token, 0)
                self.sampler._handle_stop_criteria(request, token, max_seq_len=TorchSampler.max_seq_len, beam_idx=0)
            written = torch.zeros(64, 64, 1, dtype=torch.int64)
            for request in running:
                before = len(request.tokens)
                accepted = self.sampler.process_draft_tokens(request, written, None, None, resource_manager=None)
                gained = request.tokens[before:]
                assert 0 <= accepted <= min(len(gained), len(request.py_draft_tokens))
                assert gained[:accepted] == request.py_draft_tokens[:accepted], "what is kept was drafted"
                assert written[: len(gained), request.py_seq_slot, 0].tolist() == gained
                assert len(gained) == accepted + 1 or request.finished
            running = [request for request in [*running, *context] if not request.finished]

    def _logits(self, tokens: list[int]) -> Tensor:
        return torch.cat([self.logits(tokens), torch.full((BEYOND,), 99.0)])


def make_speculation(params: DecodingParams, rows: int, seed: int = 0) -> Speculation:
    auxiliary = EngineAuxiliary(MockEngine(mock_spec(rows, 256), noise=0.3), VOCAB)
    return Speculation(auxiliary, rows, params, VOCAB, (EOS,), seed)


def own_blocks(params: DecodingParams, text: list[int], prompt: int, new: int, seed: int) -> list[int]:
    """The text as this package's own loop goes on with it, one row, block by block."""
    spec = mock_spec(1, 256)
    auxiliary, target = EngineAuxiliary(MockEngine(spec, 0.3), VOCAB), EngineTarget(MockEngine(spec, 0.0), VOCAB)
    batches, tokens = BatchBuilder(VOCAB, (EOS,)), list(text)
    for role in (auxiliary, target):
        role.prefill(0, tokens[:-1], 0)
    while tokens[-1] != EOS and len(tokens) - prompt < new:
        batch = batches.build([params], [(tokens[-2], tokens[-1])], [len(tokens)], [(seed, len(tokens))])
        with torch.inference_mode():
            block = run_block_on_host(auxiliary, target, batch)
        for token in block.tokens[0][: block.lengths[0] + 1]:
            tokens.append(token)
            if token == EOS or len(tokens) - prompt >= new:
                break
    return tokens


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The modules that are used, with fakes of the recorded signatures."""

    class Config:
        def __init__(self, **values: Any) -> None:
            self.__dict__.update(values)

    class LLM(Config):
        def __init__(self, **values: Any) -> None:
            super().__init__(**values)
            self.worker = os.environ.get("TLLM_WORKER_USE_SINGLE_PROCESS")
            self.sampler = sys.modules[pytorch.SAMPLER].TorchSampler(None)  # as `instantiate_sampler` looks it up

    values: dict[str, dict[str, Any]] = {
        pytorch.DRAFTER: {"Drafter": Drafter},
        pytorch.SAMPLER: {"TorchSampler": TorchSampler},
        pytorch.API: {"LLM": LLM, "UserProvidedDecodingConfig": Config, "CudaGraphConfig": Config},
    }
    for name, found in values.items():
        module = ModuleType(name)
        module.__dict__.update(found)
        for parent in (name.rsplit(".", depth)[0] for depth in range(1, name.count(".") + 1)):
            monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
        monkeypatch.setitem(sys.modules, name, module)
    return SimpleNamespace(**{name.rsplit(".", 1)[1]: sys.modules[name] for name in values})


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("method", SUPPORTED)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_are_those_of_our_own_blocks(method: str, temperature: float) -> None:
    """Requests that come and go, in rows that are lent; padding is never accepted, whatever token it is."""
    params = DecodingParams(
        method=method, temperature=temperature, draft_len=3, beam_width=3, draft_confidence=0.05, accept_threshold=0.3
    )
    speculation = make_speculation(params, rows=3, seed=7)
    llm = pytorch.open_llm("folder", speculation, batch_size=3)
    prompts = [[1 + at % 5, 7, 2 + at % 3] for at in range(8)]
    requests = [LlmRequest(at, at, prompt, 5 + 3 * (at % 4)) for at, prompt in enumerate(prompts)]
    backend = Backend(llm.speculative_config.drafter, llm.sampler, slots=3)
    backend.run(requests)
    longest = 0
    for request in requests:
        first = request.tokens[: request.prompt + 1]
        expected = own_blocks(params, first, request.prompt, request.new, 7 + request.py_request_id)
        assert request.tokens == expected
        longest = max(longest, len(expected) - request.prompt)
    assert longest > 6
    assert backend.passes < sum(len(request.tokens) - request.prompt for request in requests) / 1.5


@pytest.mark.usefixtures("library")
def test_a_request_whose_row_was_lent_to_another_goes_on_unchanged() -> None:
    """More requests take turns than there are rows: each finds its text stored anew."""
    params = DecodingParams(method="mtad", draft_len=2, beam_width=2, seed=1)
    speculation, alone = make_speculation(params, rows=2, seed=3), {}
    texts = {key: [key + 1, 4, 6] for key in range(4)}
    for _ in range(4):
        for keys in ((0, 1), (2, 3), (1, 2)):
            drafts = speculation.propose({key: texts[key] for key in keys})
            for key in keys:
                logits = [mock_logits([*texts[key], *drafts[key][:count]], 0.0) for count in range(3)]
                texts[key] = [*texts[key], *speculation.decide(key, torch.stack(logits)).tokens]
    for key, text in texts.items():
        alone[key] = own_blocks(params, [key + 1, 4, 6], 3, len(text) - 3, 3 + key)
        ends = text.index(EOS) + 1 if EOS in text else len(text)
        assert alone[key][:ends] == text[:ends]


def test_the_backend_is_asked_for_what_it_needs_and_left_as_it_was(library: SimpleNamespace) -> None:
    before = os.environ.get("TLLM_WORKER_USE_SINGLE_PROCESS")
    speculation = make_speculation(DecodingParams(draft_len=5), rows=4)
    llm = pytorch.open_llm("folder", speculation, batch_size=4, max_num_tokens=24, kv_cache_config="theirs")
    assert llm.speculative_config.max_draft_len == 5
    assert llm.disable_overlap_scheduler
    assert llm.cuda_graph_config.batch_sizes == [1, 2, 3, 4]
    assert llm.max_num_tokens == 24
    assert llm.kv_cache_config == "theirs"
    assert llm.worker == "1"
    assert isinstance(llm.sampler, TorchSampler)
    assert type(llm.sampler) is not TorchSampler
    assert library._util.TorchSampler is TorchSampler
    assert os.environ.get("TLLM_WORKER_USE_SINGLE_PROCESS") == before
    assert pytorch.open_llm("folder", speculation, cuda_graphs=False).cuda_graph_config is None
    with pytest.raises(InvalidInput, match="at least 24"):
        pytorch.open_llm("folder", speculation, batch_size=4, max_num_tokens=23)
    with pytest.raises(InvalidInput, match="set here already"):
        pytorch.open_llm("folder", speculation, disable_overlap_scheduler=False)


@pytest.mark.parametrize("missing", ["process_draft_tokens", "sample_async", "_handle_stop_criteria"])
def test_another_version_is_refused_by_name(
    library: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.delattr(TorchSampler, missing)
    with pytest.raises(InvalidInput) as caught:
        pytorch.open_llm("folder", make_speculation(DecodingParams(), rows=1))
    assert missing in str(caught.value)
    assert "1.2.0 and 1.2.1" in str(caught.value)
    assert library._util.TorchSampler is TorchSampler


@pytest.mark.usefixtures("library")
def test_an_unknown_stop_criterion_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(request: Any, new_token: int, *, step: int) -> bool:
        return False

    monkeypatch.setattr(TorchSampler, "_handle_stop_criteria", other)
    with pytest.raises(InvalidInput, match="step"):
        pytorch.open_llm("folder", make_speculation(DecodingParams(), rows=1))


@pytest.mark.slow
@pytest.mark.parametrize("spoiled", [False, True])
def test_the_check_compares_texts_with_graphs_and_without(
    library: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    checkpoints: tuple[Path, Path],
    pair_folders: Callable[[str], Path],
    spoiled: bool,
) -> None:
    class LLM(library.llmapi.LLM):  # type: ignore[misc, name-defined]
        """Generates with the checkpoint's weights; graphs change them, if they are to be spoiled."""

        def generate(self, prompts: list[list[int]], sampling: Any) -> list[SimpleNamespace]:
            model = torch_model(Path(self.model))
            wrong = spoiled and self.cuda_graph_config is not None
            backend = Backend(
                self.speculative_config.drafter,
                self.sampler,
                self.max_batch_size,
                lambda tokens: model(tokens).flip(0) if wrong else model(tokens),
            )
            requests = [LlmRequest(at, at, prompt, sampling.max_tokens) for at, prompt in enumerate(prompts)]
            backend.run(requests)
            texts = [request.tokens[request.prompt :] for request in requests]
            return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=text)]) for text in texts]

        def shutdown(self) -> None:
            """Nothing to give back."""

    monkeypatch.setattr(library.llmapi, "LLM", LLM)
    monkeypatch.setattr(sys.modules["tensorrt_llm"], "SamplingParams", SimpleNamespace, raising=False)
    graphs, accepted = check.check_backend(checkpoints[0], pair_folders("torch"), tokens=8)
    assert graphs.passed == (not spoiled)
    assert spoiled or accepted.found > 0.5


def test_without_the_library_there_is_one_clear_error() -> None:
    with pytest.raises(InvalidInput, match=r"mtad\[tensorrt-llm\]"):
        pytorch.checked()


@pytest.mark.parametrize(
    "values",
    [
        {"method": "mmtad"},
        {"method": "sample"},
        {"method": "beam"},
        {"regex": "a+"},
        {"logit_bias": {1: 2.0}},
        {"min_tokens": 3},
        {"frequency_penalty": 0.5},
    ],
)
def test_what_that_place_cannot_do_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        make_speculation(DecodingParams(**values), rows=1)
