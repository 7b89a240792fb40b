"""Inflated copies: the same outputs at the cost of more parameters."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts.demo import inflate
from tests.support.checkpoints import make_checkpoint


def test_a_copy_computes_the_same_with_more_parameters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for role in ("target", "auxiliary"):
        make_checkpoint(tmp_path / "small" / role, seed=1)
    monkeypatch.setattr(inflate, "SIZES", {"larger": (500_000, 300_000)})
    monkeypatch.setattr(sys, "argv", ["inflate", "larger", str(tmp_path / "large"), "--pair", str(tmp_path / "small")])
    inflate.main()
    source, copy = tmp_path / "small" / "target", tmp_path / "large" / "target"
    small, large = (AutoModelForCausalLM.from_pretrained(path) for path in (source, copy))
    assert 500_000 <= large.num_parameters() < 530_000
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        theirs, ours = small(ids).logits, large(ids).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert theirs.std() > 1, "logits that say nothing would be equal anyway"
    added = large.model.layers[0].mlp.up_proj.weight[small.config.intermediate_size :]
    assert added.std() > 0.01, "zeros could be skipped"
    vocabularies = [AutoTokenizer.from_pretrained(path).get_vocab() for path in (source, copy)]
    assert vocabularies[0] == vocabularies[1]
