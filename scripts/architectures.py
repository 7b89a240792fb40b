"""Which architectures of the installed transformers export: each is tried with tiny random weights.

    python -m scripts.architectures                     all of `TRIED`, to docs/results/architectures.json
    python -m scripts.architectures qwen3_moe gpt_oss   these alone, and the others stay as they are there
    python -m scripts.architectures --experts           how fast mixtures of experts are beside PyTorch, printed

One is exported to ONNX and compared with its checkpoint on chains and trees, decodes a token tree, and is compared on
OpenVINO. `python -m scripts.results docs/support.md` makes the table.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig

from engines.base import Step
from engines.folder import open_model, write_json, write_spec
from engines.placement import Placement
from engines.pytorch.hook import set_arithmetic
from engines.quiet import quiet_transformers
from export.engine import write_engine
from export.options import ExportOptions
from export.plan import plan_pair
from export.verification.verify import expect, verify
from mtad import LLM, DecodingParams, RuntimeConfig
from mtad.errors import Failed, InvalidInput
from runtime.commands.entry import Parser, command
from scripts.paths import DEMO, RESULTS
from scripts.results import Rows, save

_NAMES = """
llama mistral ministral ministral3 qwen2 qwen3 gemma gemma2 gemma3_text gemma3n_text gemma4_text phi phi3 opt gpt2
gpt_neo gpt_neox gptj gpt_bigcode codegen falcon bloom mpt granite granite_swa olmo olmo2 olmo3 cohere cohere2 smollm3
stablelm starcoder2 glm glm4 exaone4 ernie4_5 seed_oss apertus arcee bitnet helium hunyuan_v1_dense nemotron nanochat
persimmon vaultgemma xglm diffllama jais2 hyperclovax cwm modernbert-decoder minicpm3 qwen2_moe qwen3_moe mixtral
olmoe phimoe granitemoe gpt_oss llama4_text glm4_moe glm4_moe_lite deepseek_v2 deepseek_v3 deepseek_v32 dots1
ernie4_5_moe hunyuan_v1_moe exaone_moe flex_olmo minimax_m2 mimo_v2_flash solar_open afmoe longcat_flash
cohere2_moe minimax qwen3_next qwen3_5_text qwen3_5_moe_text lfm2 lfm2_moe falcon_h1 granitemoehybrid nemotron_h jamba
bamba zamba2 kimi_linear olmo_hybrid recurrent_gemma mamba mamba2 falcon_mamba rwkv
"""
TRIED = tuple(_NAMES.split())
"""Model types, as config.json has them."""

_SIZES = {
    ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "moe_k", "moe_topk", "top_k_experts"): 2,
    ("num_experts_per_tok", "num_key_value_heads"): 2,
    ("num_attention_heads", "n_head", "n_heads", "num_heads"): 4,
    ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"): 8,
    ("qk_rope_head_dim", "rotary_dim"): 8,
    ("head_dim", "qk_nope_head_dim", "v_head_dim", "kv_lora_rank", "hidden_size_per_layer_input"): 16,
    ("q_lora_rank", "moe_intermediate_size", "shared_expert_intermediate_size"): 32,
    ("hidden_size", "n_embd", "d_model", "n_embed", "word_embed_proj_dim", "sliding_window"): 64,
    ("intermediate_size", "ffn_dim", "n_inner"): 96,
    ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"): 512,
    ("vocab_size", "vocab_size_per_layer_input"): 2048,
    ("eos_token_id", "bos_token_id", "pad_token_id"): 0,
    ("n_group", "topk_group", "first_k_dense_replace"): 1,
}
SIZES = {name: value for names, value in _SIZES.items() for name in names}
"""Of every configuration that has such a field."""
_OWN: dict[tuple[str, ...], dict[str, Any]] = {
    ("minicpm3", "glm4_moe_lite", "deepseek_v2", "deepseek_v3", "deepseek_v32", "longcat_flash"): {
        "head_dim": 8,
        "num_key_value_heads": 4,
    },
    ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "granitemoehybrid", "kimi_linear"): {
        "layer_types": ["linear_attention", "full_attention"]
    },
    ("lfm2", "lfm2_moe"): {"layer_types": ["conv", "full_attention"]},
    ("jamba", "bamba", "recurrent_gemma"): {"num_hidden_layers": 4},
    ("gpt_neo",): {"attention_types": [[["global", "local"], 1]], "window_size": 64},
    ("gemma3n_text",): {"num_kv_shared_layers": 0, "layer_types": ["sliding_attention", "full_attention"]},
    ("dots1",): {"n_shared_experts": 1},
    ("mamba2",): {"num_heads": 8},
    ("phimoe",): {"sliding_window": None},
    ("zamba2",): {"layers_block_type": ["mamba", "hybrid"]},
}
OWN = {kind: values for kinds, values in _OWN.items() for kind in kinds}
"""Fields of one type, over `SIZES`."""


EXPERTS = {"mixtral": {"num_local_experts": 8}, "qwen3_moe": {"num_experts": 64, "num_experts_per_tok": 8}}
"""Mixtures that are timed: few large experts, and many small ones."""


PLACEMENTS = {"state": Placement(), "openvino": Placement(provider="openvino", compute="float32")}
"""Where logits are compared with those of the checkpoint as transformers loads it."""


def tiny(kind: str, **changes: int) -> PretrainedConfig:
    """A configuration of a model type with a few small layers."""
    own = CONFIG_MAPPING[kind]
    fields = {field.name for field in dataclasses.fields(own)}
    return own(**{name: value for name, value in {**SIZES, **changes}.items() if name in fields} | OWN.get(kind, {}))


def write_checkpoint(folder: Path, config: PretrainedConfig) -> Path:
    """Random weights for a configuration, with the demo's tokenizer. Biases, norms and stored buffers do something."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.add_(0.2 * torch.randn(tensor.shape))
        logits = model(torch.arange(64).reshape(2, 32), use_cache=False).logits
        model.get_output_embeddings().weight.mul_(2.5 / logits.std())  # neither flat nor certain
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(DEMO / "pair" / "target").save_pretrained(folder)
    return folder


