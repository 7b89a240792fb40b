"""Kernels that a block launches, counted where there is no GPU, for the shapes of Llama-3.1-8B with Llama-3.2-1B."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engines.base import EngineSpec
from engines.pytorch.engine import TorchEngine
from engines.pytorch.fusion import fuse
from mtad.params import DecodingParams
from runtime.decoder.block import BlockInput
from runtime.decoder.buckets import Buckets
from runtime.decoder.cuda_graph.captured_block import Arenas, CapturedBlock, Key
from tests.support.fake_gpu import fake_gpu, move
from tests.support.launches import counted

VOCAB, CAPACITY, PROCESSORS = 128_256, 4096, 132
TARGET, AUXILIARY = 32, 16
"""Layers of Llama-3.1-8B and of Llama-3.2-1B; heads are as many, and narrower."""


@cache
def engine_of(role: str, layers: int, fused: bool) -> TorchEngine:
    """A Llama of random weights, on the GPU that computes nothing."""
    mode, gpu = fake_gpu()
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 16, "hidden_size": 512}
    config = LlamaConfig(**heads, vocab_size=VOCAB, intermediate_size=1024, num_hidden_layers=layers)
    model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    if fused:
        fuse(model)  # looks at numbers
    move(model)
    with mode, torch.inference_mode():
        spec = EngineSpec("Any", layers, 8, 16, VOCAB, "bfloat16", 1, CAPACITY, (0,), "torch", "", {})
        return TorchEngine(model, spec, "triton", str(gpu), fused)


def counts_of(method: str, layers: tuple[int, int], fused: bool) -> int:
    """Launches of a block of one row, of a pair with so many layers."""
    mode, gpu = fake_gpu()
    target, auxiliary = (engine_of(*given, fused) for given in zip(("target", "auxiliary"), layers, strict=True))
    given = BlockInput([DecodingParams(method=method, draft_len=4)], [(1, 2)], [9], [(0, 0)], [None], [True])
    key = Key.of(given, Buckets(1, CAPACITY, reads_mask=False))
    with mode, torch.inference_mode():
        is_end = torch.empty(VOCAB, dtype=torch.bool, device=gpu)
        block = CapturedBlock(key, auxiliary, target, is_end, Arenas.on(gpu))
        with counted() as counts:
            block()
    return counts.total()


def launches(method: str, fused: bool) -> int:
    """Launches of a block of the pair: each of a model's layers launches the same."""
    one, deep, wide = (counts_of(method, layers, fused) for layers in ((1, 1), (2, 1), (1, 2)))
    return one + (TARGET - 1) * (deep - one) + (AUXILIARY - 1) * (wide - one)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "most"), [("sample", 285), ("speculative", 965), ("mtad", 970), ("mmtad", 1080)])
def test_fused_layers_and_the_kernels_keep_a_blocks_launches_few(
    method: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.runtime.interpreter import InterpreterBuilder

    from tests.support.interpreter import multiply_bfloat16

    monkeypatch.setattr(InterpreterBuilder, "create_dot", multiply_bfloat16)
    monkeypatch.setattr("engines.pytorch.attention.INTERPRETER_PROCESSORS", PROCESSORS)
    monkeypatch.setattr("engines.pytorch.layer_ops.processors", lambda device: 4)  # narrow matrices keep those busy
    ours = launches(method, fused=True)
    assert ours <= most
    assert method != "mtad" or launches(method, fused=False) > 2.4 * ours
