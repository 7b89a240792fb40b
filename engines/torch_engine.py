"""Torch engine: the Hugging Face model itself, through the same hook. The numerical reference."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from engines.base import Engine, EngineSpec, Step
from engines.hook import StepModel, scatter_in_place


class TorchEngine(Engine):
    """Runs eagerly on the CPU; the cache is written in place.

    Args:
        source: a folder with the checkpoint, or the model.
        spec: its specification.

    Attributes:
        model: what runs, with the checkpoint's own model inside.
    """

    model: StepModel

    def __init__(self, source: Path | PreTrainedModel, spec: EngineSpec) -> None:
        super().__init__(spec)
        if isinstance(source, Path):
            source = AutoModelForCausalLM.from_pretrained(source, dtype=spec.torch_dtype, local_files_only=True)
        self.model = StepModel(source, scatter_in_place)

    @torch.inference_mode()
    def step(self, step: Step) -> Tensor:
        """See `Engine.step`."""
        rows = slice(step.first_row, step.first_row + step.tokens.shape[0])
        layers = range(self.spec.layers)
        keys = [self.kv[layer, 0, rows] for layer in layers]
        values = [self.kv[layer, 1, rows] for layer in layers]
        logits: Tensor
        logits, _, _ = self.model(step.tokens, step.positions, step.mask, step.write_at, step.keep, keys, values)
        return logits
