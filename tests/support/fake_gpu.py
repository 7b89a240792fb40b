"""A GPU that computes nothing: torch's fake tensors on a device of their own, in processes without any.

They have shapes, types and a device. Work on them fails where it mixes devices, asks for a value, or makes a shape of
one; so what runs through is work that a CUDA graph can hold, as far as torch's operations go.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch._subclasses import FakeTensorMode
from torch.utils import backend_registration

NAME = "gpu"


@cache
def fake_gpu() -> tuple[FakeTensorMode, torch.device]:
    """The mode in which its tensors are made and used, one for the process, as constants are kept; and its name."""
    backend_registration._setup_privateuseone_for_python_backend(NAME)  # type: ignore[no-untyped-call]
    return FakeTensorMode(), torch.device(NAME, 0)


def move(model: Any) -> None:
    """Put a model's parameters and buffers there."""
    mode, gpu = fake_gpu()
    with mode:
        for module in model.modules():
            for own in (module._parameters, module._buffers):
                for name, tensor in own.items():
                    if tensor is not None:
                        moved = torch.empty(tensor.shape, dtype=tensor.dtype, device=gpu)
                        own[name] = torch.nn.Parameter(moved, False) if own is module._parameters else moved
