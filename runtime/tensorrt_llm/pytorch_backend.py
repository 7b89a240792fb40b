"""TensorRT-LLM's PyTorch backend (1.2 and later) as the target: a drafter, and a sampler that decides by our rules.

The backend batches, keeps the cache and replays graphs of the verification. It has a public place for a drafter, none
for a sampler: so one class is put in the place of `TorchSampler` while `LLM(...)` is built. Not executed with the
library; written for 1.2.0 and 1.2.1, refused wherever a name or a parameter that is used is missing.
"""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Iterator
from typing import Any

from mtad.errors import InvalidInput
from runtime.tensorrt_llm.compat import check, installed, load
from runtime.tensorrt_llm.pytorch_drafts import Speculation

DRAFTER, SAMPLER, API = (
    "tensorrt_llm._torch.speculative.drafter",
    "tensorrt_llm._torch.pyexecutor._util",
    "tensorrt_llm.llmapi",
)
USED: dict[str, dict[str, tuple[str, ...]]] = {
    DRAFTER: {
        "Drafter": ("max_draft_len", "max_total_draft_tokens"),
        "Drafter.prepare_draft_tokens": ("scheduled_requests", "resource_manager"),
    },
    SAMPLER: {
        "TorchSampler.process_draft_tokens": (
            "request",
            "new_tokens_tensor",
            "new_tokens_list",
            "finish_reasons",
            "resource_manager",
        ),
        "TorchSampler.sample_async": (
            "scheduled_requests",
            "model_outputs",
            "num_context_logits_prefix_sum",
            "resource_manager",
        ),
        "TorchSampler._handle_stop_criteria": ("request", "new_token"),
    },
    API: {
        "LLM": (
            "model",
            "speculative_config",
            "disable_overlap_scheduler",
            "cuda_graph_config",
            "max_batch_size",
            "max_num_tokens",
        ),
        "UserProvidedDecodingConfig": ("max_draft_len", "drafter"),
        "CudaGraphConfig": ("batch_sizes", "enable_padding"),
    },
}
"""By module, what is used of it: names, and parameters that are passed to them or taken over."""

STOP = {"max_seq_len", "beam_idx"}
"""Further parameters of `_handle_stop_criteria`, of which each version has some."""


def open_llm(
    model: str, speculation: Speculation, *, batch_size: int = 8, cuda_graphs: bool = True, **options: Any
) -> Any:
    """A `tensorrt_llm.LLM` that decodes a target with our drafts and our acceptance.

    Its requests' first token is its own sampler's: give `SamplingParams` the temperature, top_k and top_p of
    `speculation.params`. All others are decided by `speculation`.

    Args:
        model: the target: folder or hub id.
        speculation: what drafts and decides; rows for at least `batch_size` requests.
        batch_size: requests at once.
        cuda_graphs: replay the verification of up to `batch_size` requests; shorter drafts are padded to `draft_len`.
        options: further arguments of `LLM`.

    Raises:
        InvalidInput: the library is missing, lacks what is used of it, or the options are not what this needs.
    """
    for name in ("speculative_config", "disable_overlap_scheduler", "cuda_graph_config", "max_beam_width"):
        if name in options:
            raise InvalidInput(name, options[name], "set here already; leave it out")
    length = speculation.params.drafted
    least = batch_size * (1 + length)
    tokens = options.pop("max_num_tokens", max(8192, least))
    if tokens < least:
        raise InvalidInput(
            "max_num_tokens", tokens, f"a graph of all drafts must fit an iteration; give at least {least}"
        )
    modules = checked()
    api = modules[API]
    graphs = (
        api.CudaGraphConfig(batch_sizes=list(range(1, batch_size + 1)), enable_padding=True) if cuda_graphs else None
    )
    drafter = make_drafter(modules[DRAFTER].Drafter)(speculation)
    with sampler_in_place(modules[SAMPLER], speculation):
        return api.LLM(
            model=model,
            speculative_config=api.UserProvidedDecodingConfig(max_draft_len=length, drafter=drafter),
            disable_overlap_scheduler=True,
            cuda_graph_config=graphs,
            max_batch_size=batch_size,
            max_num_tokens=tokens,
            **options,
        )


