"""Models of random weights, made where they run, and pairs of them. No checkpoint is read but the demo pair's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedModel, PreTrainedTokenizerFast

from engines.base import KV_PAGE, EngineSpec
from engines.graphs.capture import NoRecorder
from engines.pytorch.engine import TorchEngine
from mtad.params import DecodingParams
from runtime import LLM
from runtime.config import RuntimeConfig
from runtime.pair import Pair
from scripts.paths import DEMO

NODES = 64
"""Of the largest draft; rows that pad a batch write as many columns and one more behind the capacity."""

VOCABULARY = 128256
SHAPES: dict[str, dict[str, Any]] = {
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "1B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32},
    "68M": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 2, "num_attention_heads": 12},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4},
    "tinier": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2},
}
"""Llama-3.1-8B, Llama-3.2-1B, JackFram/llama-68m; and two to see on a CPU that all of it works. 8 KV heads and
the vocabulary of Llama 3 in all of the first three, as a pair has one vocabulary: `68M` thus has 250 M parameters."""


def shape(name: str) -> LlamaConfig:
    """The configuration of a shape; no token ends a text."""
    tiny = name in ("tiny", "tinier")
    values = SHAPES[name]
    heads = values["num_attention_heads"]
    return LlamaConfig(
        **values,
        vocab_size=256 if tiny else VOCABULARY,
        num_key_value_heads=heads if name == "68M" else min(8, heads // 2),
        max_position_embeddings=16384,
        tie_word_embeddings=name == "1B",
        rms_norm_eps=1e-5,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


def random_model(config: LlamaConfig, device: str, dtype: torch.dtype, seed: int = 1) -> PreTrainedModel:
    """A model initialised as transformers does for training, on the device: nothing passes through the host."""
    torch.manual_seed(seed)
    with torch.device(device), torch.no_grad():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval()


def demo_model(role: str, device: str, dtype: torch.dtype) -> PreTrainedModel:
    """A model of the trained demo pair."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        DEMO / "pair" / role, dtype=dtype, local_files_only=True
    )
    return model.to(torch.device(device)).eval()


def engine_of(model: PreTrainedModel, rows: int, columns: int, fused: bool = True) -> TorchEngine:
    """The torch engine of a Llama, with a cache of at least `columns` columns; on a GPU, `fused` or its own layers."""
    config, dtype = model.config, str(model.dtype).removeprefix("torch.")
    spec = EngineSpec(
        architecture="LlamaForCausalLM",
        layers=config.num_hidden_layers,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        dtype=dtype,
        rows=rows,
        capacity=-(-columns // KV_PAGE) * KV_PAGE,
        eos_token_ids=(0,),
        format="torch",
        checkpoint_hash="",
        versions={},
        precision=dtype,
    )
    return TorchEngine(model, spec, device=str(model.device), fused=fused)


def bytes_read(model: PreTrainedModel) -> int:
    """Bytes of weights that a step reads: all, but of an embedding that is no head as well only a few rows."""
    every = sum(p.numel() * p.element_size() for p in model.parameters())
    table = model.get_input_embeddings().weight
    head = model.get_output_embeddings().weight
    return int(every if head is table else every - table.numel() * table.element_size())


def cache_bytes(engine: TorchEngine, rows: int, columns: int) -> int:
    """Bytes of keys and values of so many rows and columns."""
    spec = replace(engine.spec, rows=rows, capacity=columns)
    return spec.kv_bytes


def pair_of(engines: Sequence[TorchEngine], tokenizer: PreTrainedTokenizerFast) -> Pair:
    """A pair of opened engines, target and auxiliary."""
    target, auxiliary = engines
    weights = sum(bytes_read(engine.model.model) for engine in (target, auxiliary))
    size = target.spec.vocab_size
    return Pair(target, auxiliary, tokenizer, size, target.spec.eos_token_ids, weights, DecodingParams(), 1)


def demo_tokenizer() -> PreTrainedTokenizerFast:
    """The demo pair's."""
    tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(DEMO / "pair" / "target", local_files_only=True)
    return tokenizer


def word_tokenizer(size: int) -> PreTrainedTokenizerFast:
    """One whose tokens are numbers, for models that have no text."""
    vocabulary = {f"{number} ": number for number in range(size)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="0 ")))


def open_llm(pair: Pair, graphs: bool, record: Sequence[DecodingParams] = ()) -> LLM:
    """The runtime of a pair on the engines' device; blocks of other parameters are recorded when they first come.

    On a CPU, and without graphs, blocks run by the functions of the host.
    """
    recorder = NoRecorder("cpu") if pair.device.type == "cpu" else None
    config = RuntimeConfig(graphs=graphs, prefix_tokens=0)
    return LLM(pair, config, record=record, recorder=recorder)


class MadePair:
    """A pair of random weights whose drafts are accepted as often as one wants.

    The auxiliary is the target's embeddings, first layers, final norm and head, in weights of its own. What the
    target's other layers add to the residual stream (the outputs of attention and of the feed-forward) is scaled by
    `later`, so the nearer that is to 0, the more the two agree; sizes, and so the times, stay those of the shape. The
    head is scaled by 4, so that the target's distributions have the entropy of a few tokens and not of thousands.

    Args:
        name: of the target's shape.
        layers: of the auxiliary.
        device, dtype: of both.

    Attributes:
        target, auxiliary: the models.
        later: the scale, 1 at first.
    """

    def __init__(self, name: str, layers: int, device: str, dtype: torch.dtype) -> None:
        config = shape(name)
        config.tie_word_embeddings = False
        self.target = random_model(config, device, dtype)
        small = LlamaConfig(**{**config.to_dict(), "num_hidden_layers": layers})
        self.auxiliary = random_model(small, device, dtype)
        self.layers, self.later = layers, 1.0
        with torch.no_grad():
            self.target.get_output_embeddings().weight.mul_(4.0)
            theirs = self.target.state_dict()
            for key, weight in self.auxiliary.state_dict().items():
                weight.copy_(theirs[key])

    def scale(self, factor: float) -> None:
        """Multiply `later`; graphs that were recorded see it."""
        self.later *= factor
        with torch.no_grad():
            for layer in self.target.model.layers[self.layers :]:
                layer.self_attn.o_proj.weight.mul_(factor)
                layer.mlp.down_proj.weight.mul_(factor)
