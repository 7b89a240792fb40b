"""What a block does on a GPU, on tensors that hold nothing: no devices are mixed, and the host asks for no number."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

from engines.base import Engine, EngineSpec, Step
from engines.buffers import flatten_tensors
from engines.cache.columns import ColumnCache
from engines.folder import read_spec
from engines.pytorch.engine import TorchEngine
from mtad.methods import METHODS
from mtad.params import DecodingParams
from runtime.decoder.block import BlockInput
from runtime.decoder.buckets import Buckets
from runtime.decoder.cuda_graph.captured_block import Arenas, CapturedBlock, Key
from runtime.decoder.engine_role import EngineRole
from tests.runtime.test_schedules import CAPACITY
from tests.support.fake_gpu import fake_gpu, move
from tests.support.launches import counted
from tests.support.mock_engine import VOCAB, mock_spec


class OneDevice(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operations on tensors of two devices. One of the host without dimensions may be copied, with a wait."""

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        devices = {tensor.device.type for tensor in flatten_tensors((args, kwargs or {}))}
        assert len(devices) < 2, f"{operation} of tensors of {devices}"
        return operation(*args, **(kwargs or {}))


def test_a_tensor_of_the_host_without_dimensions_is_not_overlooked() -> None:
    mode, gpu = fake_gpu()
    with mode, OneDevice():  # type: ignore[no-untyped-call]
        given = torch.ones(3, device=gpu)
        torch.where(given > 0, given, 0.0)
        with pytest.raises(AssertionError, match="tensors of"):
            torch.where(given > 0, given, torch.tensor(0.0))


class Blank(Engine):
    """A step without work."""

    capturable = True

    def step(self, step: Step) -> Tensor:
        given = step.tokens, step.positions, step.write_at, step.mask, step.keep
        assert {tensor.device for tensor in given} == {self.device}
        return torch.zeros(len(step.tokens), len(step.keep), self.spec.vocab_size, device=self.device)


@pytest.mark.parametrize(
    "method",
    [
        name if name == "mtad" else pytest.param(name, marks=pytest.mark.slow)
        for name, method in METHODS.items()
        if method.captured and name not in ("sample", "speculative", "block")  # which give the block of mtad
    ],
)
def test_a_block_on_a_gpu_mixes_no_devices_and_asks_it_for_nothing(method: str) -> None:
    mode, gpu = fake_gpu()
    params = [DecodingParams(method=method, seed=1), DecodingParams(method="mtad"), DecodingParams(method="block")]
    given = BlockInput(params, [(1, 2)] * 3, [9] * 3, [(0, 0)] * 3, [None] * 3, [True] * 3)
    key = Key.of(given, Buckets(4, CAPACITY))
    with mode, OneDevice(), counted() as counts, torch.inference_mode():  # type: ignore[no-untyped-call]
        auxiliary, target = (
            Blank(mock_spec(4, CAPACITY), ColumnCache(mock_spec(4, CAPACITY), "gpu:0")) for _ in range(2)
        )
        is_end = torch.empty(VOCAB, dtype=torch.bool, device=gpu)
        block = CapturedBlock(key, auxiliary, target, is_end, Arenas.on(gpu))
        block()
        assert {tensor.device for tensor in flatten_tensors(block.results)} == {gpu}
        with pytest.raises(DataDependentOutputException):
            block.results.lengths.tolist()
    assert counts["draw_level"] == key.levels
    assert counts["settle_tables"] == key.levels + 1


def test_a_prompt_is_sent_to_a_gpu_without_a_wait() -> None:
    sent: list[bool] = []

    class Sent(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if operation is torch.ops.aten._to_copy.default:
                sent.append(kwargs["non_blocking"])
            return operation(*args, **(kwargs or {}))

    mode, _ = fake_gpu()
    with mode:
        role = EngineRole(Blank(mock_spec(4, CAPACITY), ColumnCache(mock_spec(4, CAPACITY), "gpu:0")), VOCAB)
        with Sent():  # type: ignore[no-untyped-call]
            role.prefill(2, [3, 4, 5], 0)
    assert sent == [True]


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_a_models_step_on_a_gpu_mixes_no_devices_and_asks_it_for_nothing(family: str) -> None:
    mode, gpu = fake_gpu()
    sizes = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    if family == "llama":
        model: Any = LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=32))
    else:
        model = OPTForCausalLM(OPTConfig(**sizes, ffn_dim=32, word_embed_proj_dim=32))
    spec = EngineSpec("Any", 1, 2, 16, 40, "float32", 4, 128, (0,), "torch", "", {})
    move(model)
    with mode, torch.inference_mode():
        engine = TorchEngine(model, spec, "sdpa", "gpu:0")
        tokens = torch.zeros(4, 3, dtype=torch.int64, device=gpu)
        mask = torch.ones(4, 1, 3, 64, dtype=torch.bool, device=gpu)
        engine.cache.reserve([(0, 3)] * 4)
        logits = engine.enqueue(Step(tokens, tokens, tokens[:, 0], mask, tokens[0, :2]))
    assert logits.device == gpu
    assert logits.shape == (4, 2, 40)


@pytest.mark.parametrize("straight", [True, False])
def test_weights_for_a_gpu_are_read_straight_to_their_device_or_without_accelerate_moved_there(
    straight: bool, pair_folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only device beside the CPU that every torch has is the one that holds nothing."""
    if not straight:
        monkeypatch.setattr("engines.pytorch.engine.find_spec", lambda name: None)
    folder = pair_folders("torch") / "target"
    engine = TorchEngine(folder, read_spec(folder), "sdpa", "meta")
    assert {p.device.type for p in engine.model.parameters()} == {engine.device.type} == {"meta"}
