"""MTAD inside TensorRT-LLM 1.4's own decoding: its one-model draft-target worker, with our acceptance rule.

The library drafts one chain, scores it and keeps the cache, in one CUDA graph; `_accept_draft_tokens` is where it
decides. Not executed with the library; written from its `_torch/speculative/{interface,utils,draft_target}.py`.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from mtad.device.rules import joint, likeliest
from mtad.device.tables import draw
from mtad.errors import InvalidInput
from mtad.params import DecodingParams
from runtime.tensorrt_llm.compat import WORKER, load

INTERFACE, UTILS = "tensorrt_llm._torch.speculative.interface", "tensorrt_llm._torch.speculative.utils"
API, PROCESS = "tensorrt_llm.llmapi", "tensorrt_llm.llmapi.utils"
Chosen = tuple[Tensor, Tensor]


def open_llm(model: str, auxiliary: str, params: DecodingParams, **options: Any) -> Any:
    """A `tensorrt_llm.LLM` that decodes by `mtad`.

    Temperature, top-k, top-p and seed are each request's own (`tensorrt_llm.SamplingParams`). A batch in which no
    request samples takes the library's greedy acceptance, which is what MTAD is at temperature 0.

    Args:
        model, auxiliary: checkpoints with one vocabulary: folders or hub ids.
        params: `draft_len` and `accept_threshold`, of all requests.

    Raises:
        InvalidInput: the library is missing or another release, or something is asked for that is not there.
    """
    if params.method != "mtad":
        raise InvalidInput("method", params.method, "the worker decides by mtad's rule; give mtad")
    if params.thinking is not params:
        raise InvalidInput("thinking_method", params.thinking_method, "the worker has one rule; leave it out")
    if params.beam_width > 1:
        raise InvalidInput("beam_width", params.beam_width, "the library drafts one chain; give 1")
    if options.get("tensor_parallel_size", 1) != 1:
        problem = "ranks are processes of their own, which do not get the worker; give 1"
        raise InvalidInput("tensor_parallel_size", options["tensor_parallel_size"], problem)
    modules = {name: load(name, WORKER) for name in (INTERFACE, UTILS, API, PROCESS)}
    if not modules[PROCESS].enable_worker_single_process_for_tp1():
        problem = "not 1 when it was read; start Python with it set to 1, so that the model is in this process"
        raise InvalidInput("TLLM_WORKER_USE_SINGLE_PROCESS", None, problem)
    chain = {"max_draft_len": params.draft_len, "speculative_model": auxiliary, "use_rejection_sampling": True}
    own = modules[UTILS].DraftTargetOneModelWorker
    # `get_spec_worker` looks the class up by this name while the model is built
    modules[UTILS].DraftTargetOneModelWorker = make_worker(own, modules[INTERFACE], params.threshold)
    try:
        return modules[API].LLM(
            model=model, speculative_config=modules[API].DraftTargetDecodingConfig(**chain), **options
        )
    finally:
        modules[UTILS].DraftTargetOneModelWorker = own


def make_worker(base: Any, interface: Any, threshold: float) -> type:
    """The worker: a subclass of `DraftTargetOneModelWorker`, which decides by the joint rule."""
    log_threshold = math.log(threshold) if threshold > 0 else -math.inf

    class JointWorker(base):  # type: ignore[misc]
        """All sizes are known to the host, and nothing is read back: a CUDA graph can hold it."""

        def _accept_draft_tokens(
            self, logits: Tensor, draft_tokens: Tensor, num_contexts: int, batch_size: int, spec_metadata: Any
        ) -> Chosen:
            """Tokens int32 [requests, 1 + D] and how many count, int32 [requests]; those in context have one.

            Args:
                logits: the target's, a row per request in context, then 1 + D for each of G that generate.
                draft_tokens: int32 [G, D].
                num_contexts, batch_size: requests in context, and all.
                spec_metadata: sampling parameters, and by slot what each token was drawn from.
            """
            (count, drafted), meta = draft_tokens.shape, spec_metadata
            if not count or not drafted or not self._can_use_rejection_sampling(meta):
                return cast(Chosen, super()._accept_draft_tokens(logits, draft_tokens, num_contexts, batch_size, meta))
            assert self._d2t is None, "the models have two vocabularies"
            logits = self._apply_occurrence_penalties(logits, draft_tokens, num_contexts, batch_size, meta)
            tokens = torch.zeros(batch_size, 1 + drafted, dtype=torch.int32, device=logits.device)
            counts = torch.ones(batch_size, dtype=torch.int32, device=logits.device)
            if num_contexts:
                begun = logits[:num_contexts], meta, num_contexts, num_contexts
                tokens[:num_contexts, 0] = self._sample_tokens_for_batch(*begun)
            own = slice(num_contexts, num_contexts + count * (1 + drafted))
            filters = (values[own] for values in (meta.temperatures, meta.top_ks, meta.top_ps, meta.min_ps))
            p = interface.spec_compute_probs_from_logits(meta.advanced_sampling_mode, logits[own], *filters)
            requests = slice(num_contexts, batch_size)
            q = meta.draft_probs[meta.batch_slot_ids[requests], :drafted]
            uniform = uniforms(meta.request_seeds[requests], meta.request_offsets[requests])
            tokens[num_contexts:], counts[num_contexts:] = decide(
                draft_tokens.long(), p.view(count, 1 + drafted, -1), q, uniform, log_threshold
            )
            return cast(Chosen, self._commit_occurrence_counts((tokens, counts), batch_size, meta))

    return JointWorker


def decide(drafted: Tensor, p: Tensor, q: Tensor, uniform: Tensor, log_threshold: float) -> Chosen:
    """Decide chains by the joint rule: tokens int64 [G, 1 + D], the kept and one more; their count, int64 [G].

    Args:
        drafted: int64 [G, D].
        p: the target's probabilities, filtered, after the text and after each drafted token: float32 [G, 1 + D, V].
        q: what each drafted token was drawn from, float32 [G, D, V or more].
        uniform: of the token behind, float32 [G] in [0, 1).
        log_threshold: of the ratio of joint likelihoods.
    """
    (count, levels), at = drafted.shape, drafted[:, :, None]
    joint_p, joint_q = (x.gather(2, at)[..., 0].double().log().cumsum(1) for x in (p[:, :-1], q))
    true = torch.ones_like(drafted, dtype=torch.bool)
    depths = torch.arange(1, levels + 1, device=p.device).expand(count, -1)
    threshold = torch.full((count,), log_threshold, dtype=torch.float64, device=p.device)
    length = likeliest(joint(joint_p, joint_q, true, depths, ~true, threshold), joint_p) + 1
    bonus = draw(p[torch.arange(count, device=p.device), length], uniform)
    behind = torch.arange(1 + levels, device=p.device) == length[:, None]
    return torch.where(behind, bonus[:, None], pad(drafted, (0, 1))), length + 1


def uniforms(seeds: Tensor, offsets: Tensor) -> Tensor:
    """A number in [0, 1) per request, float32 [G], from its seed and how far it is: the same on every rank.

    SplitMix64 over int64 [G] each; products wrap, and shifts of negative numbers are made logical.
    """
    mixed = seeds * 0x5851F42D4C957F2D + (offsets + 1) * -0x61C8864680B583EB
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        mixed = (mixed ^ ((mixed >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return ((mixed >> 40) & (2**24 - 1)).float() / 2**24