def checked() -> dict[str, Any]:
    """The library's modules, by name, checked to have what is used.

    Raises:
        InvalidInput: naming all that is missing, and the versions this is written for.
    """
    modules = {name: load(name) for name in USED}
    for name, used in USED.items():
        check(modules[name], used, installed())
    stop = inspect.signature(modules[SAMPLER].TorchSampler._handle_stop_criteria).parameters.values()
    needed = {p.name for p in stop if p.default is p.empty} - STOP - {"self", "request", "new_token"}
    if needed:
        check(modules[SAMPLER], {f"TorchSampler._handle_stop_criteria without {sorted(needed)}": ()}, installed())
    return modules


def make_drafter(base: type) -> type:
    """The drafter, a subclass of the library's `Drafter`."""

    class Drafter(base):  # type: ignore[misc]
        """Drafts for all requests of an iteration at once."""

        def __init__(self, speculation: Speculation) -> None:
            length = speculation.params.drafted
            super().__init__(max_draft_len=length, max_total_draft_tokens=length)
            self.speculation = speculation

        def prepare_draft_tokens(self, scheduled_requests: Any, resource_manager: Any = None) -> None:
            """Set `py_draft_tokens` of every request that generates. The library pads it afterwards."""
            requests = {request.py_request_id: request for request in scheduled_requests.generation_requests}
            if not requests:
                return
            texts = {key: list(request.get_tokens(0)) for key, request in requests.items()}
            for key, tokens in self.speculation.propose(texts).items():
                requests[key].py_draft_tokens = tokens

    return Drafter


def make_sampler(base: type, speculation: Speculation) -> type:
    """The sampler, a subclass of the library's `TorchSampler`."""
    stop = set(inspect.signature(base._handle_stop_criteria).parameters)  # type: ignore[attr-defined]

    class Sampler(base):  # type: ignore[misc]
        """Keeps the logits of the drafts, and decides by them."""

        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            self._kept: dict[int, Any] = {}

        def sample_async(
            self,
            scheduled_requests: Any,
            model_outputs: Any,
            num_context_logits_prefix_sum: list[int],
            resource_manager: Any = None,
        ) -> Any:
            """Note the logits after each request's last token and its drafted ones, then as the base does.

            They lie behind those of the context requests, request by request, those of padding included.
            """
            logits, at = model_outputs["logits"], num_context_logits_prefix_sum[-1]
            for request in scheduled_requests.generation_requests:
                drafted = speculation.drafted(request.py_request_id)
                if drafted is not None:
                    self._kept[request.py_request_id] = logits[at : at + 1 + drafted].clone()
                at += 1 + len(request.py_draft_tokens or ())
            return super().sample_async(
                scheduled_requests, model_outputs, num_context_logits_prefix_sum, resource_manager=resource_manager
            )

        def process_draft_tokens(
            self,
            request: Any,
            new_tokens_tensor: Any,
            new_tokens_list: Any,
            finish_reasons: Any = None,
            resource_manager: Any = None,
        ) -> int:
            """Append a request's block, up to what ends it; returns how many of its tokens were drafted."""
            logits = self._kept.pop(request.py_request_id, None)
            if logits is None or speculation.drafted(request.py_request_id) is None:
                accepted: int = super().process_draft_tokens(
                    request, new_tokens_tensor, new_tokens_list, finish_reasons, resource_manager
                )
                return accepted
            decision = speculation.decide(request.py_request_id, logits)
            known = {"max_seq_len": getattr(self, "max_seq_len", None), "beam_idx": 0}
            further = {name: value for name, value in known.items() if name in stop}
            for index, token in enumerate(decision.tokens):
                new_tokens_tensor[index, request.py_seq_slot, 0] = token
                request.add_new_token(token, 0)
                if self._handle_stop_criteria(request, token, **further):
                    return min(index + 1, decision.length)
            return decision.length

    return Sampler


@contextlib.contextmanager
def sampler_in_place(module: Any, speculation: Speculation) -> Iterator[None]:
    """While an `LLM` is built: our sampler for the library's, and its worker in this process, which both need."""
    name = "TLLM_WORKER_USE_SINGLE_PROCESS"
    before, own = os.environ.get(name), module.TorchSampler
    os.environ[name] = "1"
    module.TorchSampler = make_sampler(own, speculation)
    try:
        yield
    finally:
        module.TorchSampler = own
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
