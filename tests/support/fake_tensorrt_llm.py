"""A plan of TensorRT-LLM 1.2 on a CPU: inputs, their bounds and their meaning are the library's, the model is torch's.

It aborts (`Abort`) where the library does: its checks throw where nothing may be thrown. Values that the library reads
on the host are read when a step is launched, by NumPy, so that a recorded launch has them frozen; all others stay on
the "device". Sources, of 1.2's time, as stored: `models/generation_mixin.py`, 83493268 (names, types, bounds);
`gptAttentionPlugin.cpp`, 1194059587 (enqueueImpl, enqueueSome: order, lengths, phases, pool); `kvCacheUtils.h`,
57860309370 (offsets); `decoderXQAImplPrecompiled.cpp`, 9105275534, and `mha.cu`, 9234776586 (masks);
`unfusedAttentionKernels_2_template.h`, 56818437091 (rotary positions); `decoderXQAImplJIT`, 520626023 (heads, groups).
"""

from __future__ import annotations

import ctypes
import json
import math
from collections.abc import Callable
from mmap import mmap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from engines.base import KV_PAGE
from tests.support.fake_tensorrt import ExecutionContextAllocationStrategy, IExecutionContext, ILogger

__all__ = ["ExecutionContextAllocationStrategy", "ILogger", "Runtime", "__version__"]
__version__ = "10.14.1.48"

PADDING = 5
"""Logits behind the vocabulary, which `pad_vocab_size` adds."""
HOST = ("host_", "spec_decoding_use")
"""How names of inputs begin that are read on the host."""
_NUMPY = {"INT32": np.int32, "INT64": np.int64, "FLOAT": np.float32}


class Abort(Exception):
    """The library would end the process."""


def check(holds: Any, what: str) -> None:
    if not bool(holds):
        raise Abort(what)


def write_plan(folder: Path, checkpoint: Path, rows: int, tokens: int, prefill: int, columns: int) -> None:
    """Write what `Runtime` here deserialises."""
    values = {"checkpoint": str(checkpoint), "rows": rows, "tokens": tokens, "prefill": prefill, "columns": columns}
    (folder / "model.engine").write_text(json.dumps(values))


