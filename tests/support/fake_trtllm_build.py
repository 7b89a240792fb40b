"""A fake of the half of TensorRT-LLM 1.2 that builds: recorded signatures, and the files that are made."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

OPTIONS = {
    *("checkpoint_dir", "output_dir", "max_batch_size", "max_input_len", "max_seq_len", "max_beam_width"),
    *("max_num_tokens", "kv_cache_type", "workers", "logits_dtype", "speculative_decoding_mode", "max_draft_len"),
    *("gemm_plugin", "use_paged_context_fmha", "tokens_per_block"),
}
"""Of the options of `trtllm-build` 1.2 (`tensorrt_llm/commands/build.py`), those used here."""

MODEL = {
    "from_hugging_face": "(hf_model_or_dir, dtype='auto', mapping=None, quant_config=None, **kwargs)",
    "quantize": "(hf_model_dir, output_dir, dtype='auto', mapping=None, quant_config=None, *, device='cuda', "
    "calib_dataset='cnn_dailymail', calib_batches=512, calib_batch_size=1, calib_max_seq_length=512, random_seed=1234, "
    "tokenizer_max_seq_length=2048, **kwargs)",
}
"""Signatures of `tensorrt_llm.models.LLaMAForCausalLM`'s class methods (`tensorrt_llm/models/llama/model.py`)."""


class FakeLlama:
    """`tensorrt_llm.models.LLaMAForCausalLM`, of the recorded signatures; notes how it was called."""

    calls: list[dict[str, Any]] = []  # noqa: RUF012

    def __init__(self, rank: int) -> None:
        self.rank = rank

    @classmethod
    def from_hugging_face(
        cls, hf_model_or_dir: str, dtype: str = "auto", mapping: Any = None, quant_config: Any = None, **kwargs: Any
    ) -> FakeLlama:
        cls.calls.append({"dtype": dtype, "mapping": mapping, **kwargs})
        assert Path(hf_model_or_dir).is_dir()
        return cls(mapping.rank)

    @classmethod
    def quantize(
        cls,
        hf_model_dir: str,
        output_dir: str,
        dtype: str = "auto",
        mapping: Any = None,
        quant_config: Any = None,
        *,
        device: str = "cuda",
        calib_dataset: str = "cnn_dailymail",
        calib_batches: int = 512,
        calib_batch_size: int = 1,
        calib_max_seq_length: int = 512,
        random_seed: int = 1234,
        tokenizer_max_seq_length: int = 2048,
        **kwargs: Any,
    ) -> None:
        assert not kwargs
        cls.calls.append({"dtype": dtype, "mapping": mapping, "quant": quant_config, "data": calib_dataset})
        Path(output_dir).mkdir(parents=True)
        (Path(output_dir) / "config.json").write_text("{}")

    def save_checkpoint(self, output_dir: str, save_config: bool = True) -> None:
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        if save_config:
            (Path(output_dir) / "config.json").write_text("{}")
        (Path(output_dir) / f"rank{self.rank}.safetensors").write_text("")


def fake_build(arguments: list[str], cwd: Path, check: bool) -> SimpleNamespace:
    """`trtllm-build`: makes the files it makes, of a checkpoint that is there."""
    assert not check
    values = dict(zip(arguments[1::2], arguments[2::2], strict=True))
    assert {name.removeprefix("--") for name in values} <= OPTIONS
    assert (cwd / values["--checkpoint_dir"] / "config.json").is_file()
    folder = cwd / values["--output_dir"]
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    for rank in range(int(values["--workers"])):
        (folder / f"rank{rank}.engine").write_text("")
    return SimpleNamespace(returncode=0)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake of the library's building half."""
    FakeLlama.calls.clear()

    def module(name: str, **values: Any) -> None:
        made = ModuleType(name)
        made.__dict__.update(values)
        monkeypatch.setitem(sys.modules, name, made)

    def mapping(world_size: int = 1, rank: int = 0, tp_size: int = 1) -> SimpleNamespace:
        return SimpleNamespace(world_size=world_size, rank=rank, tp_size=tp_size)

    module("tensorrt_llm", Mapping=mapping)
    module("tensorrt_llm.models", LLaMAForCausalLM=FakeLlama)
    module("tensorrt_llm.models.modeling_utils", QuantConfig=SimpleNamespace)
    module("tensorrt_llm.quantization", QuantAlgo={"FP8": "FP8", "W4A16_AWQ": "W4A16_AWQ"})
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
