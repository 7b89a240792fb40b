"""Tensors of the Triton model: every field of `DecodingParams`, under the names that TensorRT-LLM's models use.

The names are those of `tensorrt_llm_bls` (inflight_batcher_llm); what that does not name has the decoder's own. A new
field of `DecodingParams` is served without a word here.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from mtad.params import DecodingParams

Role = Literal["prompt", "parameter", "drafted", "setting", "neutral", "end", "padding"]


@dataclass(frozen=True)
class TritonTensor:
    """An input or output of the model.

    Attributes:
        name: in Triton.
        type: of its elements, as `config.pbtxt` writes it without `TYPE_`.
        dims: without the batch dimension; -1 is any.
        role: of an input: part of the prompt, a field of `DecodingParams`, a setting of the answer, or one of
            TensorRT-LLM's that is taken at the values that change nothing and refused at others. `end` must be an
            end-of-sequence token of the pair's; `padding` is a token id that is never needed; `drafted` is what
            TensorRT-LLM calls `draft_len`, of which 0 drafts nothing.
        field: what it sets.
        neutral: of a neutral input: values that change nothing.
        problem: of a neutral input: why other values are refused.
    """

    name: str
    type: str
    dims: tuple[int, ...] = (1,)
    role: Role = "parameter"
    field: str = ""
    neutral: tuple[object, ...] = ()
    problem: str = ""


@dataclass(frozen=True)
class OutputSettings:
    """What a request asks of its answer, by the names that `tensorrt_llm_bls` has for it.

    Attributes:
        stream: a response per block, rather than one.
        exclude_input_in_output: leave the prompt out of the text.
        return_log_probs: the target's log-probabilities.
        return_token_ids: the new tokens' ids.
        return_num_input_tokens, return_num_output_tokens: numbers of tokens.
        return_perf_metrics: all statistics as JSON, times among them.
        priority: larger ones overtake those that wait.
    """

    stream: bool = False
    exclude_input_in_output: bool = True
    return_log_probs: bool = False
    return_token_ids: bool = False
    return_num_input_tokens: bool = False
    return_num_output_tokens: bool = False
    return_perf_metrics: bool = False
    priority: int = 0


OUTPUTS = tuple(
    TritonTensor(name, type, dims)
    for type, dims, names in (
        ("STRING", (-1,), "text_output output_top_logprobs output_prompt_logprobs finish_reason statistics"),
        ("FP32", (-1,), "cum_log_probs acceptance_rate block_efficiency"),
        ("FP32", (-1, -1), "output_log_probs"),
        ("INT32", (-1, -1), "output_ids"),
        ("INT32", (-1,), "sequence_index total_accepted_draft_tokens total_draft_tokens num_output_tokens"),
        ("INT32", (1,), "batch_index num_input_tokens"),
        ("UINT64", (-1,), "output_seed"),
    )
    for name in names.split()
)


def _tensor_type(name: str, hint: Any) -> tuple[str, tuple[int, ...]]:
    """Type and dims of a field of `DecodingParams` or `OutputSettings`; mappings are JSON text."""
    if name == "stop":
        return "STRING", (-1,)
    if isinstance(hint, UnionType) or get_origin(hint) is Union:  # of a number and `auto`, the number
        hint = next(one for one in get_args(hint) if one is not type(None))
    if get_origin(hint) is tuple:
        return _tensor_type("", get_args(hint)[0])[0], (-1,)
    if name == "seed":
        return "UINT64", (1,)
    return {int: "INT32", float: "FP32", bool: "BOOL"}.get(hint, "STRING"), (1,)


def _neutral(name: str, type: str, neutral: tuple[object, ...], problem: str) -> TritonTensor:
    return TritonTensor(name, type, role="neutral", neutral=neutral, problem=problem)


_NO_LOGITS = "logits are not returned; leave it out, or ask for log-probabilities"
_ALIASES = {"stop": "stop_words", "n": "num_return_sequences"}
_FIELDS: dict[Role, type] = {"parameter": DecodingParams, "setting": OutputSettings}

INPUTS = (
    TritonTensor("text_input", "STRING", (1,), "prompt", "text"),
    TritonTensor("input_ids", "INT32", (-1,), "prompt", "ids"),
    *(
        TritonTensor(own, *_tensor_type(name, hint), role, name)
        for role, kind in _FIELDS.items()
        for name, hint in get_type_hints(kind).items()
        for own in filter(None, (name, _ALIASES.get(name)))
    ),
    TritonTensor("num_draft_tokens", "INT32", (1,), "drafted", "draft_len"),
    _neutral("length_penalty", "FP32", (0.0, 1.0), "finished beams are not compared; leave it out"),
    _neutral("return_context_logits", "BOOL", (False,), _NO_LOGITS),
    _neutral("return_generation_logits", "BOOL", (False,), _NO_LOGITS),
    _neutral("use_draft_logits", "BOOL", (True,), "the rule of each method decides; see method"),
    TritonTensor("end_id", "INT32", (1,), "end"),
    TritonTensor("pad_id", "INT32", (1,), "padding"),
)
"""All inputs; each is optional for Triton, so that what is missing is explained by name."""
