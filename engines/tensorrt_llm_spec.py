"""What `mtad export --to tensorrt-llm` says of an engine (`engine.json`). Such engines have a cache of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mtad.params import DecodingParams

FORMAT = "tensorrt-llm"

Role = Literal["target", "auxiliary"]
Drafting = Literal["search", "steps"]


@dataclass(frozen=True)
class ExecutorSpec:
    """An engine that a TensorRT-LLM executor runs: it batches requests and keeps keys and values itself.

    Attributes:
        role: what it was built for. A target takes external draft tokens, an auxiliary beams.
        architecture: the checkpoint's `architectures[0]`.
        vocab_size: width of its logits, before the library pads it.
        dtype: of activations: `float16` or `bfloat16`. Logits are float32.
        quantization: of weights: `none`, `fp8` or `int4_awq`.
        tensor_parallel: GPUs that one copy is spread over.
        rows: texts decoded at once.
        capacity: tokens of a text at most, prompt and new ones.
        draft_len: drafted tokens a request may carry (target), or draw (auxiliary).
        beam_width: beams of a draft.
        drafting: how the auxiliary finds them: `search`, one request per draft, or `steps`, one per beam and level.
        max_batch_size, max_num_tokens, max_beam_width, max_draft_len: what it was built with, in the library's terms.
            Every request of an executor has `max_beam_width` beams.
        kv_tokens: tokens whose keys and values its cache holds.
        eos_token_ids: tokens that end a text.
        checkpoint_hash: sha256 over the source checkpoint.
        versions: package versions of the exporter.
        format: `tensorrt-llm`.
    """

    role: Role
    architecture: str
    vocab_size: int
    dtype: str
    quantization: str
    tensor_parallel: int
    rows: int
    capacity: int
    draft_len: int
    beam_width: int
    drafting: Drafting
    max_batch_size: int
    max_num_tokens: int
    max_beam_width: int
    max_draft_len: int
    kv_tokens: int
    eos_token_ids: tuple[int, ...]
    checkpoint_hash: str
    versions: dict[str, str]
    format: str = FORMAT


def paths(params: DecodingParams) -> int:
    """Requests that a row's block has in flight at the target: one per path of its tree."""
    return params.draft_width if params.spec.tree else 1
