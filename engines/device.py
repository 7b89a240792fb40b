"""Where a pair runs: the check of a device's name, before anything is loaded."""

from __future__ import annotations

import torch

from mtad.errors import InvalidInput


def check_device(device: str) -> str:
    """The device by the name that torch gives it, `cpu`, `cuda:0`, ..; a GPU without a number is the current one.

    Raises:
        InvalidInput: not the name of a CPU or of a CUDA GPU, or there is no such GPU.
    """
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise InvalidInput("device", device, "give cpu, cuda, or cuda:1") from None
    if found.type not in ("cpu", "cuda"):
        raise InvalidInput("device", device, "give cpu, cuda, or cuda:1")
    if found.type == "cpu":
        return "cpu"
    if not torch.cuda.is_available():
        why = "was built without CUDA" if torch.version.cuda is None else "finds no GPU (nvidia-smi shows them)"
        raise InvalidInput("device", device, f"torch {torch.__version__} {why}; give cpu, or install what is missing")
    count = torch.cuda.device_count()
    if found.index is not None and found.index >= count:
        raise InvalidInput("device", device, f"there are {count} GPUs, cuda:0 to cuda:{count - 1}")
    return f"cuda:{torch.cuda.current_device() if found.index is None else found.index}"
