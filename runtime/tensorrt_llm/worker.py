"""MTAD inside TensorRT-LLM 1.4's own decoding: our acceptance where its one-model workers call theirs.

The library drafts one chain, scores it and keeps the cache, in one CUDA graph. Its `SpecWorkerBase` checks the buffers,
samples for prompts, filters both distributions, and then calls a function of its module, which ours takes the place of:
`rejection_sampling_one_model`. Not executed with the library; written from its `_torch/speculative/interface.py` of
September 2026.
"""

from __future__ import annotations

import inspect
import math
import os
import runpy
import sys
import tempfile
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor
from torch.nn.functional import pad

from engines.placement import versions
from mtad.device.rules import joint, likeliest
from mtad.device.tables import draw
from mtad.errors import InvalidInput
from mtad.params import DecodingParams

WORKER = "1.4.0rc1"
"""The release that this is written for: parameters differ between releases."""
INTERFACE, SERVE = "tensorrt_llm._torch.speculative.interface", "tensorrt_llm.commands.serve"
PROCESS = "tensorrt_llm.llmapi.utils"
SEAM, CALLER = "rejection_sampling_one_model", "_sample_and_accept_draft_tokens_rejection"
SEEDS = "_rng_state_per_request"
"""What the caller has seeds and offsets of each request from. Releases without it have one seed for all of a batch."""
GIVEN = ("draft_probs", "draft_token_ids", "target_probs", "deterministic", "seed", "offset")
"""What the library's function is given, by name."""
CALLED = ("self", "logits", "draft_tokens", "draft_probs", "num_contexts", "batch_size", "spec_metadata")
"""What the method that calls it is given."""

REFUSED = ("--tp", "--tensor_p", "--pp", "--pipeline_p", "--cp", "--context_p", "--backend", "--config", "--extra_llm")
"""How options of `trtllm-serve` begin that would start ranks, take another backend, or name a second configuration."""


def serve(arguments: Sequence[str]) -> None:
    """Run `trtllm-serve` with our acceptance.

    Args:
        arguments: what `mtad export --to tensorrt-llm-worker` wrote, and options of trtllm-serve.

    Raises:
        InvalidInput: as `install`, or an option would start ranks, or name a backend or another configuration.
    """
    if not arguments or any(one.startswith(REFUSED) for one in arguments[1:]):
        problem = "give the one configuration, then options; ranks and other backends have the library's own rule"
        raise InvalidInput("arguments", " ".join(arguments), problem)
    given = install(Path(arguments[0]))
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        model = given.pop("model")
        yaml.safe_dump(given, file)
        file.flush()
        sys.argv = ["trtllm-serve", str(model), "--config", file.name, *arguments[1:]]
        runpy.run_module(SERVE, run_name="__main__")