class Plan:
    """`ICudaEngine`.

    Attributes:
        pool: gives the pool that the engine has allocated: a pointer does not tell how much is behind it.
        broken: input -> what is done to its values before they are read, to see that it is noticed.
    """

    def __init__(self, checkpoint: str, rows: int, tokens: int, prefill: int, columns: int) -> None:
        self.model = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
        self.tokens, self.columns = tokens, columns
        self.pool: Callable[[], Tensor] = lambda: torch.empty(0)
        self.broken: dict[str, Callable[[Any], Any]] = {}
        self.contexts: list[Context] = []
        config, words, blocks = self.model.config, -(-tokens // 32), -(-columns // KV_PAGE)
        layers, most, all_tokens = config.num_hidden_layers, max(prefill, rows * tokens), rows * tokens
        per_row = dict.fromkeys(
            (
                *("sequence_length", "context_lengths", "host_context_lengths", "host_request_types"),
                "host_past_key_value_lengths",
            ),
            ((1,), (rows,)),
        )
        self.bounds: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
            **per_row,
            "input_ids": ((1,), (most,)),
            "position_ids": ((1,), (most,)),
            "last_token_ids": ((1,), (all_tokens,)),
            "host_max_attention_window_sizes": ((layers,), (layers,)),
            "host_sink_token_length": ((1,), (1,)),
            "cache_indirection": ((1, 1, 1), (rows, 1, columns)),
            "kv_cache_block_offsets": ((1, 1, 2, 1), (layers, rows, 2, blocks)),
            "host_kv_cache_block_offsets": ((1, 1, 2, 1), (layers, rows, 2, blocks)),
            "host_kv_cache_pool_pointers": ((1, 2), (layers, 2)),
            "host_kv_cache_pool_mapping": ((layers, 2), (layers, 2)),
            "host_runtime_perf_knobs": ((16,), (16,)),
            "host_context_progress": ((1,), (1,)),
            "spec_decoding_generation_lengths": ((0,), (rows,)),
            "spec_decoding_position_offsets": ((0, 1), (rows, tokens)),
            "spec_decoding_packed_mask": ((0, 0), (all_tokens, words)),
            "spec_decoding_use": ((1,), (1,)),
        }
        self.kinds = dict.fromkeys(self.bounds, "INT32") | {"logits": "FLOAT"}
        longs = ("host_kv_cache_pool_pointers", "host_runtime_perf_knobs", "host_context_progress")
        self.kinds |= dict.fromkeys(longs, "INT64")

    @property
    def num_io_tensors(self) -> int:
        return len(self.kinds)

    def get_tensor_name(self, index: int) -> str:
        return list(self.kinds)[index]

    def get_tensor_dtype(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(name=self.kinds[name])

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[tuple[int, ...]]:
        least, largest = self.bounds[name]
        return [least, largest, largest]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        assert name == "logits"
        return -1, self.model.config.vocab_size + PADDING

    def get_device_memory_size_for_profile_v2(self, profile_index: int) -> int:
        return 64

    def create_execution_context(self, strategy: Any) -> Context:
        assert strategy is ExecutionContextAllocationStrategy.USER_MANAGED
        self.contexts.append(Context(self))
        return self.contexts[-1]


class Context(IExecutionContext):
    def __init__(self, plan: Plan) -> None:
        super().__init__(None, [{name: plan.get_tensor_profile_shape(name, 0) for name in plan.bounds}])
        self._plan = plan

    def set_tensor_address(self, name: str, memory: int) -> bool:
        self._addresses[name] = memory
        return memory != 0 and name in self._plan.kinds

    def execute_async_v3(self, stream_handle: int) -> bool:
        if not self._memory or self._shapes.keys() != self._plan.bounds.keys():
            return False
        given = {name: self._read(name, shape) for name, shape in self._shapes.items()}
        for name, change in self._plan.broken.items():
            given[name] = change(given[name].copy())
        check_values(given, self._plan)
        device = {name: torch.from_numpy(value) for name, value in given.items() if not name.startswith(HOST)}
        logits = run(self._plan, device, {name: value for name, value in given.items() if name.startswith(HOST)})
        shape = len(given["last_token_ids"]), self._plan.model.config.vocab_size + PADDING
        torch.from_numpy(self._read("logits", shape)).copy_(logits)
        return True

    def _read(self, name: str, shape: tuple[int, ...]) -> Any:
        kind: Any = np.dtype(_NUMPY[self._plan.kinds[name]])
        size = max(1, math.prod(shape)) * kind.itemsize
        buffer = (ctypes.c_byte * size).from_address(self._addresses[name])
        return np.frombuffer(memoryview(buffer), kind)[: math.prod(shape)].reshape(shape)


class Runtime:
    def __init__(self, logger: ILogger) -> None:
        self._logger = logger

    def deserialize_cuda_engine(self, serialized_engine: mmap) -> Plan | None:
        return Plan(**json.loads(serialized_engine.read()))


def check_values(given: dict[str, Any], plan: Plan) -> None:
    """What the library checks, and what it would read or write out of bounds."""
    config, types, past_host = plan.model.config, given["host_request_types"], given["host_past_key_value_lengths"]
    group = config.num_attention_heads // config.num_key_value_heads
    head = config.hidden_size // config.num_attention_heads
    check(64 % group == 0 and group <= 32 and head % 16 == 0 and head <= 256, "no available XQA kernels")
    check((np.diff(types) >= 0).all() and set(types.tolist()) <= {0, 1}, "context rows first, then generation rows")
    contexts, trees = int((types == 0).sum()), int((types == 1).sum())
    prompt, tokens = int(given["host_context_lengths"][:contexts].sum()), len(given["input_ids"])
    check(given["host_context_lengths"][:contexts].tolist() == given["context_lengths"][:contexts].tolist(), "lengths")
    columns = given["cache_indirection"].shape[2]
    check((given["host_max_attention_window_sizes"] == columns).all(), "a window is the columns of cache_indirection")
    check(not given["host_sink_token_length"].any() and not given["host_context_progress"].any(), "sink, progress")
    check(given["host_runtime_perf_knobs"].tolist() == [1, *[-1] * 15], "as the library's own runtime sets them")
    layers = [[0, layer] for layer in range(config.num_hidden_layers)]
    check(given["host_kv_cache_pool_mapping"].tolist() == layers, "one pool")
    check(given["host_kv_cache_pool_pointers"].tolist() == [[plan.pool().data_ptr(), 0]], "the pool is elsewhere")
    ends = given["sequence_length"]
    check(past_host.max() >= ends.max(), "keys and values are read up to the largest host_past_key_value_lengths")
    wide, steps = trees > 0 and bool(given["spec_decoding_use"][0]), 0
    if trees:
        check((tokens - prompt) % trees == 0, "generation rows of one length")
        steps = (tokens - prompt) // trees
        check(steps == 1 or wide, "only speculative decoding has more than one token in the generation phase")
        check(
            not wide or given["spec_decoding_position_offsets"].shape == (trees, steps), "the generation input length"
        )
        check((given["spec_decoding_generation_lengths"] == steps).all(), "generation lengths")
    else:
        check(tokens == prompt, "tokens of context rows")
    check((ends[contexts:] >= steps).all() and ends.max() <= columns, "sequence_length counts this step's tokens")
    if wide:
        mask, words = given["spec_decoding_packed_mask"], -(-plan.tokens // 32)
        check(mask.shape == (trees * steps, words), "rows of masks have the words of the build's longest step")
        bits = (mask[:, :, None] >> np.arange(32)) & 1
        bits = bits.reshape(trees, steps, 32 * words)
        check(
            bits[:, range(steps), range(steps)].all() and not bits[:, :, steps:].any(), "own bit, and no others' rows"
        )
        check((given["spec_decoding_position_offsets"] >= 0).all(), "rotary positions")
    offsets, layer_blocks = given["kv_cache_block_offsets"], 2 * config.num_hidden_layers
    check(
        (offsets[0, :, 1] == offsets[0, :, 0] + 1).all() and not (offsets[0, :, 0] % layer_blocks).any(), "K/V offsets"
    )
    check(offsets.max() < plan.pool().shape[0] * layer_blocks, "an offset behind the pool")
    for row, end in enumerate(ends.tolist()):
        count = steps if row >= contexts else int(given["host_context_lengths"][row])
        written = offsets[0, row, 0, (end - count) // KV_PAGE : -(-end // KV_PAGE)]
        check(
            len(written) == -(-end // KV_PAGE) - (end - count) // KV_PAGE and (written > 0).all(), "pages it may write"
        )
    same = given["host_kv_cache_block_offsets"][:, :contexts] == offsets[:, :contexts]
    check(same.all(), "the context phase reads offsets on the host")
    check(given["last_token_ids"].min() >= 1 and given["last_token_ids"].max() <= tokens, "last_token_ids from 1")


@torch.inference_mode()
def run(plan: Plan, given: dict[str, Tensor], host: dict[str, Any]) -> Tensor:
    """Logits [M, V padded]; keys and values are stored behind what precedes the step."""
    model, config = plan.model, plan.model.config
    types, lengths = host["host_request_types"], host["host_context_lengths"]
    contexts, trees = int((types == 0).sum()), int((types == 1).sum())
    prompt = int(lengths[:contexts].sum())
    steps = (len(given["input_ids"]) - prompt) // trees if trees else 0
    counts = [*lengths[:contexts].tolist(), *[steps] * trees]
    row = torch.tensor([r for r, count in enumerate(counts) for _ in range(count)])
    at = torch.tensor([i for count in counts for i in range(count)])
    before = given["sequence_length"].long() - torch.tensor(counts)
    column, position = before[row] + at, before[row] + at
    every = torch.arange(given["kv_cache_block_offsets"].shape[3] * KV_PAGE)
    visible = every < before[row, None]
    behind = every - before[row, None]
    own = (behind >= 0) & (behind <= at[:, None])
    if host["spec_decoding_use"][0] and trees:
        words = given["spec_decoding_packed_mask"].shape[1]
        bits = (given["spec_decoding_packed_mask"][:, :, None] >> torch.arange(32)) & 1
        bits = torch.nn.functional.pad(bits.view(-1, 32 * words).bool(), (0, 1))
        index = behind[prompt:].clamp(0, 32 * words)
        own[prompt:] = bits.gather(1, index) & (behind[prompt:] >= 0)
        position[prompt:] = before[row[prompt:]] + given["spec_decoding_position_offsets"].flatten()
    visible = visible | own
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    size, hidden = config.hidden_size // heads, model.model.embed_tokens(given["input_ids"].long())
    pool = plan.pool().flatten(0, 2)  # [blocks, kv_heads, 64, head_dim]
    cos, sin = model.model.rotary_emb(hidden, position[None])

    def rotated(x: Tensor) -> Tensor:
        left, right = x.chunk(2, -1)
        turned: Tensor = x * cos[0, :, None] + torch.cat([-right, left], -1) * sin[0, :, None]
        return turned

    for layer, block in enumerate(model.model.layers):
        inner, attention = block.input_layernorm(hidden), block.self_attn
        projected = (part(inner) for part in (attention.q_proj, attention.k_proj, attention.v_proj))
        q, k, v = (x.view(len(row), -1, size) for x in projected)
        offsets = given["kv_cache_block_offsets"][0].long() + 2 * layer
        seen = []
        for kind, new in enumerate((rotated(k), v)):
            pool[offsets[row, kind, column // KV_PAGE], :, column % KV_PAGE] = new.to(pool.dtype)
            seen.append(
                pool[offsets[:, kind]].float().transpose(1, 2).flatten(2, 3)[row]
            )  # [N, kv_heads, columns, head_dim]
        keys, values = (x.masked_fill(~visible[:, None, :, None], 0.0) for x in seen)  # what is not visible is not read
        queries = rotated(q).view(len(row), groups, heads // groups, size)
        scores = (queries @ keys.transpose(2, 3)) * size**-0.5
        weights = scores.masked_fill(~visible[:, None, None], -torch.inf).softmax(-1)
        hidden = hidden + attention.o_proj((weights @ values).reshape(len(row), -1))
        hidden = hidden + block.mlp(block.post_attention_layernorm(hidden))
    logits: Tensor = model.lm_head(model.model.norm(hidden)[given["last_token_ids"].long() - 1])
    return torch.nn.functional.pad(logits, (0, PADDING), value=1e4)
