"""Mixtures of experts on a GPU: how their products are computed; on a CPU, by the same functions of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

from engines.pytorch import experts
from engines.pytorch.experts import ON_GPU
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
