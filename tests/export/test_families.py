"""Model families through the one hook: exact on every engine, or refused by name. Checkpoints are random and tiny."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BloomConfig,
    GlmConfig,
    GraniteConfig,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    PretrainedConfig,
)

from engines.folder import open_engine
from engines.placement import Placement
from export.options import ExportOptions
from export.pair import export_pair
from export.verification.verify import TOLERANCE, expect, verify
from mtad.errors import InvalidInput, VerificationFailed
from tests.support.families import FAMILIES, GROUPED, LONGROPE, MULTI_HEAD, WINDOW, shallow, write_model
from tests.support.folders import change_json
from tests.support.steps import alone_and_together, make_step, more_tokens, some_tokens


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory, traced_once: None) -> Callable[[str], Path]:
    """The checkpoint of a family."""
    return functools.cache(lambda family: write_model(tmp_path_factory.mktemp(family) / "target", shallow(family)))


@pytest.fixture(scope="module")
def exported(sources: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """A family, exported to a format; decoding knows of it nothing but an engine's logits."""

    @functools.cache
    def export(family: str, format: str) -> Path:
        folder = tmp_path_factory.mktemp("pairs") / f"{family}-{format}"
        export_pair(folder, ExportOptions(str(sources(family)), rows=4, capacity=256, format=format))
        return folder

    return export


