"""Fused decoder layers: few launches, the checkpoint's logits, no more memory; what is not recognised stays."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PhiConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, apply_rotary_pos_emb

from engines.base import KV_PAGE, Step
from engines.pytorch import layer_ops
from engines.pytorch.fused_layers import AddedLinear, DeferredNorm, Gated, JoinedLinear, Unadded
from engines.pytorch.fusion import fuse
from engines.pytorch.hook import StepModel, cache_shape, run_once
from engines.pytorch.masked_attention import KERNEL, NAME
from engines.pytorch.paged_cache import Rotation
from mtad.errors import InvalidInput
from tests.engines.pytorch.test_layer_ops import HALF, SMALL, TOLERANCE
from tests.support.families import FAMILIES, GROUPED
from tests.support.launches import counted


def random_model(family: str, layers: int, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(FAMILIES[family](layers)).eval().to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def runner(model: PreTrainedModel, attention: str = KERNEL, length: int = 64, steps: int = 3) -> Callable[[], Tensor]:
    """A causal step of two rows over an empty cache of `length` columns, and what gives its logits."""
    layers, heads, dim, _ = cache_shape(AutoModelForCausalLM.from_config(model.config))
    runs = StepModel(model, attention=attention)
    pool = torch.zeros(layers, 2, heads, 2 * length, dim, dtype=model.dtype)
    page_table = torch.arange(2 * length // KV_PAGE, dtype=torch.int32).view(2, -1)
    tokens = torch.randint(300, (2, steps), generator=torch.Generator().manual_seed(1))
    step = Step.causal(tokens, 0, length, torch.arange(steps))
    step = replace(step, mask=torch.nn.functional.pad(step.mask, (0, length - step.mask.shape[3])))

    @torch.inference_mode()
    def run() -> Tensor:
        return runs.paged(step, pool, page_table)

    return run


def logits_of(model: PreTrainedModel, attention: str = KERNEL) -> Tensor:
    return runner(model, attention)()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_launches_at_most_fourteen_kernels(family: str) -> None:
    launches = []
    for layers in (1, 2):
        model = random_model(family, layers)
        fuse(model)
        run = runner(model, length=2048)
        with counted() as counts:
            run()
        launches.append(counts)
    layer = launches[1] - launches[0]
    for outside in ("cos", "sin", "cat"):  # Gemma 3: positions of the second kind of layer, once per step
        if layer[outside]:
            layer.subtract({outside: 1})
    if family == "gemma-3":
        layer.subtract({"mul": 3})
    assert layer["combine_splits"] == 1, "columns are split"
    assert layer.total() <= 14, layer


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of few vectors by our kernel, of matrices as small as the tests'."""
    monkeypatch.setattr(layer_ops, "ADDED_TILES", [SMALL])
    monkeypatch.setattr(layer_ops, "GATED_TILES", [SMALL])
    monkeypatch.setattr(layer_ops, "processors", lambda device: 1)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("family", ["llama-3", "gemma-2"])
def test_few_tokens_take_few_kernels_and_give_the_logits_of_the_checkpoint(family: str) -> None:
    model = random_model(family, 1, HALF)
    expected = logits_of(copy.deepcopy(model), NAME)
    fuse(model)
    run = runner(model)
    with counted() as counts:
        run()
    assert counts["narrow_product"] == (2 if family == "llama-3" else 1)  # Gemma 2 has norms before its additions
    assert not counts["gate"]
    torch.testing.assert_close(run(), expected, rtol=0, atol=TOLERANCE[HALF] * float(expected.abs().max()))


class Reading(torch.nn.Module):
    """Reads what its gated block is given."""

    def __init__(self, block: torch.nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        read: Tensor = self.block(x) + 0.01 * x
        return read


@pytest.mark.parametrize(("read", "deferred"), [(False, 3), (True, 2)])
def test_norms_wait_for_gated_blocks_if_nothing_else_needs_them(read: bool, deferred: int) -> None:
    model = random_model("llama-3", 3)
    if read:  # those of the other layers have another name, as dense layers before a mixture of experts
        model.get_submodule("model.layers.2").mlp = Reading(model.get_submodule("model.layers.2.mlp"))
    expected = logits_of(copy.deepcopy(model), NAME)
    fuse(model)
    assert sum(isinstance(module, DeferredNorm) for module in model.modules()) == deferred
    assert sum(module.norm is not None for module in model.modules() if isinstance(module, Gated)) == deferred
    torch.testing.assert_close(logits_of(model), expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.slow
@pytest.mark.parametrize(("family", "dtype"), [*((family, torch.float32) for family in FAMILIES), ("llama-3", HALF)])
def test_a_fused_model_gives_the_logits_of_its_checkpoint(family: str, dtype: torch.dtype) -> None:
    model = random_model(family, 2, dtype)
    expected = logits_of(copy.deepcopy(model), NAME)
    fuse(model)
    torch.testing.assert_close(logits_of(model), expected, rtol=0, atol=TOLERANCE[dtype] * float(expected.abs().max()))


def test_a_stream_that_is_read_after_an_addition_is_not_added_to_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = modeling_llama.LlamaDecoderLayer.forward
    model = random_model("llama-3", 2)
    fuse(model)
    assert sum(isinstance(module, AddedLinear) for module in model.modules()) == 4

    def forward(self: Any, hidden_states: Tensor, *given: Any, **named: Any) -> Any:
        return plain(self, hidden_states, *given, **named) + 0.01 * hidden_states

    monkeypatch.setattr(modeling_llama.LlamaDecoderLayer, "forward", forward)
    model = random_model("llama-3", 2)
    fuse(model)
    kinds = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, AddedLinear)}
    assert kinds <= {"down", "down_proj"}