def attempt(kind: str, folder: Path) -> dict[str, str]:
    """What becomes of an architecture: its name, `verified` or the reason why not, and the same of OpenVINO."""
    config = tiny(kind)
    source = str(write_checkpoint(folder / "checkpoint", config))
    found = {"architecture": AutoModelForCausalLM._model_mapping[type(config)].__name__}
    pair, state = folder / "pair", "verified"
    try:
        plan = plan_pair(ExportOptions(source, source, rows=4, capacity=256))
        checkpoint, spec, tokenizer = plan.engines[0]
        (pair / "target").mkdir(parents=True)
        write_engine(pair / "target", checkpoint, spec, tokenizer, lambda stage: None)
    except (InvalidInput, Failed) as error:
        return {**found, "state": _reason(error, found["architecture"])}
    write_spec(pair / "target", spec)
    shutil.copytree(pair / "target", pair / "auxiliary")
    write_json(pair / "pair.json", plan.description)
    llm = LLM(pair, RuntimeConfig(threads=1, provider="cpu"))
    prompt = list(range(3, 90))
    alone, tree = (
        llm.generate([prompt], DecodingParams(method=method, max_tokens=16, temperature=0.0, ignore_eos=True))[0]
        for method in ("sample", "traversal")
    )
    if alone.token_ids != tree.token_ids or not tree.statistics.accepted:
        state = "a tree decodes to other tokens than single steps"
    reference = checkpoint.load(torch.float32)
    set_arithmetic(reference, "eager", "eager")
    expected, states = expect(reference, spec), {"state": state}
    for name, placement in PLACEMENTS.items():
        try:
            verify(open_model(pair / "target", spec, placement), expected)
            states.setdefault(name, "verified")
        except (InvalidInput, Failed) as error:
            states[name] = _reason(error, spec.architecture)
    return {**found, **states}


