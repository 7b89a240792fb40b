"""A fake of the half of TensorRT-LLM 1.2 that builds: its signatures, and a plan of `fake_tensorrt_llm`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from engines.base import EngineSpec
from engines.placement import Placement
from engines.tensorrt_llm import engine as ours
from engines.tensorrt_plan import Gpu
from export.tensorrt_llm import build
from tests.support import fake_tensorrt_llm

OPTIONS = {
    *("checkpoint_dir", "output_dir", "max_batch_size", "max_input_len", "max_seq_len", "max_beam_width"),
    *("max_num_tokens", "kv_cache_type", "logits_dtype", "speculative_decoding_mode", "max_draft_len", "gemm_plugin"),
    *("use_paged_context_fmha", "tokens_per_block", "remove_input_padding"),
}
"""Of the options of `trtllm-build` 1.2 (`tensorrt_llm/commands/build.py`), those used here."""
HOPPER = Gpu("NVIDIA H100", "9.0")


class FakeLlama:
    """`tensorrt_llm.models.LLaMAForCausalLM`, of its signatures (`models/llama/model.py`)."""

    def __init__(self, source: str) -> None:
        self.source = source

    @classmethod
    def from_hugging_face(
        cls, hf_model_or_dir: str, dtype: str = "auto", mapping: Any = None, quant_config: Any = None, **kwargs: Any
    ) -> FakeLlama:
        assert kwargs == {"load_model_on_cpu": True}
        return cls(hf_model_or_dir)

    def save_checkpoint(self, output_dir: str, save_config: bool = True) -> None:
        (Path(output_dir) / "config.json").write_text(json.dumps({"source": self.source}))


def fake_build(arguments: list[str], check: bool) -> SimpleNamespace:
    """`trtllm-build`: makes the files it makes, of a checkpoint that is there."""
    values = dict(zip(arguments[1::2], arguments[2::2], strict=True))
    given = {name.removeprefix("--"): value for name, value in values.items()}
    assert given.keys() <= OPTIONS
    assert (given["speculative_decoding_mode"], given["tokens_per_block"]) == ("lookahead_decoding", "64")
    assert (given["kv_cache_type"], given["remove_input_padding"]) == ("paged", "enable")
    assert given["logits_dtype"] in ("float16", "float32"), "its choices"
    source = Path(json.loads((Path(given["checkpoint_dir"]) / "config.json").read_text())["source"])
    folder, draft = Path(given["output_dir"]), int(given["max_draft_len"])
    folder.mkdir()
    sizes = int(given["max_batch_size"]), 1 + draft, int(given["max_num_tokens"]), int(given["max_seq_len"]) + draft
    fake_tensorrt_llm.write_plan(folder, source, *sizes)
    (folder / "model.engine").rename(folder / "rank0.engine")
    return SimpleNamespace(returncode=0)


def install(monkeypatch: pytest.MonkeyPatch, release: str = "1.2.1", gpu: Gpu | None = HOPPER) -> None:
    """The library of a release, on a machine with a GPU whose memory is the host's."""

    def open_on_cpu(folder: Path, spec: EngineSpec, placement: Placement) -> ours.TensorRTLLMEngine:
        engine = ours.TensorRTLLMEngine(folder, spec, fake_tensorrt_llm, "cpu")  # type: ignore[arg-type]
        engine._engine.pool = lambda: engine.cache.kv
        return engine

    models = ModuleType("tensorrt_llm.models")
    models.LLaMAForCausalLM = FakeLlama  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tensorrt_llm", ModuleType("tensorrt_llm"))
    monkeypatch.setitem(sys.modules, "tensorrt_llm.models", models)
    monkeypatch.setattr(build, "versions", lambda name: {name: release} if release else {})
    monkeypatch.setattr(build, "load_runtime", lambda _: fake_tensorrt_llm)
    monkeypatch.setattr(build, "current_gpu", lambda: gpu)
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    monkeypatch.setattr("export.tensorrt_llm.build.subprocess", SimpleNamespace(run=fake_build))
    monkeypatch.setattr(ours, "open_tensorrt_llm", open_on_cpu)
