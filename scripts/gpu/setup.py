"""What all stages are given."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from engines.graphs.capture import CudaRecorder, NoRecorder, Recorder
from scripts.energy import EnergyMeter
from scripts.gpu.timing import Timer

METHODS = ("sample", "speculative", "mtad", "mmtad")
"""That are timed."""


@dataclass(frozen=True)
class Sizes:
    """How much is done.

    Attributes:
        pairs: (target, auxiliary), names of `scripts.gpu.models.SHAPES`.
        steps: shapes whose steps are timed.
        rows, contexts: of timed steps.
        tokens: of each generated text.
        seconds: of a window of energy; of a step's timing at most.
        copied: bytes of the copy that bandwidth is measured with.
        kept: layers of the auxiliary of a made pair.
        prompt: tokens of a prompt.
        few: fewer texts are compared, and the smaller of the demo pair's models is exported for ONNX Runtime.
    """

    pairs: tuple[tuple[str, str], ...]
    steps: tuple[str, ...]
    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    tokens: int
    seconds: float
    copied: int
    kept: int
    prompt: int
    few: bool = False


SIZES = {
    "full": Sizes((("1B", "68M"), ("8B", "1B")), ("68M", "1B", "8B"), (1, 4, 16), (512, 4096), 128, 3.0, 2**31, 2, 128),
    "tiny": Sizes((("tiny", "tinier"),), ("tinier", "tiny"), (1, 2), (64, 128), 6, 0.05, 2**20, 1, 9, few=True),
}


@dataclass(frozen=True)
class Setup:
    """Where a stage runs, how large, and with what it measures.

    Attributes:
        device: torch's name.
        sizes: see `Sizes`.
        timer: of the device.
        meter: of energy.
    """

    device: str
    sizes: Sizes
    timer: Timer
    meter: EnergyMeter

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return torch.device(self.device).type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        """Of large models: bfloat16 on a GPU."""
        return torch.bfloat16 if self.on_gpu else torch.float32

    def recorder(self) -> Recorder:
        """What records steps: CUDA's, or nothing on a CPU."""
        return CudaRecorder(self.device) if self.on_gpu else NoRecorder(self.device)


@contextmanager
def freed(setup: Setup) -> Iterator[None]:
    """Give memory back to the device behind a stage."""
    try:
        yield
    finally:
        if setup.on_gpu:
            torch.cuda.empty_cache()
