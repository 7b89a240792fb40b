"""One executor of TensorRT-LLM 1.2, and what is asked of it. Not executed with the library.

Comments name the C++ file that a call relies on, below `cpp/tensorrt_llm/`; docs/tensorrt-llm.md has the versions.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from engines.prefix_cache import common_prefix
from engines.tensorrt_llm_spec import ExecutorSpec
from runtime.tensorrt_llm.compat import ENGINES, load

log = logging.getLogger(__name__)

Texts = Sequence[Sequence[int]]
Found = tuple[Sequence[int], Sequence[float]]
"""A beam as an executor tells it: its tokens, and each one's own log-probability."""
NEVER = -1e30
"""A logit of probability 0."""
LEAST = 1e-30
"""An acceptance threshold that every token passes; 0 is refused (executor/externalDraftTokensConfig.cpp)."""
PATIENCE = timedelta(seconds=1)
"""How long one wait for answers lasts; between two, an interrupt is noticed."""


class ExecutorClient:
    """An executor, `executor` of the module `bindings`, and the engine's `spec`.

    All requests have one beam width, the engine's. A change of width recreates the executor's buffers, and the CUDA
    graphs that point to the old ones stay (batch_manager/trtGptModelInflightBatching.cpp: changeBeamWidth).
    Logits beyond `vocab_size`, the ids that the pair shares, are cut off.
    """

    def __init__(self, executor: Any, bindings: Any, spec: ExecutorSpec, vocab_size: int) -> None:
        self.spec, self.vocab_size = spec, vocab_size
        self._executor, self._bindings = executor, bindings
        self._draft_logits: dict[int, Tensor] = {}

    @classmethod
    def open(cls, folder: Path, bindings: Any, spec: ExecutorSpec, vocab_size: int, graphs: bool = True) -> Self:
        """Load the engine of a folder. `graphs`: replay generation steps; a target scores in the context phase."""
        # nanobind/executor/executorConfig.cpp has the names of all of these
        parallel = bindings.ParallelConfig(device_ids=list(range(spec.tensor_parallel)))
        if spec.tensor_parallel > 1:  # one process per GPU, of the library's own; else both executors are in this one
            worker = Path(load("tensorrt_llm", ENGINES).__file__).parent / "bin" / "executorWorker"
            parallel.communication_mode = bindings.CommunicationMode.ORCHESTRATOR
            parallel.orchestrator_config = bindings.OrchestratorConfig(True, str(worker))
        knobs = bindings.ExtendedRuntimePerfKnobConfig()
        knobs.cuda_graph_mode = graphs and spec.role == "auxiliary"
        # unset, one graph is held; more than requests are of no use (trtGptModelInflightBatching.cpp)
        knobs.cuda_graph_cache_size = spec.max_batch_size
        config = bindings.ExecutorConfig(
            max_beam_width=spec.max_beam_width,
            # Rejected drafts go, and the text comes back, through reuse alone. A number of tokens, not a fraction of
            # the free memory: two executors share a GPU, and the first would leave the second the rest of it.
            kv_cache_config=bindings.KvCacheConfig(
                enable_block_reuse=True,
                max_tokens=spec.kv_tokens,
                enable_partial_reuse=True,
                copy_on_partial_reuse=True,
            ),
            # else drafts that do not fit a chunk are discarded silently (microBatchScheduler.cpp: fitDraftTokens)
            enable_chunked_context=False,
            normalize_log_probs=False,
            max_batch_size=spec.max_batch_size,
            max_num_tokens=spec.max_num_tokens,
            parallel_config=parallel,
            extended_runtime_perf_knob_config=knobs,
            gather_generation_logits=True,
        )
        made = bindings.Executor(model_path=folder, model_type=bindings.ModelType.DECODER_ONLY, executor_config=config)
        return cls(made, bindings, spec, vocab_size)

    def logits(self, texts: Texts, drafts: Texts, salts: Sequence[int] = ()) -> list[Tensor | None]:
        """Logits after each text and each token of its draft, in one forward pass; one salt's share keys and values.

        Returns:
            by text, float32 [1 + scored, V], V the pair's. `scored` is `len(draft)`, or less where the library scored
            less of it; None where the request failed, which is logged.
        """
        each = zip(texts, drafts, salts or [0] * len(texts), strict=True)
        requests = [self._request(text, 1 + len(draft), salt, draft) for text, draft, salt in each]
        return [self._scored(result, draft) for result, draft in zip(self._ask(requests), drafts, strict=True)]

    def search(self, texts: Texts, steps: Sequence[int], salts: Sequence[int] = ()) -> list[list[Found] | None]:
        """Deterministic beam search behind each text, unfiltered; None where the request failed, which is logged."""
        requests = [self._request(*each) for each in zip(texts, steps, salts or [0] * len(texts), strict=True)]
        return [self._beams(result, count) for result, count in zip(self._ask(requests), steps, strict=True)]

    def close(self) -> None:
        self._executor.shutdown()

    def _request(self, text: Sequence[int], new: int, salt: int, draft: Sequence[int] | None = None) -> Any:
        """A request (nanobind/executor/request.cpp), a search without `draft`; what tokens others draw is no matter."""
        of, external, search = self._bindings, None, draft is None
        if draft:
            judged = {"logits": self._accepted(draft), "acceptance_threshold": LEAST}
            external = of.ExternalDraftTokensConfig(tokens=list(draft), **judged)
        returned = {"return_log_probs": search, "return_generation_logits": not search}
        return of.Request(
            input_token_ids=list(text),
            max_tokens=new,
            # without top-p the library keeps the likeliest token alone (kernels/samplingTopKKernels.h)
            sampling_config=of.SamplingConfig(beam_width=self.spec.max_beam_width, top_p=1.0 if draft else None),
            output_config=of.OutputConfig(exclude_input_from_output=True, **returned),
            end_id=-1,  # ends are the runtime's own affair
            external_draft_tokens_config=external,
            cache_salt_id=salt or None,  # of keys and values, which are reused (kvCacheManager.cpp: BlockKey)
        )

    def _accepted(self, draft: Sequence[int]) -> Tensor:
        """Draft logits under which the library accepts the whole draft, float32 [len(draft), padded V].

        It returns the logits of accepted tokens only (trtGptModelInflightBatching.cpp: updateRequests), and accepts
        unless p / q < threshold (kernels/speculativeDecoding/externalDraftTokensKernels.cu). So q is 0 for every token
        but one, which is not in the draft: the ratio is infinite, or not a number where p is 0, and neither is below a
        threshold. The threshold itself is not relied on: a batch takes that of the request which joined it last, and
        of one without a draft that is a random number (batch_manager/createNewDecoderRequests.cpp). The tensor is
        never written to again, since the executor reads it later.
        """
        other = next(token for token in reversed(range(self.spec.vocab_size)) if token not in draft)
        kept = self._draft_logits.get(other)
        if kept is None:
            kept = torch.full((self.spec.max_draft_len, self.spec.padded_vocab_size), NEVER)
            kept[:, other] = 0
            self._draft_logits[other] = kept
        return kept[: len(draft)]

    def _ask(self, requests: Sequence[Any]) -> list[Any]:
        """The result of each request; None where it failed."""
        if not requests:
            return []
        numbers = [int(number) for number in self._executor.enqueue_requests(requests=list(requests))]
        found: dict[int, Any] = {}
        try:
            while set(numbers) - found.keys():  # there may be late answers to a block that was interrupted
                for response in self._executor.await_responses(timeout=PATIENCE):
                    found[int(response.request_id)] = None if response.has_error() else response.result
                    if response.has_error():
                        log.warning("the %s's executor: %s", self.spec.role, response.error_msg)
        finally:
            for number in set(numbers) - found.keys():
                self._executor.cancel_request(id=number)
        return [found[number] for number in numbers]

    def _scored(self, result: Any, draft: Sequence[int]) -> Tensor | None:
        """The rows that follow the draft. What the library generated by itself, in place of a draft, is left out."""
        if result is None or result.generation_logits is None:
            return None
        known = 1 + common_prefix(result.output_token_ids[0], draft)
        rows: Tensor = result.generation_logits[0, :known, : self.vocab_size]
        return rows.float() if len(rows) else None

    def _beams(self, result: Any, steps: int) -> list[Found] | None:
        if result is None:
            return None
        lengths = [len(each) for each in (*result.output_token_ids, *result.log_probs)]
        if lengths != [steps] * 2 * self.spec.max_beam_width:
            log.warning("the %s's executor: beams of %s tokens, not of %s", self.spec.role, lengths, steps)
            return None
        return list(zip(result.output_token_ids, result.log_probs, strict=True))
