"""TensorRT-LLM engine: a plan of release 1.2 whose generation phase takes the tokens of a tree. Not executed on a GPU.

Inputs, their order and their meaning are those of `tensorrt_llm/models/generation_mixin.py` and
`cpp/tensorrt_llm/plugins/gptAttentionPlugin/gptAttentionPlugin.cpp` of that release's time; docs/tensorrt-llm.md says
more.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from engines.base import EngineSpec, Step
from engines.buffers import to_device
from engines.placement import Placement
from engines.tensorrt.engine import MAX_CONTEXTS, PlanEngine, accepted, prefill_chunks, runtime_of
from engines.tensorrt_llm.cache import BlockPool, spare_pages
from engines.tensorrt_llm.inputs import CONTEXT, GENERATION, PlanInputs, check_inputs, new_inputs, packed
from engines.tensorrt_llm.library import load_plugins


def open_tensorrt_llm(folder: Path, spec: EngineSpec, placement: Placement) -> TensorRTLLMEngine:
    """Open a plan of TensorRT-LLM, if it and the plugins run here; see `runtime_of`. On a GPU: not executed."""
    trt, device = runtime_of(spec, placement)
    load_plugins()
    return TensorRTLLMEngine(folder, spec, trt, device)


class TensorRTLLMEngine(PlanEngine):
    """A step is one enqueue of the library's generation phase, which takes the tokens of a tree and their mask.

    That mask covers the tokens of a step only: every column before them is seen. So a step over a level of a draft runs
    the levels before it once more (`Step.drafted`), at the columns where they lie. A step is launched by an execution
    context of its shape, which is bound once to memory that stays; whole blocks can be captured, because what the
    library reads on the host, it reads when it is launched: past lengths are given as the length of the mask.

    Prompts, and what keeps no logits or has more tokens than a tree, run a row at a time in the context phase, where
    every token sees those before it, whatever the mask says.

    Raises:
        InvalidInput: as `PlanEngine`, or a plan that was built otherwise.
    """

    cache: BlockPool

    def __init__(self, folder: Path, spec: EngineSpec, trt: ModuleType, device: str) -> None:
        plan = spec.plan
        assert plan is not None
        cache = partial(BlockPool, spec, device, spare_pages(plan.decode_tokens))
        super().__init__(folder, spec, trt, cache, (0,))
        self.max_tokens: int = plan.decode_tokens
        check_inputs(self._engine, plan, self.cache)
        logits = spec.rows * plan.decode_tokens, int(self._engine.get_tensor_shape("logits")[-1])
        self._logits = torch.empty(logits, dtype=torch.float32, device=device)
        # of each row's draft: where it begins, its tokens, how far behind that they lie, and which of them sees which
        tokens = plan.decode_tokens
        self._base = torch.zeros(spec.rows, dtype=torch.int64, device=device)
        self._tokens, self._depths = torch.zeros(2, spec.rows, tokens, dtype=torch.int64, device=device)
        self._sees = torch.zeros(spec.rows, tokens, tokens, dtype=torch.bool, device=device)
        self._pool, self._prompts = 0, self._context(0)
        self._bound: dict[tuple[int, ...], tuple[Any, PlanInputs]] = {}

    @property
    def captured_on(self) -> object:
        if self._pool != (pool := self.cache.kv.data_ptr()):
            self._bound, self._pool = {}, pool
        return self._bound

    def step(self, step: Step) -> Tensor:
        self.cache.reserve(step.spans, step.first_row)
        return super().step(step)

    @torch.inference_mode()
    def enqueue(self, step: Step) -> Tensor:
        """Logits [R, N, V], always float32, in new memory: a block reads those of all its levels."""
        _ = self.captured_on  # made anew if the pool lies elsewhere
        (rows, tokens), kept = step.tokens.shape, len(step.keep)
        width = step.drafted + tokens
        if step.drafted or (kept and not step.is_prompt and width <= self.max_tokens):
            assert width <= self.max_tokens, "a draft is larger than the plan's"
            return self._decode(step, width)
        found = self._logits.new_empty((rows, kept, self._logits.shape[1]))
        starts = self.cache.starts[step.first_row : step.first_row + rows]
        for chunk, row, at in prefill_chunks(step, self.max_tokens if kept else self._plan.prefill_tokens):
            logits = self._prefill(chunk, starts[row])
            starts[row] += chunk.tokens.shape[1]
            if kept:
                found[row, at] = logits
        return found[..., : self.spec.vocab_size]

    def _decode(self, step: Step, width: int) -> Tensor:
        (rows, tokens), kept, length = step.tokens.shape, len(step.keep), step.mask.shape[3]
        key = rows, width, kept, length
        if key not in self._bound:
            if len(self._bound) == MAX_CONTEXTS:
                self._dropped, self._bound = self._bound, {}  # what still runs there needs them a while longer
            given = new_inputs(self.cache, self._pool, GENERATION, rows, width, rows * kept, self.max_tokens)
            given["host_past_key_value_lengths"].fill_(length)
            self._bind(context := self._context(0), given)
            self._bound[key] = context, given
        context, given = self._bound[key]
        base, row = self._base[:rows], torch.arange(rows, device=self.device)[:, None]
        if not step.drafted:
            base.copy_(step.write_at)
        first = step.write_at - base
        at = first[:, None] + torch.arange(tokens, device=self.device)
        self._tokens[row, at], self._depths[row, at] = step.tokens, step.positions - base[:, None]
        columns = base[:, None] + torch.arange(width, device=self.device)
        seen = step.mask[:, 0].gather(2, columns.clamp(max=length - 1)[:, None].expand(-1, tokens, -1))
        self._sees[row, at] = pad(seen & (columns < length)[:, None], (0, self.max_tokens - width))
        idle = base >= self.spec.capacity  # padded rows have nothing before them, and spare pages
        past, depths = base.masked_fill(idle, 0), self._depths[:rows, :width].masked_fill(idle[:, None], 0)
        given["input_ids"].copy_(self._tokens[:rows, :width].flatten())
        given["position_ids"].copy_((past[:, None] + depths).flatten())
        given["last_token_ids"].copy_((row * width + first[:, None] + step.keep + 1).flatten())
        given["sequence_length"].copy_(past + width)
        given["context_lengths"].copy_(past)
        given["kv_cache_block_offsets"].copy_(self.cache.offsets(step.first_row, idle)[None])
        given["spec_decoding_position_offsets"].copy_(depths)
        given["spec_decoding_packed_mask"].copy_(packed(self._sees[:rows, :width, :width], self.max_tokens))
        accepted(context.execute_async_v3(self._stream()), "enqueue of", "a step")
        return self._logits[: rows * kept].view(rows, kept, -1)[..., : self.spec.vocab_size].clone()

    def _prefill(self, step: Step, start: int) -> Tensor:
        """The context phase over a row's tokens, in columns from `start` on; logits [N, V padded]."""
        tokens, kept = step.tokens.shape[1], len(step.keep)
        given = new_inputs(self.cache, self._pool, CONTEXT, 1, tokens, max(1, kept), self.max_tokens)
        offsets = self.cache.host_offsets(step.first_row)[None]
        given["host_kv_cache_block_offsets"].copy_(offsets)
        given["kv_cache_block_offsets"].copy_(to_device(offsets.numpy(), self.device))
        given["host_past_key_value_lengths"].fill_(start + tokens)
        given["sequence_length"].fill_(start + tokens)
        given["context_lengths"].fill_(tokens)
        given["input_ids"].copy_(step.tokens[0])
        given["position_ids"].copy_(step.positions[0])
        given["last_token_ids"].copy_(step.keep + 1 if kept else given["context_lengths"])
        self._bind(self._prompts, given)
        accepted(self._prompts.execute_async_v3(self._stream()), "enqueue of", "a step")
        return self._logits[:kept]

    def _bind(self, context: Any, given: PlanInputs) -> None:
        for name, tensor in given.items():
            shape, address = tuple(tensor.shape), tensor.data_ptr() or self._activations.data_ptr()  # of nothing, none
            accepted(context.set_input_shape(name, shape), f"shape of {name}", shape)
            accepted(context.set_tensor_address(name, address), f"address of {name}", hex(address))
        accepted(context.set_tensor_address("logits", self._logits.data_ptr()), "address of", "logits")
