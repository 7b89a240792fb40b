"""Pairs that are made where they run: the demo pair, and pairs of random weights with the shape of real ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, PreTrainedTokenizerFast

from engines.base import INPUTS, KV_PAGE, Engine, EngineSpec, Step
from engines.capture import Recorder
from engines.pytorch.engine import TorchEngine
from mtad import LLM
from mtad.params import DecodingParams
from runtime.config import RuntimeConfig
from runtime.pair import ROLES, Pair, open_tokenizer
from scripts.paths import DEMO

SHAPES: dict[str, tuple[float, dict[str, Any]]] = {
    "8B": (24.0, {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}),
    "1B": (6.0, {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}),
    "tiny": (0.0, {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}),
}
"""Gigabytes that a pair takes in bfloat16, and its target's sizes: those of Llama 3, and some for a quick look."""
AUXILIARY_LAYERS, ACCEPTED = 2, 0.7
"""Of a random pair: layers of its auxiliary, and the probability with which a drafted token is accepted, at least."""


def demo_model(role: str) -> PreTrainedModel:
    """A model of the demo pair, on the CPU in float32."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(DEMO / "pair" / role, dtype=torch.float32)
    return model.eval()


def demo_pair(device: str, rows: int = 8, columns: int = 256) -> Pair:
    """The demo pair in float32."""
    engines = [engine_of(demo_model(role).to(torch.device(device)), rows, columns) for role in ROLES]
    return pair_of(engines, open_tokenizer(DEMO / "pair" / "target"))


def random_pair(name: str, device: str, rows: int, columns: int) -> Pair:
    """A pair of random weights whose drafts are accepted about as often as a trained pair's.

    The auxiliary is the target's embeddings, first layers, final norm and head, in weights of its own. What the
    target's other layers add to the residual stream is halved until the two agree. The head is scaled by 4, so that
    distributions have the entropy of a few tokens. Sizes, and so times, are those of the shape.
    """
    tiny, dtype = name == "tiny", torch.bfloat16 if device != "cpu" else torch.float32
    sizes = {**SHAPES[name][1], "vocab_size": 256 if tiny else 128256, "max_position_embeddings": 16384}
    sizes |= {"num_attention_heads": sizes["hidden_size"] // (64 if tiny else 128), "rms_norm_eps": 1e-5}
    target, auxiliary = (
        random_model(LlamaConfig(**sizes, num_key_value_heads=2 if tiny else 8), layers, device, dtype)
        for layers in (sizes["num_hidden_layers"], AUXILIARY_LAYERS)
    )
    weights = target.state_dict()
    with torch.no_grad():
        target.lm_head.weight.mul_(4.0)
        for key, weight in auxiliary.state_dict().items():
            weight.copy_(weights[key])
        tokens = torch.randint(sizes["vocab_size"], (1, 64), device=device)
        while True:
            p, q = (model(input_ids=tokens).logits.float().softmax(-1) for model in (target, auxiliary))
            if float(torch.minimum(p, q).sum(-1).mean()) >= ACCEPTED:
                break
            for layer in target.model.layers[AUXILIARY_LAYERS:]:
                layer.self_attn.o_proj.weight.mul_(0.5)
                layer.mlp.down_proj.weight.mul_(0.5)
    words = {f"{number} ": number for number in range(sizes["vocab_size"])}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="0 ")))
    return pair_of([engine_of(model, rows, columns) for model in (target, auxiliary)], tokenizer)


def small_auxiliary(pair: Pair, columns: int) -> TorchEngine:
    """An engine of one row beside the pair's target, of random weights and the shape of Llama-3.2-1B."""
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": pair.vocab_size}
    sizes = {**SHAPES["1B"][1], **heads, "max_position_embeddings": 16384}
    model = random_model(LlamaConfig(**sizes), 16, str(pair.device), torch.bfloat16)
    return engine_of(model, 1, columns)


def random_model(config: Any, layers: int, device: str, dtype: torch.dtype) -> PreTrainedModel:
    """A model initialised as for training, on the device: nothing passes through the host."""
    torch.manual_seed(1)
    config.num_hidden_layers = layers
    with torch.device(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval()


def engine_of(model: PreTrainedModel, rows: int, columns: int) -> TorchEngine:
    """The PyTorch engine of a model where it is, which changes it; with a cache of at least `columns` columns."""
    config, dtype = model.config, str(model.dtype).removeprefix("torch.")
    shape = config.num_hidden_layers, config.num_key_value_heads, config.head_dim, config.vocab_size
    rows_of = rows, -(-columns // KV_PAGE) * KV_PAGE
    spec = EngineSpec(type(model).__name__, *shape, dtype, *rows_of, (0,), "torch", "", {}, precision=dtype)
    return TorchEngine(model, spec, device=str(model.device))


def pair_of(engines: Sequence[TorchEngine], tokenizer: Any) -> Pair:
    """A pair of opened engines, target and auxiliary."""
    target, auxiliary = engines
    weights = sum(p.numel() * p.element_size() for engine in engines for p in engine.model.parameters())
    return Pair(target, auxiliary, tokenizer, target.spec.vocab_size, (0,), weights, DecodingParams())


def open_llm(pair: Pair, captured: bool) -> LLM:
    """The runtime of a pair, its blocks captured as CUDA graphs or run by the host; on a CPU, always by the host."""
    recorder = Recorder("cpu") if pair.device.type == "cpu" else None
    return LLM(pair, RuntimeConfig(graphs=captured, prefix_tokens=0), record=(), recorder=recorder)


class FromHost(Engine):
    """An engine that is given steps on the host, and gives logits there."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.spec, engine.cache)
        self._engine = engine

    def step(self, step: Step) -> Tensor:
        placed = {name: getattr(step, name).to(self.device) for name in INPUTS}
        return self._engine.step(replace(step, **placed)).cpu()
