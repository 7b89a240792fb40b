"""Torch engine: the Hugging Face model itself, through the same hook. The numerical reference, and a GPU engine."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from engines.base import Engine, EngineSpec, Step
from engines.cache.paged import PageCache
from engines.placement import Placement
from engines.pytorch.attention import require
from engines.pytorch.experts import ON_GPU
from engines.pytorch.fusion import fuse
from engines.pytorch.hook import StepModel, freeze_rope
from engines.pytorch.masked_attention import KERNEL, NAME


def open_torch(folder: Path, spec: EngineSpec, placement: Placement) -> TorchEngine:
    """Open a checkpoint. On a CPU, torch's number of threads is the engine's from then on."""
    if not placement.on_gpu:
        torch.set_num_threads(placement.threads)
    return TorchEngine(folder, spec, placement.attention, placement.device)


class TorchEngine(Engine):
    """Runs the model's own operations; the cache is written in place.

    On a GPU a step launches kernels and waits for none of them, so it can be captured as part of a block
    (`runtime.decoder.cuda_graph`), unless the model itself asks the device for a number: a mixture of experts that
    looks at what its router chose is found out when it is to be captured.

    Args:
        source: a folder with the checkpoint, or the model.
        device: torch's name of where weights and cache lie. On a GPU, weights are read from the files straight to it if
            the package accelerate is there, else by way of the host's memory.
        attention: one of `engines.pytorch.attention.ATTENTION` that can run; default: `triton` on a GPU, else `sdpa`.
        fused: with our attention, replace the model's own operations by fewer (`engines.pytorch.fusion`).

    Attributes:
        model: what runs, with the checkpoint's own model inside.
    """

    capturable = True
    cache: PageCache
    model: StepModel

    def __init__(
        self,
        source: Path | PreTrainedModel,
        spec: EngineSpec,
        attention: str | None = None,
        device: str = "cpu",
        fused: bool = True,
    ) -> None:
        super().__init__(spec, PageCache(spec, device))
        attention = attention or ("triton" if self.device.type == "cuda" else "sdpa")
        require(attention, self.device, spec.head_dim)
        if isinstance(source, Path):
            source = _load(source, spec.torch_dtype, device)
        if source.device != self.device:
            source = source.to(self.device)
        self.reads_mask = self.cache.reads_mask = attention != "triton"
        freeze_rope(source)
        if fused and attention == "triton":
            fuse(source)
        experts = "eager" if self.device.type == "cpu" else ON_GPU
        self.model = StepModel(source, KERNEL if attention == "triton" else NAME, experts)

    def step(self, step: Step) -> Tensor:
        self.cache.reserve(step.spans, step.first_row)
        return self.enqueue(step)

    @torch.inference_mode()
    def enqueue(self, step: Step) -> Tensor:
        page_table = self.cache.page_table[step.first_row : step.first_row + step.tokens.shape[0]]
        return self.model.paged(step, self.cache.kv, page_table)


def _load(folder: Path, dtype: torch.dtype, device: str) -> PreTrainedModel:
    options: dict[str, Any] = {}
    if torch.device(device).type != "cpu" and find_spec("accelerate"):  # else by way of the host's memory
        options["device_map"] = {"": torch.device(device)}
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, local_files_only=True, trust_remote_code=False, **options
    )
    return model
