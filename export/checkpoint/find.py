"""Finding checkpoints: a local folder, a hub id, a GGUF file, or the folder of a LoRA adapter."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import replace
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path

import torch
import transformers
from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from export.checkpoint.checkpoint import WEIGHTS, Checkpoint, opening
from export.checkpoint.packed import Packing
from export.checkpoint.weights import stored_files
from export.options import ADAPTER, GGUF
from mtad.errors import InvalidInput, first_line, refused_as

SCALES = ("weight_scale", "weight_scale_inv", "weight_scale_2", ".scales", ".SCB", ".absmax")  # endings of names


def find(name: str, source: str, weights: bool = True, revision: str | None = None) -> Checkpoint:
    """Find a checkpoint and check that it can be exported; no weights are read into memory.

    Args:
        source: a local folder, or a hub id such as `meta-llama/Llama-3.2-1B`, which is downloaded.
        weights: without, a hub id's weights are not downloaded, and the digest is empty where they are not there.
        revision: branch, tag or commit of a hub id; by default, its main branch.

    Raises:
        InvalidInput: not there, incomplete, or no causal language model that transformers knows.
    """
    path, size = Path(source), 0
    folder, file = (path.parent, path.name) if path.suffix == GGUF and path.is_file() else (path, None)
    origin = str(path.absolute()) if path.exists() else source
    if not folder.is_dir():
        folder, size = _download(name, source, weights, revision)
    elif revision is not None:
        field = "revision" if name == "target" else f"{name}_revision"
        raise InvalidInput(field, revision, f"{source} is a local folder; leave it out")
    described = folder / (file or "config.json")
    if (folder / ADAPTER).is_file() and not file:
        if any((*folder.glob("model*.safetensors"), *folder.glob("pytorch_model*"))):
            raise InvalidInput(name, source, "it has a LoRA adapter beside a whole model; give a folder of one of them")
        return _adapted(name, source, origin, folder, weights)
    if not described.is_file():
        problem = "the folder has no config.json; give a Hugging Face checkpoint, a GGUF file or a LoRA adapter"
        raise InvalidInput(name, source, problem)
    with refused_as(name, source, "its config.json is damaged or not that of a checkpoint"):
        values = {} if file else json.loads(described.read_text(encoding="utf-8"))
        if not file and (not isinstance(values, dict) or not values.get("architectures")):
            raise InvalidInput(name, source, "its config.json names no architecture; give a Hugging Face checkpoint")
    try:
        config = AutoConfig.from_pretrained(folder, **opening(file))
    except Exception as error:  # configurations check themselves, each in its own way
        problem = f"transformers {transformers.__version__} does not know the model in its {described.name}"
        raise InvalidInput(name, source, f"{problem}: {first_line(error)}") from error
    known = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if file and known is not None:
        config.architectures = [known.__name__]
        with refused_as(name, source, "transformers would read it wrongly"):
            _complete(config, described)
    architecture = values["architectures"][0] if values else known.__name__ if known else described.name
    if known is None or known.__name__.lower() != architecture.lower():
        wanted = f"{config.model_type} has {known.__name__}" if known else f"{config.model_type} has none"
        raise InvalidInput(name, source, f"{architecture} is not a causal language model of its type ({wanted})")
    found = Checkpoint(name, folder, config, "", origin, size, file)
    quantized = None if file else getattr(config, "quantization_config", None)
    if quantized and quantized.get("quant_method") != "mxfp4":  # which transformers unpacks without a GPU
        with refused_as(name, source, "its weights are quantized in a form that cannot be read"):
            found = replace(found, packing=Packing.of(quantized))
        del config.quantization_config
    if size:
        return found
    with refused_as(name, source, "its weights cannot be loaded"):
        scales = [one for one in stored_files(folder) or () if one.endswith(SCALES)]
    if scales and not (quantized or file):
        raise InvalidInput(name, source, f"no quantization_config says how {scales[0]} is used; give it in 16 bits")
    kinds = [file] if file else WEIGHTS
    files = next((files for kind in kinds if (files := sorted(folder.glob(kind)))), None)
    if files is None:
        raise InvalidInput(name, source, "the folder has no weights (*.safetensors or pytorch_model*.bin)")
    return replace(found, digest=digest_of([described, *files]))


def _adapted(name: str, source: str, origin: str, folder: Path, weights: bool) -> Checkpoint:
    """The checkpoint that an adapter was trained on, with the adapter."""
    with refused_as(name, source, f"{ADAPTER} is damaged"):
        trained_on = str(json.loads((folder / ADAPTER).read_text(encoding="utf-8"))["base_model_name_or_path"])
    if find_spec("peft") is None:
        raise InvalidInput(name, source, "a LoRA adapter, which is merged by peft; the extra adapters installs it")
    try:
        base = find(name, trained_on, weights)
    except InvalidInput as error:
        raise InvalidInput(name, source, f"its base_model_name_or_path, {trained_on}: {error.problem}") from None
    own = digest_of([folder / ADAPTER, *sorted(folder.glob("adapter_model.*"))])
    digest = hashlib.sha256(f"{base.digest} {own}".encode()).hexdigest() if base.digest else ""
    return replace(base, source=origin, adapter=folder, digest=digest)


def _complete(config: PretrainedConfig, file: Path) -> None:
    """Add what transformers leaves out of a GGUF file: Llama 3's scaled positions, and the token that ends a turn."""
    from gguf import GGUFReader
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    read, kind = GGUFReader(file), config.model_type
    lost = kind in ("phi3", "stablelm", "starcoder2") or (kind == "gemma2" and config.hidden_size == 4608)
    biased = any(tensor.name.endswith(".bias") for tensor in read.tensors)
    lost |= kind in ("llama", "mistral") and (biased or "llama.attention.head_count_kv" not in read.fields)
    ropes = {tensor.name: torch.tensor(tensor.data) for tensor in read.tensors if tensor.name.startswith("rope_f")}
    scaled = any(key.endswith("rope.scaling.factor") and value.contents() != 1 for key, value in read.fields.items())
    name = "rope_parameters" if hasattr(config, "rope_parameters") else "rope_scaling"  # in transformers 4
    own, scales = getattr(config, name, None) or {}, ropes.pop("rope_freqs.weight", None)
    if scales is not None and "full_attention" not in own:  # as in Gemma 4's, which transformers knows
        plain = LlamaRotaryEmbedding(config).inv_freq
        llama3 = {"rope_type": "llama3", "factor": float(scales.max()), "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        setattr(config, name, {**own, **llama3, "original_max_position_embeddings": 8192})
        scaled |= not torch.allclose(plain / LlamaRotaryEmbedding(config).inv_freq, scales, 1e-4)
    if ropes or scaled or lost:
        problem = "transformers leaves a part of such a file out" if lost else "its rotary positions are scaled"
        raise ValueError(f"{problem}; give the checkpoint in safetensors that it was made of")
    if (end := read.fields.get("tokenizer.ggml.eot_token_id")) and isinstance(config.eos_token_id, int):
        config.eos_token_id = sorted({config.eos_token_id, end.contents()})


def digest_of(files: Iterable[Path]) -> str:
    """Sha256 over the contents of files, in this order; their names do not count."""
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def _download(name: str, source: str, weights: bool, revision: str | None) -> tuple[Path, int]:
    """The folder a hub id was downloaded to, and how many bytes of weights were left there."""
    from huggingface_hub import HfApi, snapshot_download

    with refused_as(name, source, "no such folder, and the hub request failed"):
        common = ["*.json", "tokenizer*", "*.model", "*.txt", "*.jinja"]
        if not weights:
            files = HfApi().model_info(source, revision=revision, files_metadata=True).siblings or []
            own = [f for f in files if "/" not in f.rfilename]
            sizes = [sum(f.size or 0 for f in own if fnmatch(f.rfilename, kind)) for kind in WEIGHTS]
            if not any(sizes):
                raise InvalidInput(name, source, "the hub has no weights of it (*.safetensors or pytorch_model*.bin)")
            return Path(snapshot_download(source, revision=revision, allow_patterns=common)), next(filter(None, sizes))
        for kind in WEIGHTS:
            wanted = [*common, kind]  # but no other copy of the weights, such as original/model.safetensors
            folder = Path(snapshot_download(source, revision=revision, allow_patterns=wanted, ignore_patterns="*/*.s*"))
            if any(folder.glob(kind)):
                break
        return folder, 0