def test_a_stream_of_another_type_is_added_to_out_of_place() -> None:
    stream, weight = torch.ones(3, 4), torch.ones(4, 2, dtype=torch.bfloat16)
    added = stream + Unadded(torch.ones(3, 2, dtype=torch.bfloat16), weight, tried=False)  # type: ignore[operator]
    assert added.tolist() == [[3.0] * 4] * 3
    assert added.dtype == stream.dtype == torch.float32


def test_joined_weights_take_the_memory_of_the_separate_ones() -> None:
    model = random_model("qwen2", 2)
    before = sum(parameter.numel() for parameter in model.parameters())
    fuse(model)
    assert sum(isinstance(module, JoinedLinear) for module in model.modules()) == 4
    assert sum(parameter.numel() for parameter in model.parameters()) == before


def test_other_models_of_the_family_keep_their_own_functions() -> None:
    fused, other = random_model("llama-3", 1), random_model("llama-3", 1)
    before = logits_of(other, NAME)
    fuse(fused)
    assert torch.equal(logits_of(other, NAME), before)
    assert not hasattr(other, "rotation")


def test_rotary_positions_of_another_kind_stay_the_models_own(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = modeling_llama.apply_rotary_pos_emb
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda q, k, *angle: theirs(q.flip(-1), k, *angle))
    assert_unrotated(random_model("llama-3", 1))


def test_queries_that_are_put_together_after_turning_stay_the_models_own() -> None:
    """Phi turns half of each head, and puts the halves together itself."""
    torch.manual_seed(0)
    assert_unrotated(AutoModelForCausalLM.from_config(PhiConfig(**GROUPED, num_hidden_layers=1)).eval())


class Leaking(Qwen3Attention):  # type: ignore[misc]
    """Its output depends on its normed queries in yet another way."""

    def forward(
        self, hidden_states: Tensor, position_embeddings: Any, attention_mask: Any, past_key_values: Any, **more: Any
    ) -> tuple[Tensor, None]:
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        normed = self.q_norm(self.q_proj(hidden_states).view(shape))
        key, value = (layer(hidden_states).view(shape) for layer in (self.k_proj, self.v_proj))
        rotated = apply_rotary_pos_emb(normed.transpose(1, 2), self.k_norm(key).transpose(1, 2), *position_embeddings)
        held = past_key_values.update(rotated[1], value.transpose(1, 2), self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        out, _ = attend(self, rotated[0], *held, attention_mask, scaling=self.scaling, **more)
        return self.o_proj(out.flatten(2)) + normed.mean(), None


@pytest.mark.parametrize("leaks", [False, True])
def test_norms_of_queries_and_keys_wait_for_the_kernel_if_nothing_else_needs_them(leaks: bool) -> None:
    model = random_model("qwen3", 1)
    if leaks:
        model.get_submodule("model.layers.0.self_attn").__class__ = Leaking
    expected = logits_of(copy.deepcopy(model), NAME)
    fuse(model)
    assert hasattr(model, "rotation")
    attention = model.get_submodule("model.layers.0.self_attn")
    assert sum(isinstance(module, DeferredNorm) for module in attention.modules()) == (0 if leaks else 2)
    torch.testing.assert_close(logits_of(model), expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def assert_unrotated(model: PreTrainedModel) -> None:
    """Rotary positions stay the model's own, and it gives the same logits."""
    expected = logits_of(copy.deepcopy(model), NAME)
    fuse(model)
    assert not hasattr(model, "rotation")
    torch.testing.assert_close(logits_of(model), expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def test_a_model_that_changes_what_is_still_to_be_rotated_is_refused() -> None:
    rotation, x, angle = Rotation(), torch.ones(1, 1, 2, 16), torch.ones(1, 2, 16)
    query, key = rotation(x, x.clone(), angle, angle)
    with pytest.raises(InvalidInput, match="changes its keys"):
        rotation.take_pending(key + 1)
    rotation.query = query, query
    with pytest.raises(InvalidInput, match="changes its queries"):
        rotation.rotated_query(query + 1)


def test_a_fused_model_never_runs_outside_its_engine() -> None:
    """Its attention would be given queries and keys without positions."""
    model = random_model("llama-3", 2)
    fuse(model)
    fuse(model)  # nothing happens
    for one in (model, copy.deepcopy(model)):
        with pytest.raises(InvalidInput, match="runs in its engine only"):
            run_once(one, NAME)
    assert logits_of(model).isfinite().all(), "a step after one that broke off"
