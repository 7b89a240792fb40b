"""Stages about what is there: the machine, and ONNX Runtime's GPU providers."""

from __future__ import annotations

import tempfile
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from engines import Placement, open_engine
from engines.placement import versions
from mtad.errors import InvalidInput
from scripts.gpu.correct import causal
from scripts.gpu.models import demo_model, engine_of
from scripts.gpu.report import Found, Skip
from scripts.gpu.setup import Setup
from scripts.paths import DEMO

PACKAGES = (
    *("torch", "transformers", "triton", "accelerate", "onnxruntime", "onnxruntime-gpu", "nvidia-ml-py", "zeus"),
    *("llguidance", "tokenizers", "numpy", "onnx", "onnxscript"),
)
"""That a run depends on, or does without."""


def environment(setup: Setup, found: Found) -> None:
    """Packages, and the GPU as torch sees it."""
    found.note(packages=versions(*PACKAGES), meter=setup.meter.name)
    if setup.on_gpu:
        found.note(gpu=gpu(setup.device))


def gpu(device: str) -> dict[str, Any]:
    """A GPU's facts. Not executed."""
    facts = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    return {
        "name": facts.name,
        "compute_capability": f"{facts.major}.{facts.minor}",
        "processors": facts.multi_processor_count,
        "memory_bytes": total,
        "free_bytes": free,
        "l2_bytes": facts.L2_cache_size,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
    }


def onnxruntime(setup: Setup, found: Found) -> None:
    """A model of the demo pair exported for ONNX Runtime: its logits against torch's, and times."""
    for module in ("onnxruntime", "onnx", "onnxscript"):
        if find_spec(module) is None:
            raise Skip(f"{module} is not installed")
    from engines.folder import write_spec
    from engines.onnx.providers import check_cuda
    from export.checkpoint.checkpoint import find
    from export.onnx.graph import write_graph

    try:
        check_cuda()
    except InvalidInput as refused:
        raise Skip(str(refused)) from None
    role = "auxiliary" if setup.sizes.few else "target"
    checkpoint = find(role, str(DEMO / "pair" / role))
    theirs = engine_of(demo_model(role, setup.device, torch.float32), 3, 128)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        spec = checkpoint.spec(3, 128, "float32", "onnx")
        write_graph(checkpoint.empty("float32"), checkpoint.weights(), spec, folder / "model.onnx")
        write_spec(folder, spec)
        try:
            ours = open_engine(folder, Placement(setup.device))
        except InvalidInput as refused:
            raise Skip(str(refused)) from None
        largest = 0.0
        tokens = torch.randint(spec.vocab_size, (3, 40), generator=torch.Generator().manual_seed(1))
        for row, length in enumerate((30, 7, 19)):
            for engine in (ours, theirs):
                engine.step(causal(tokens[row : row + 1, :length], [0], setup.device, first_row=row))
        for turn in range(3):
            step = causal(tokens[:, 30:35], [30 + turn, 7 + turn, 19 + turn], setup.device)
            a, b = ours.step(step).double(), theirs.step(step).double()
            largest = max(largest, float((a - b).abs().max() / b.std()))
        found.check("logits against torch", largest, 1e-3, "standard deviations")
        times = setup.timer.measure(partial(ours.step, step), 20)
        found.row(step_ms=times.median, quartiles_ms=f"{times.low:.3f} .. {times.high:.3f}")