def install(config: Path) -> dict[str, Any]:
    """Let this process decide as a configuration says; also where Triton's `llmapi` model reads its arguments.

    Returns:
        the library's own part of the configuration, arguments of `tensorrt_llm.LLM`.

    Raises:
        InvalidInput: the file is no such configuration, the library is missing or another release, what is patched has
            changed, the model would run in another process or backend, or drafts would change their length.
    """
    try:
        values: dict[str, Any] = yaml.safe_load(config.read_text(encoding="utf-8"))
        threshold = float(values.pop("mtad")["accept_threshold"])
        drafts = dict(values["speculative_config"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError) as error:
        problem = f"not a configuration that mtad export --to tensorrt-llm-worker wrote: {error!r}"
        raise InvalidInput("config", str(config), problem) from None
    sizes = dict.fromkeys(("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size"), 1)
    for name, only in {**sizes, "orchestrator_type": None, "backend": "pytorch"}.items():
        if values.get(name, only) != only:
            raise InvalidInput(name, values[name], "other processes and backends have the library's rule; leave it out")
    for name in ("draft_len_schedule", "max_concurrency"):
        if (value := drafts.get(name)) is not None:
            problem = "when drafts get longer, the library fills them up with tokens that nobody drafted; leave it out"
            raise InvalidInput(f"speculative_config.{name}", value, problem)
    os.environ.setdefault("TLLM_WORKER_USE_SINGLE_PROCESS", "1")
    if not load(PROCESS).enable_worker_single_process_for_tp1():
        problem = "not 1 when it was read; set it to 1, so that the model is in this process"
        raise InvalidInput("TLLM_WORKER_USE_SINGLE_PROCESS", os.environ["TLLM_WORKER_USE_SINGLE_PROCESS"], problem)
    interface = load(INTERFACE)
    check_contract(interface)
    setattr(interface, SEAM, accept_by(threshold))
    return values


def load(name: str) -> Any:
    """Import a module of the library, in the release `WORKER` alone.

    Raises:
        InvalidInput: the library is not installed, is another release, or cannot be loaded on this machine.
    """
    found = versions("tensorrt-llm").get("tensorrt-llm")
    remedy = f"pip install tensorrt-llm=={WORKER} from NVIDIA's package index (docs/tensorrt-llm.md)"
    if found is not None and found.partition("+")[0] != WORKER:  # a suffix names a build of the same release
        raise InvalidInput("tensorrt-llm", found, f"another release than what this is written for; {remedy}")
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        problem = "not installed" if error.name == "tensorrt_llm" else f"{error.name} is missing"
        raise InvalidInput("tensorrt-llm", found, f"{problem}; {remedy}") from error
    except Exception as error:  # its libraries' own: a driver, CUDA or MPI that is not there
        raise InvalidInput("tensorrt-llm", found, f"cannot be loaded on this machine: {error}") from error


def worker_config(model: str, auxiliary: str, params: DecodingParams) -> dict[str, Any]:
    """The one configuration file: arguments of `tensorrt_llm.LLM`, and ours under `mtad`.

    Temperature, top-k and top-p are each request's own. A batch in which no request samples takes the library's
    greedy acceptance, which is what MTAD is at temperature 0.

    Args:
        model, auxiliary: checkpoints with one vocabulary: folders or hub ids.
        params: `draft_len` and `accept_threshold`, of all requests.

    Raises:
        InvalidInput: something is asked for that is not there.
    """
    if params.method != "mtad":
        raise InvalidInput("method", params.method, "the worker decides by mtad's rule; give mtad")
    if params.thinking is not params:
        raise InvalidInput("thinking_method", params.thinking_method, "the worker has one rule; leave it out")
    if params.beam_width > 1:
        raise InvalidInput("beam_width", params.beam_width, "the library drafts one chain; give 1")
    if params.automatic:
        raise InvalidInput("draft_len", params.draft_len, "the library drafts as many tokens each time; give a number")
    drafts = {"decoding_type": "Draft_Target", "max_draft_len": params.draft_len, "speculative_model": auxiliary}
    speculative = {**drafts, "use_rejection_sampling": True}
    return {"model": model, "speculative_config": speculative, "mtad": {"accept_threshold": params.threshold}}


def check_contract(interface: Any) -> None:
    """Make sure that what is patched is called as it was when this was written.

    Raises:
        InvalidInput: it is not; says what has changed.
    """
    caller: Any = getattr(interface.SpecWorkerBase, CALLER, None)
    code = getattr(caller, "__code__", None)
    named = {words for words in getattr(code, "co_consts", ()) if isinstance(words, tuple)}
    found = {
        f"SpecWorkerBase.{CALLER}": code is not None and tuple(inspect.signature(caller).parameters) == CALLED,
        f"the call of {SEAM}": code is not None and SEAM in code.co_names and GIVEN in named,
        "seeds of each request": code is not None and SEEDS in code.co_names,
        SEAM: tuple(inspect.signature(getattr(interface, SEAM, check_contract)).parameters) == GIVEN,
    }
    if changed := [name for name, holds in found.items() if not holds]:
        problem = f"changed in {INTERFACE}: {', '.join(changed)}; this is written for {WORKER}"
        raise InvalidInput("tensorrt-llm", None, problem)


def accept_by(threshold: float) -> Any:
    """What stands in the library's place: the joint rule, for chains that were drawn from their distributions."""
    log_threshold = math.log(threshold) if threshold > 0 else -math.inf

    def accept(
        draft_probs: Tensor,
        draft_token_ids: Tensor,
        target_probs: Tensor,
        deterministic: bool = True,
        seed: Tensor | None = None,
        offset: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Tokens int32 [G, 1 + D], the kept and one more, and how many count, int32 [G]; nothing is read back.

        Args:
            draft_probs, draft_token_ids: float32 [G, D, V], and int32 [G, D], drawn from them.
            target_probs: after the text and each drafted token, float32 [G, 1 + D, V].
            seed, offset: int64 [G], of the random numbers; requests may share both.
        """
        assert seed is not None
        assert offset is not None
        assert seed.shape == offset.shape == draft_token_ids.shape[:1]
        row = torch.arange(len(seed), device=seed.device)  # requests without a seed share one, and often the offset
        uniform = uniforms(seed, offset + (row << 40))
        tokens, counts = decide(draft_token_ids.long(), target_probs, draft_probs, uniform, log_threshold)
        return tokens.int(), counts.int()

    return accept


def decide(drafted: Tensor, p: Tensor, q: Tensor, uniform: Tensor, log_threshold: float) -> tuple[Tensor, Tensor]:
    """Decide chains by the joint rule: tokens int64 [G, 1 + D], the kept and one more; their count, int64 [G].

    Args:
        drafted: int64 [G, D].
        p: the target's probabilities, filtered, after the text and after each drafted token: float32 [G, 1 + D, V].
        q: what each drafted token was drawn from, float32 [G, D, V or more].
        uniform: of the token behind, float64 [G] in [0, 1).
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
    """A number in [0, 1) per request, float64 [G], from its seed and offset: the same on every rank.

    SplitMix64 over int64 [G] each; products wrap, and shifts of negative numbers are made logical.
    """
    mixed = seeds * 0x5851F42D4C957F2D + (offsets + 1) * -0x61C8864680B583EB
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        mixed = (mixed ^ ((mixed >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return ((mixed >> 11) & (2**53 - 1)).double() / 2**53
