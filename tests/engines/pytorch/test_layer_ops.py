"""What a fused layer launches: norms, gates and products of few vectors give what torch's operations do."""

from __future__ import annotations

import pytest
import torch

from engines.pytorch import layer_ops
from engines.pytorch.fused_layers import ACTIVATIONS
from engines.pytorch.layer_ops import Norm, ProductTile, gate, narrow_product, product_tile, rms_norm

HALF = torch.bfloat16
TOLERANCE = {torch.float32: 1e-5, HALF: 2e-2}
SMALL = ProductTile(32, 16, 4, 2)
"""For matrices as small as the tests'."""


@pytest.mark.parametrize(
    ("activation", "normed"), [("", False), *((name, normed) for name in ACTIVATIONS for normed in (False, True))]
)
def test_few_vectors_times_a_matrix_are_torchs(activation: str, normed: bool) -> None:
    x, weight = torch.randn(2, 3, 96).to(HALF), (0.1 * torch.randn(64 if activation else 32, 96)).to(HALF)
    norm = Norm(torch.randn(96).to(HALF), 1e-5, 1.0) if normed else None
    before = torch.randn(2, 3, 32).to(HALF)
    given = torch.nn.functional.rms_norm(x.double(), (96,), norm.weight.double() + 1.0, 1e-5) if norm else x.double()
    expected = before.double() + given @ weight.double().t() if not activation else None
    if expected is None:
        values, factor = (given @ weight.double().t()).chunk(2, -1)
        expected = ACTIVATIONS[activation](values) * factor
    ours = narrow_product(x, weight, before.clone(), SMALL, activation, norm)
    bound = TOLERANCE[HALF] * float(expected.abs().max())
    torch.testing.assert_close(ours.double(), expected, rtol=0, atol=bound)


@pytest.mark.parametrize(
    ("dtype", "vectors", "inputs", "outputs", "chosen"),
    [
        (HALF, 16, 4096, 4096, 32),
        (HALF, 17, 4096, 4096, None),
        (torch.float16, 5, 4096, 4096, None),
        (HALF, 5, 4096 + 128, 8192, None),
        (HALF, 5, 4096, 4096 + 8, None),
        (HALF, 5, 2048, 2048, 16),
        (HALF, 5, 1024, 1024, None),
        (HALF, 5, 14336, 4096, None),
    ],
)
def test_few_bfloat16_vectors_have_a_product_of_their_own_with_matrices_that_keep_a_gpu_busy(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, vectors: int, inputs: int, outputs: int, chosen: int | None
) -> None:
    monkeypatch.setattr(layer_ops, "processors", lambda device: 132)
    x, weight = torch.empty(1, vectors, inputs, dtype=dtype), torch.empty(outputs, inputs, dtype=dtype, device="meta")
    tile = product_tile(x, weight, gated=False)
    assert (tile and tile.outputs) == chosen
    assert product_tile(x, weight.t().contiguous().t(), gated=False) is None
    assert product_tile(x, weight.float(), gated=False) is None
    monkeypatch.setattr(layer_ops, "shared_memory", lambda device: 48 * 1024)
    assert product_tile(x, weight, gated=False) is None


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_norms_of_strided_vectors_are_torchs(dtype: torch.dtype, offset: float) -> None:
    x = torch.randn(2, 3, 4, 100).to(dtype).transpose(1, 2)[..., 10:90]
    weight = torch.randn(80).to(dtype)
    expected = torch.nn.functional.rms_norm(x.double(), (80,), weight.double() + offset, 1e-5)
    ours = rms_norm(x, weight, 1e-5, offset)
    assert ours.is_contiguous()
    torch.testing.assert_close(ours.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    torch.testing.assert_close(rms_norm(x[0, 0], weight, 1e-5, offset), ours[0, 0], rtol=0, atol=0)


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_gates_are_torchs(dtype: torch.dtype, name: str) -> None:
    x = (3 * torch.randn(2, 2, 2200)).to(dtype)
    x[0, 0, 0], x[0, 0, 1] = 90.0, -90.0
    values, factor = x.double().chunk(2, -1)
    expected = ACTIVATIONS[name](values) * factor
    torch.testing.assert_close(gate(x, name).double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