OPENVINO_REFUSES = {"gemma-2": "caps its attention scores", "gemma-3": "sliding window", "mistral": "sliding window"}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_ragged_rows_have_the_checkpoints_logits_on_every_engine_or_openvino_refuses_the_family_by_name(
    family: str,
    exported: Callable[[str, str], Path],
    sources: Callable[[str], Path],
    exact_engines: Callable[..., tuple[Placement, str]],
) -> None:
    folder, placement = exported(family, "onnx") / "target", Placement(provider="openvino", compute="float32")
    engines = [open_engine(folder), open_engine(exported(family, "torch") / "target")]
    if family in OPENVINO_REFUSES:
        with pytest.raises(InvalidInput, match=OPENVINO_REFUSES[family]):
            open_engine(folder, placement)
        chosen, why = exact_engines(replace(placement, provider=None), {folder: engines[0].spec})
        assert (chosen.provider, OPENVINO_REFUSES[family] in why) == ("cpu", True)
    else:
        engines.append(open_engine(folder, placement))
    reference = AutoModelForCausalLM.from_pretrained(
        sources(family), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    expected = expect(reference, engines[0].spec)
    assert all(verify(engine, expected) <= TOLERANCE["float32"] for engine in engines)


SCALES = {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2, "logits_scaling": 2.0}
ONE: dict[str, Any] = {**GROUPED, "num_hidden_layers": 1}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
VARIANTS: dict[str, PretrainedConfig] = {
    "dynamic positions": LlamaConfig(**ONE, rope_scaling={"rope_type": "dynamic", "factor": 4.0}),
    "yarn": LlamaConfig(**ONE, rope_scaling=YARN),
    "a part rotates": GlmConfig(**ONE, head_dim=16, partial_rotary_factor=0.5),
    "scales": GraniteConfig(**ONE, **SCALES),
    "experts in float16": MixtralConfig(**ONE, num_local_experts=4),
}
"""What `FAMILIES` has not; of them all have padded embeddings, two capped scores or logits, others `longrope` and
`llama3`."""


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_positions_scales_and_embeddings_of_every_kind_pass_an_exports_check(variant: str, tmp_path: Path) -> None:
    source = str(write_model(tmp_path / "checkpoint", VARIANTS[variant]))
    precision = "float16" if "float16" in variant else "float32"
    assert export_pair(tmp_path / "pair", ExportOptions(source, rows=3, capacity=256, precision=precision))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_rows_bits_do_not_depend_on_the_batch(family: str, exported: Callable[[str, str], Path]) -> None:
    for alone, whole in alone_and_together(open_engine(exported(family, "onnx") / "target")):
        assert torch.equal(alone, whole)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_norms_rotations_and_attention_are_operators(family: str, exported: Callable[[str, str], Path]) -> None:
    graph = onnx.load(exported(family, "onnx") / "target" / "model.onnx", load_external_data=False)
    kinds = {node.op_type for node in graph.graph.node}
    assert {node.domain for node in graph.graph.node} == {""}
    learned = family.startswith(("opt", "gpt-2"))
    assert ("RotaryEmbedding" in kinds) != learned
    assert ("LayerNormalization" if family in MULTI_HEAD else "RMSNormalization") in kinds
    assert {"Attention", "TensorScatter"} <= kinds
    assert not kinds & {"ReduceMean", "Sqrt", "Rsqrt", "Softmax"}


@pytest.mark.slow
def test_what_lies_behind_the_window_has_no_influence(exported: Callable[[str, str], Path]) -> None:
    engine = open_engine(exported("mistral", "onnx") / "target")
    length = 100
    engine.step(make_step(some_tokens(0, length)[None], [0], keep=[]))
    step = make_step(more_tokens(1, 1), [length])
    first = engine.step(step)
    engine.cache.kv[:, :, 0, :, : length - WINDOW + 1] += 1.0
    assert torch.equal(engine.step(step), first)
    engine.cache.kv[:, :, 0, :, length - WINDOW + 1] += 1.0
    assert not torch.equal(engine.step(step), first)


class TestRefusal:
    @staticmethod
    def export(folder: Path, config: PretrainedConfig, capacity: int = 256) -> Path:
        source = str(write_model(folder / "checkpoint", config))
        export_pair(folder / "pair", ExportOptions(source, source, rows=2, capacity=capacity, format="torch"))
        return folder / "pair"

    def test_a_window_narrower_than_a_draft_may_be_deep(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidInput, match="sliding window of 63"):
            self.export(tmp_path, MistralConfig(**GROUPED, num_hidden_layers=1, sliding_window=63))

    @pytest.mark.parametrize(
        ("config", "most"),
        [
            (FAMILIES["phi-3"](1), 256),
            (Llama4TextConfig(**GROUPED, num_hidden_layers=1, head_dim=16, attention_chunk_size=256), 256),
            (Llama4TextConfig(**GROUPED, num_hidden_layers=1, head_dim=16, floor_scale=256), 255),
        ],
        ids=["phi-3", "llama-4", "sharper"],
    )
    def test_texts_behind_what_a_cache_can_follow(self, config: PretrainedConfig, most: int, tmp_path: Path) -> None:
        with pytest.raises(InvalidInput, match=rf"^capacity .*{most} positions"):
            self.export(tmp_path, config, capacity=384)

    def test_texts_behind_the_border_of_longrope_that_only_the_model_itself_finds(self, tmp_path: Path) -> None:
        config = LlamaConfig(**GROUPED, num_hidden_layers=1)
        folder = write_model(tmp_path / "checkpoint", config)
        changes = {"original_max_position_embeddings": 128, "rope_scaling": LONGROPE, "rope_theta": 1e4}
        change_json(folder / "config.json", **changes)
        with pytest.raises(InvalidInput, match=r"^capacity .*128 positions"):
            export_pair(tmp_path / "pair", ExportOptions(str(folder), str(folder), capacity=384, format="torch"))

    @pytest.mark.parametrize(
        ("config", "words"),
        [
            (BloomConfig(vocab_size=300, hidden_size=64, n_layer=1, n_head=4), "its attention is its own"),
            (MambaConfig(vocab_size=300, hidden_size=64, num_hidden_layers=1), "keep more than keys and values"),
        ],
        ids=["bloom", "mamba"],
    )
    def test_a_model_without_such_a_cache_or_attention(
        self, tmp_path: Path, config: PretrainedConfig, words: str
    ) -> None:
        with pytest.raises(InvalidInput, match=words):
            self.export(tmp_path, config)
        assert not (tmp_path / "pair").exists()

    @pytest.mark.slow
    def test_an_unknown_family_that_computes_something_else_with_the_difference(self, tmp_path: Path) -> None:
        with pytest.raises(VerificationFailed, match=r"differ from the checkpoint's by \d"):
            self.export(tmp_path, StubbornConfig(**GROUPED, num_hidden_layers=1))
        assert not (tmp_path / "pair").exists()

    def test_a_type_that_transformers_does_not_know(self, tmp_path: Path) -> None:
        folder = write_model(tmp_path / "checkpoint", FAMILIES["llama-3"](1))
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": "unheard-of"}))
        with pytest.raises(InvalidInput, match="unheard-of"):
            export_pair(tmp_path / "pair", ExportOptions(str(folder), str(folder)))


class StubbornConfig(LlamaConfig):  # type: ignore[misc]
    model_type = "stubborn"


class StubbornForCausalLM(LlamaForCausalLM):  # type: ignore[misc]
    """A model that counts positions by itself, whatever it is told."""

    config_class = StubbornConfig

    def forward(self, *args: Any, position_ids: torch.Tensor | None = None, **kwargs: Any) -> Any:
        if position_ids is not None:
            position_ids = torch.zeros_like(position_ids) + torch.arange(position_ids.shape[1])
        return super().forward(*args, position_ids=position_ids, **kwargs)


AutoConfig.register("stubborn", StubbornConfig)
AutoModelForCausalLM.register(StubbornConfig, StubbornForCausalLM)
