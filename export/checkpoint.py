"""Reading Hugging Face checkpoints: a local folder or a hub id."""

from __future__ import annotations

import hashlib
import json
import platform
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from engines.base import BLOCK, DTYPES, EngineSpec
from mtad.errors import InvalidInput

ARCHITECTURES = ("LlamaForCausalLM",)
"""Checkpoints that export is tested with."""
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "max_position_embeddings")
"""What `config.json` must say."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was found and may be exported.

    Attributes:
        name: which option it came from, `target` or `auxiliary`; for messages.
        folder: where its files are.
        config: its `config.json`.
        digest: sha256 over configuration and weights.
    """

    name: str
    folder: Path
    config: dict[str, Any]
    digest: str

    @property
    def positions(self) -> int:
        """Longest sequence the model was made for, in tokens."""
        return int(self.config["max_position_embeddings"])

    def load(self, dtype: str) -> PreTrainedModel:
        """The model on the CPU.

        Raises:
            InvalidInput: the weights are damaged or not all there.
        """
        try:
            model, found = AutoModelForCausalLM.from_pretrained(
                self.folder, dtype=DTYPES[dtype], local_files_only=True, output_loading_info=True
            )
        except Exception as error:  # transformers and safetensors have many for damaged files
            raise InvalidInput(self.name, str(self.folder), f"its weights cannot be loaded: {error}") from error
        if found["missing_keys"]:  # transformers would go on with random ones
            missing = sorted(found["missing_keys"])
            raise InvalidInput(self.name, str(self.folder), f"{len(missing)} weights are missing, such as {missing[0]}")
        return model.eval()

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The checkpoint's tokenizer."""
        try:
            return AutoTokenizer.from_pretrained(self.folder, local_files_only=True)
        except Exception as error:  # transformers and tokenizers have many for damaged files
            raise InvalidInput(self.name, str(self.folder), f"its tokenizer cannot be loaded: {error}") from error

    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a text: of generation_config.json if it has them, else of config.json."""
        path = self.folder / "generation_config.json"
        try:
            values = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
            found = values.get("eos_token_id", self.config.get("eos_token_id"))
            return tuple(map(int, found)) if isinstance(found, list) else () if found is None else (int(found),)
        except (ValueError, TypeError, AttributeError):
            raise InvalidInput(self.name, str(path), "its eos_token_id is neither an integer nor a list") from None

    def spec(self, rows: int, capacity: int, dtype: str, format: str) -> EngineSpec:
        """The engine this checkpoint becomes."""
        if capacity > self.positions:
            problem = f"the {self.name} has {self.positions} positions; give at most {self.positions // BLOCK * BLOCK}"
            raise InvalidInput("capacity", capacity, problem)
        c = self.config
        heads = int(c["num_attention_heads"])
        return EngineSpec(
            architecture=c["architectures"][0],
            layers=int(c["num_hidden_layers"]),
            kv_heads=int(c.get("num_key_value_heads") or heads),
            head_dim=int(c.get("head_dim") or c["hidden_size"] // heads),
            vocab_size=int(c["vocab_size"]),
            dtype=dtype,
            rows=rows,
            capacity=capacity,
            eos_token_ids=self.eos_token_ids(),
            format=format,
            checkpoint_hash=self.digest,
            versions={
                "python": platform.python_version(),
                **{name: version(name) for name in ("mtad", "torch", "transformers", "onnx", "onnxscript")},
            },
        )


def find(name: str, source: str) -> Checkpoint:
    """Find a checkpoint and check that it can be exported; no weights are read into memory.

    Args:
        name: the option's name, for messages.
        source: a local folder, or a hub id such as `meta-llama/Llama-3.2-1B`, which is downloaded.

    Raises:
        InvalidInput: not there, incomplete, or of an architecture that is not supported.
    """
    folder = Path(source)
    if not folder.is_dir():
        folder = _download(name, source)
    path = folder / "config.json"
    if not path.is_file():
        raise InvalidInput(name, source, "the folder has no config.json; give a Hugging Face checkpoint")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        architecture = config["architectures"][0]
        if architecture in ARCHITECTURES:
            for size in SIZES:
                int(config[size])
    except (ValueError, KeyError, IndexError, TypeError):
        raise InvalidInput(name, source, "its config.json is not that of a Hugging Face model") from None
    if architecture not in ARCHITECTURES:
        raise InvalidInput(
            name, source, f"architecture {architecture} is not supported; use {', '.join(ARCHITECTURES)}"
        )
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise InvalidInput(name, source, "the folder has no *.safetensors weights")
    digest = hashlib.sha256()
    for file in [path, *weights]:
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return Checkpoint(name, folder, config, digest.hexdigest())


def _download(name: str, source: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    if source.count("/") != 1 or source.startswith((".", "/", "~")):
        raise InvalidInput(name, source, "no such folder, and not a hub id of the form owner/name")
    try:
        patterns = ["*.json", "*.safetensors", "tokenizer*", "*.model", "*.jinja"]
        return Path(snapshot_download(source, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InvalidInput(name, source, f"no such folder, and the hub did not give it: {reason}") from None