def time_experts(kind: str, changes: Mapping[str, int], folder: Path) -> None:
    """Print how long steps take on ONNX Runtime relative to transformers' own loop over experts, measured in turn."""
    wide = {"num_hidden_layers": 4, "hidden_size": 128, "intermediate_size": 512, "moe_intermediate_size": 128}
    source = str(write_checkpoint(folder / "checkpoint", tiny(kind, **{**wide, **changes})))
    checkpoint, spec, tokenizer = plan_pair(ExportOptions(source, rows=1, capacity=512)).engines[0]
    (folder / "target").mkdir()
    write_engine(folder / "target", checkpoint, spec, tokenizer, lambda stage: None)
    engine, reference = open_model(folder / "target", spec, Placement()), checkpoint.load(torch.float32)
    set_arithmetic(reference, "sdpa", "eager")
    for length in (1, 4, 16, 64, 256):
        step = Step.causal(torch.randint(2048, (1, length)), 0, spec.capacity, torch.tensor([length - 1]))
        ratios = []
        for _ in range(9):
            began = time.perf_counter()
            engine.step(step)
            between = time.perf_counter()
            reference(step.tokens, use_cache=False, logits_to_keep=1)
            ratios.append((between - began) / (time.perf_counter() - between))
        ratios = sorted(ratios[1:])
        print(f"{kind}, {length} tokens: {median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})", flush=True)


def _reason(error: Exception, architecture: str) -> str:
    """The first line of what an error says, or its summary, without what is this model's alone."""
    text = error.problem if isinstance(error, InvalidInput) else str(error)
    before, _, summary = text.partition("## Exception summary\n\n")
    if summary:  # of torch's exporter
        text = f"{before.split(':')[0]}: {summary}"
    text = text.splitlines()[0].partition(" : [num_users=")[0]  # the rest is the node of the traced graph
    text = text.replace(architecture, "it").removesuffix(", or give provider cpu")
    return text.removesuffix("; the engine was not written")[:200]


def tables(figures: Mapping[str, Any]) -> dict[str, Rows]:
    """Architectures by what becomes of them."""
    groups: dict[tuple[str, str], list[str]] = {}
    for one in figures["architectures"].values():
        groups.setdefault((one["state"], one.get("openvino", "-")), []).append(one["architecture"])
    rows = [("ONNX Runtime", "OpenVINO", "architectures")]
    for (state, openvino), names in sorted(groups.items(), key=lambda item: (item[0][0] != "verified", item[0])):
        refused = openvino not in ("verified", "-") and not openvino.startswith("logits")
        own = f"refused: {openvino}" if refused else openvino
        short = ", ".join(sorted({name.removesuffix("ForCausalLM") for name in names}))
        rows.append((state if state == "verified" else f"refused: {state}", own, short))
    return {"architectures": rows}


@command
def main() -> None:
    own = Parser(prog="scripts.architectures", description=(__doc__ or "").splitlines()[0])
    own.add_argument("types", nargs="*", metavar="TYPE", choices=[[], *TRIED], help="of models (default: all)")
    own.add_argument("--experts", action="store_true", help="time mixtures of experts, and print that alone")
    options = own.parse_args()
    quiet_transformers()
    torch.set_num_threads(1)
    if options.experts:
        for kind, changes in EXPERTS.items():
            with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
                time_experts(kind, changes, Path(folder))
        return
    path, figures = RESULTS / "architectures.json", dict[str, dict[str, str]]()
    if options.types and path.exists():
        figures = json.loads(path.read_text(encoding="utf-8"))["figures"]["architectures"]
    for kind in options.types or TRIED:
        with tempfile.TemporaryDirectory() as folder:
            figures[kind] = attempt(kind, Path(folder))
        print(kind, figures[kind], flush=True)
        save(path, "scripts.architectures", {"transformers": transformers.__version__, "architectures": figures})


if __name__ == "__main__":
    main()
