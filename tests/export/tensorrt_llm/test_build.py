"""`mtad export --to tensorrt-llm`, with a fake of the library: what is built, and what has no kernel and is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engines.folder import read_spec
from engines.tensorrt_plan import Gpu
from export.checkpoint.checkpoint import Checkpoint
from export.checkpoint.find import find
from export.options import ExportOptions
from export.pair import export_pair
from export.tensorrt_llm.build import build_command, plan_for
from mtad import LLM, DecodingParams, RuntimeConfig
from mtad.errors import InvalidInput, VerificationFailed
from tests.support import fake_tensorrt_llm
from tests.support.fake_trtllm_build import HOPPER, install


def test_a_pair_is_built_verified_and_decodes(
    checkpoints: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch)
    options = ExportOptions(*map(str, checkpoints), rows=2, capacity=128, format="tensorrt-llm")
    assert export_pair(tmp_path / "pair", options)
    assert not export_pair(tmp_path / "pair", options), "up to date"
    for role in ("target", "auxiliary"):
        spec = read_spec(tmp_path / "pair" / role)
        assert spec.plan
        assert (spec.format, spec.dtype, spec.plan.gpu) == ("tensorrt-llm", "float16", HOPPER.name)
        assert (spec.plan.decode_rows, spec.plan.decode_tokens) == (2, 65)
        assert {file.name for file in (tmp_path / "pair" / role).iterdir()} >= {"model.engine", "tokenizer.json"}
    llm = LLM(tmp_path / "pair", RuntimeConfig())
    params = DecodingParams(method="mmtad", max_tokens=4, ignore_eos=True, seed=1)
    assert len(llm.generate(["SELECT name"] * 2, params)[1].token_ids) == 4


def test_a_plan_that_computes_something_else_is_not_written(
    checkpoints: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch)
    run = fake_tensorrt_llm.run
    monkeypatch.setattr(fake_tensorrt_llm, "run", lambda *given: run(*given).roll(1, 0))
    options = ExportOptions(*map(str, checkpoints), rows=2, capacity=128, format="tensorrt-llm")
    with pytest.raises(VerificationFailed):
        export_pair(tmp_path / "pair", options)
    assert not list(tmp_path.iterdir())


def changed(checkpoint: Checkpoint, **values: Any) -> Checkpoint:
    """The checkpoint with another configuration."""
    config = SimpleNamespace(**checkpoint.config.to_dict() | values)
    return replace(checkpoint, config=SimpleNamespace(get_text_config=lambda: config))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("spec", "config", "library", "words"),
    [
        ({"architecture": "OPTForCausalLM"}, {}, {}, "architecture OPTForCausalLM is not built"),
        ({"kv_heads": 4}, {"num_attention_heads": 28}, {}, "7 query heads per KV head"),
        ({"kv_heads": 1}, {"num_attention_heads": 64}, {}, "64 query heads per KV head"),
        ({"head_dim": 40}, {}, {}, "of size 40"),
        ({"head_dim": 512}, {}, {}, "of size 512"),
        ({}, {"sliding_window": 128}, {}, "a sliding window of 128"),
        ({}, {}, {"release": "1.4.0rc1"}, "release 1.2.1 builds plans"),
        ({}, {}, {"gpu": None}, "torch finds none"),
        ({}, {}, {"gpu": Gpu("NVIDIA B200", "10.0")}, "compute capability 10.0"),
        ({}, {}, {"gpu": Gpu("NVIDIA T4", "7.5")}, "compute capability 7.5"),
    ],
)
def test_what_the_library_has_no_kernel_for_is_refused(
    spec: dict[str, Any],
    config: dict[str, Any],
    library: dict[str, Any],
    words: str,
    checkpoints: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There, its error would end the process."""
    install(monkeypatch, **library)
    found = find("target", str(checkpoints[0]))
    with pytest.raises(InvalidInput, match=words):
        plan_for(replace(found.spec(2, 256, "float16", "tensorrt-llm"), **spec), changed(found, **config))


def test_the_commands_sizes_have_room_for_what_steps_write(
    checkpoints: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch)
    checkpoint = find("target", str(checkpoints[0]))
    spec = checkpoint.spec(3, 256, "float16", "tensorrt-llm")
    command = build_command(replace(spec, plan=plan_for(spec, checkpoint)), Path("c"), Path("b"))
    given = dict(zip(command[1::2], command[2::2], strict=True))
    assert given["--max_num_tokens"] == str(max(256, 3 * 65))
    assert given["--max_seq_len"] == str(256 + 64)
    assert given["--max_draft_len"] == "64"
