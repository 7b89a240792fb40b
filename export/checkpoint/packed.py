"""Checkpoints whose matrices are packed as integers of 4 bits: AWQ, GPTQ, and `pack-quantized` of compressed-tensors.

They are unpacked one at a time, without the libraries that wrote them. Layouts as in AutoAWQ 0.2.9
(`awq/utils/packing_utils.py`), AutoGPTQ 0.7.1 (`nn_modules/qlinear/qlinear_cuda_old.py`) and compressed-tensors 0.20.0
(`compressors/pack_quantized/`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where AWQ has each of eight neighbours in an int32."""
FORMS = {"awq": ("gemm",), "gptq": ("gptq", "gptq_v2"), "compressed-tensors": ("pack-quantized",)}
"""Methods, with the forms of their files that are known."""


class Packed(NamedTuple):
    """A matrix of unsigned integers: uint8 `numbers` [N, K], `scales` and `zeros` [N, G] of the `groups`, int64 [K]."""

    numbers: Tensor
    scales: Tensor
    zeros: Tensor
    groups: Tensor

    def matrix(self) -> Tensor:
        """What it stands for, float32 [N, K]."""
        return (self.numbers.float() - self.zeros.float()[:, self.groups]) * self.scales.float()[:, self.groups]


class Packing(NamedTuple):
    """How a checkpoint has its matrices.

    Attributes:
        method: one of `FORMS`.
        offset: what is added to stored zero points.
        symmetric: whether there are none, but the middle of the range.
        in_order: whether groups are neighbours; else columns were ordered by the size of activations.
        group: columns of a group; below 1, as the scales say.
    """

    method: str
    offset: int
    symmetric: bool
    in_order: bool
    group: int

    @staticmethod
    def of(described: dict[str, Any]) -> Packing:
        """Of a `quantization_config`.

        Raises:
            ValueError: none that is known here.
        """
        method = str(described.get("quant_method"))
        weights = {"num_bits": described.get("bits"), "symmetric": False, "group_size": described.get("group_size")}
        form = {"awq": described.get("version", "gemm"), "gptq": described.get("checkpoint_format", "gptq")}.get(method)
        if method == "compressed-tensors":
            first, *others = described["config_groups"].values()
            weights, form = first["weights"], described.get("format")
            if described.get("transform_config"):
                form = "transforms"
            if first.get("input_activations") or any(other["weights"] != weights for other in others):
                form = "several schemes, or quantized activations"
        bits = weights["num_bits"]
        rules = (described.get("dynamic") or {}).items()  # of GPTQModel, where -: leaves matrices as they are
        if any(not name.startswith("-:") and rule.get("bits", bits) != bits for name, rule in rules):
            form = "several widths"
        ordered = described.get("desc_act") or weights.get("actorder") not in (None, False, "weight", "static")
        if form not in FORMS.get(method, ()) or bits != 4:
            known = ", ".join(f"{name} ({' or '.join(forms)})" for name, forms in FORMS.items())
            raise ValueError(f"{method} ({form}, {bits} bits); readable are {known}, of 4 bits")
        group = weights.get("group_size") or -1
        return Packing(method, int(form == "gptq"), bool(weights["symmetric"]), not ordered, group)

    @property
    def suffix(self) -> str:
        """What stands for `weight` in the name of a packed matrix."""
        return "weight_packed" if self.method == "compressed-tensors" else "qweight"

    def read(self, get: Callable[[str], Tensor]) -> Packed:
        """A matrix; `get` gives a part of it by what its name ends in."""
        if self.method == "compressed-tensors":
            (rows, columns), scales = get("weight_shape").tolist(), get("weight_scale")
            numbers = _numbers(get("weight_packed"))[:, :columns]
            middle = torch.full(scales.shape, 8, dtype=torch.uint8)
            zeros = middle if self.symmetric else _numbers(get("weight_zero_point").T).T[:rows]
        else:
            numbers, zeros, scales = get("qweight"), _numbers(get("qzeros")), get("scales").T
            if self.method == "awq":
                numbers, zeros = (x.reshape(len(x), -1, 8)[..., ORDER].flatten(1) for x in (_numbers(numbers), zeros))
            numbers = numbers.T if self.method == "awq" else _numbers(numbers.T)
            zeros = zeros.T + self.offset & 15
        if self.in_order and self.method != "gptq":  # whose files say it
            size = self.group if self.group > 0 else -(-numbers.shape[1] // scales.shape[1])
            groups = torch.arange(numbers.shape[1]) // size
            if groups[-1] + 1 != scales.shape[1]:
                raise ValueError(f"{scales.shape[1]} scales for groups of {size} of {numbers.shape[1]} columns")
        else:
            groups = get("weight_g_idx" if self.method == "compressed-tensors" else "g_idx").long()
        return Packed(numbers, scales, zeros, groups)


def _numbers(words: Tensor) -> Tensor:
    """Uint8 [A, 8 B] of int32 [A, B]; the lowest bits come first."""
    return (words[:, :, None] >> torch.arange(0, 32, 4) & 15).flatten(1).to(torch.uint8)
