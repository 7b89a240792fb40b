"""Mixtures of experts on a GPU: how their products are computed; on a CPU, by the same functions of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, PreTrainedModel

from engines.pytorch import experts
from engines.pytorch.experts import ON_GPU
from engines.pytorch.hook import set_arithmetic
from engines.pytorch.masked_attention import NAME
from tests.support.families import GROUPED


@pytest.mark.parametrize(("tokens", "expected"), [(2, "batched_mm"), (3, "grouped_mm")])
def test_weights_are_gathered_only_while_they_are_no_more_than_there_are(
    tokens: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = MixtralForCausalLM(MixtralConfig(**GROUPED, num_hidden_layers=2, num_local_experts=4)).eval()
    called = list[str]()
    for name in ("batched_mm", "grouped_mm"):
        own = getattr(experts, f"{name}_experts_forward")

        def counted(*given: Any, own: Any = own, name: str = name) -> Any:
            called.append(name)
            return own(*given)

        monkeypatch.setattr(experts, f"{name}_experts_forward", counted)
    with torch.no_grad():
        given = torch.arange(3, 3 + tokens)[None]
        model.set_experts_implementation("eager")
        plain = model(given).logits
        model.set_experts_implementation(ON_GPU)
        torch.testing.assert_close(model(given).logits, plain, rtol=1e-4, atol=1e-5)
    assert called == [expected] * 2, "of both layers"


@pytest.mark.parametrize(("config", "kind"), [(MixtralConfig, MixtralForCausalLM), (LlamaConfig, LlamaForCausalLM)])
def test_versions_of_transformers_that_refuse_unknown_names_of_any_model_run_ours(
    config: Any, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(model: PreTrainedModel, requested: str) -> str:
        """As modeling_utils.py of 5.5.4 does."""
        if requested not in ("eager", "grouped_mm", "batched_mm", "deepgemm"):
            raise ValueError(f'Specified `experts_implementation="{requested}"` is not supported.')
        return requested

    model = kind(config(**GROUPED, num_hidden_layers=1))
    monkeypatch.setattr(PreTrainedModel, "get_correct_experts_implementation", refuse)
    set_arithmetic(model, NAME, ON_GPU)
    used = {module.config._experts_implementation for module in model.modules() if hasattr(module, "config")}
    assert used == {ON_GPU}
