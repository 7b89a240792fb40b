"""Reading Hugging Face checkpoints: a local folder or a hub id.

There is no list of architectures. A checkpoint of any causal language model that transformers knows is tried: its shape
is found by running it once without weights through the hook, its engine is compared with it before it is kept.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from engines.base import DTYPES, KV_PAGE, EngineSpec
from engines.kinds import PRECISIONS
from engines.placement import versions
from engines.pytorch.hook import cache_shape
from engines.quiet import quiet
from export.checkpoint.weights import Weights, empty_model, model_weights, stored_dtype, stored_weights
from mtad.errors import InvalidInput, first_line, refused_as
from mtad.params import SAMPLING, DecodingParams

log = logging.getLogger(__name__)

WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
"""Files with weights; the first kind that is there is read."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was found and may be exported.

    Attributes:
        name: which option it came from, `target` or `auxiliary`; for messages.
        digest: sha256 over configuration and weights.
        source: where it was found: an absolute folder, or a hub id.
        download: bytes of weights that are still on the hub; 0 if they are here.
    """

    name: str
    folder: Path
    config: PretrainedConfig
    digest: str
    source: str
    download: int = 0

    @property
    def size(self) -> int:
        """Bytes of its weights, as they are stored."""
        return sum(file.stat().st_size for kind in WEIGHTS for file in self.folder.glob(kind))

    @property
    def positions(self) -> int | None:
        """Longest sequence one engine may hold, in tokens; None if the model sets no limit.

        Some rotary embeddings turn keys otherwise once a text is longer than the model was first trained on
        ("longrope"). Keys that are already in a cache cannot follow, so such an engine ends there.
        """
        text = self.config.get_text_config()
        most = getattr(text, "max_position_embeddings", None)
        rotary = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
        for kind in (rotary, *(v for v in rotary.values() if isinstance(v, dict))):
            if "longrope" in (kind.get("rope_type"), kind.get("type")):
                most = kind.get(
                    "original_max_position_embeddings", getattr(text, "original_max_position_embeddings", most)
                )
        return most

    def load(self, dtype: torch.dtype) -> PreTrainedModel:
        """The model on the CPU.

        Raises:
            InvalidInput: the weights are damaged or not all there.
        """
        with refused_as(self.name, str(self.folder), "its weights cannot be loaded"):
            model, found = AutoModelForCausalLM.from_pretrained(
                self.folder, dtype=dtype, local_files_only=True, trust_remote_code=False, output_loading_info=True
            )
        if found["missing_keys"]:  # transformers would go on with random ones
            missing = sorted(found["missing_keys"])
            raise InvalidInput(self.name, str(self.folder), f"{len(missing)} weights are missing, such as {missing[0]}")
        return model.eval()

    def empty(self, dtype: str) -> PreTrainedModel:
        """The model without weights; see `export.checkpoint.weights.empty_model`."""
        return empty_model(self.config, DTYPES[dtype])

    def weights(self) -> Weights:
        """Its weights as they are stored: one at a time where the files allow it, else from memory.

        Raises:
            InvalidInput: they are damaged or not all there.
        """
        with refused_as(self.name, str(self.folder), "its weights cannot be loaded"):
            found = stored_weights(self.folder, self.empty("float32"))
        if found is not None:
            return found
        loaded = self.load(stored_dtype(self.folder))
        log.warning("%s: transformers converts these weights while it loads them, all at once", self.name)
        return model_weights(loaded)

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer in its folder.

        Raises:
            InvalidInput: it cannot be loaded.
        """
        with refused_as(self.name, str(self.folder), "its tokenizer cannot be loaded"):
            return AutoTokenizer.from_pretrained(self.folder, local_files_only=True, trust_remote_code=False)

    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a text: of generation_config.json if it has them, else of config.json."""
        found = self._generation.get("eos_token_id", self.config.get_text_config().eos_token_id)
        with refused_as(self.name, str(self.folder), "its eos_token_id is neither an integer nor a list"):
            return tuple(map(int, found)) if isinstance(found, list) else () if found is None else (int(found),)

    def defaults(self, own: Mapping[str, object]) -> dict[str, object]:
        """Default decoding parameters of a pair of which this is the target.

        Args:
            own: the owner's, usable ones, over the `SAMPLING` of generation_config.json.

        Raises:
            InvalidInput: what that file recommends is not usable.
        """
        advised = {name: self._generation[name] for name in SAMPLING if self._generation.get(name) is not None}
        found = {**advised, **own}
        try:
            checked = asdict(DecodingParams.from_dict(dict(found)))
        except InvalidInput as error:
            problem = f"its generation_config.json has an unusable {error}; --defaults can replace it"
            raise InvalidInput(self.name, self.source, problem) from None
        return {name: checked[name] for name in found}

    @cached_property
    def _generation(self) -> dict[str, Any]:
        """What generation_config.json says; nothing where there is none."""
        path = self.folder / "generation_config.json"
        with refused_as(self.name, str(path), "not a JSON object"):
            return {**json.loads(path.read_text(encoding="utf-8"))} if path.is_file() else {}

    def spec(self, rows: int, capacity: int, precision: str, format: str) -> EngineSpec:
        """The engine this checkpoint becomes.

        Raises:
            InvalidInput: the model is of a kind that cannot become one, or has fewer positions than `capacity`.
        """
        if self.positions is not None and capacity > self.positions:
            most = self.positions // KV_PAGE * KV_PAGE
            problem = f"the {self.name} has {self.positions} positions; give at most {most}"
            raise InvalidInput("capacity", capacity, problem)
        window = getattr(self.config.get_text_config(), "sliding_window", None)
        if window is not None and window < KV_PAGE:  # of which drafts are never deeper
            problem = f"its sliding window of {window} is below the minimum, {KV_PAGE}"
            raise InvalidInput(self.name, str(self.folder), problem)
        layers, kv_heads, head_dim, vocab_size = self._shape()
        return EngineSpec(
            architecture=self.config.architectures[0],
            layers=layers,
            kv_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=vocab_size,
            dtype=PRECISIONS[precision],
            precision=precision,
            rows=rows,
            capacity=capacity,
            eos_token_ids=self.eos_token_ids(),
            format=format,
            checkpoint_hash=self.digest,
            versions={
                "python": platform.python_version(),
                **versions("mtad", "torch", "transformers", "onnx", "onnxscript"),
            },
            source=self.source,
        )

    def _shape(self) -> tuple[int, int, int, int]:
        """`cache_shape` of the model, without its weights."""
        problem = f"{self.config.architectures[0]} does not run with an explicit cache, mask and positions"
        with refused_as(self.name, str(self.folder), problem), quiet(), FakeTensorMode():
            config = copy.deepcopy(self.config)
            return cache_shape(AutoModelForCausalLM.from_config(config, trust_remote_code=False))


def find(name: str, source: str, weights: bool = True, revision: str | None = None) -> Checkpoint:
    """Find a checkpoint and check that it can be exported; no weights are read into memory.

    Args:
        source: a local folder, or a hub id such as `meta-llama/Llama-3.2-1B`, which is downloaded.
        weights: without, a hub id's weights are not downloaded, and the digest is empty where they are not there.
        revision: branch, tag or commit of a hub id; by default, its main branch.

    Raises:
        InvalidInput: not there, incomplete, or no causal language model that transformers knows.
    """
    folder, size = Path(source), 0
    origin = str(folder.absolute()) if folder.is_dir() else source
    if not folder.is_dir():
        folder, size = _download(name, source, weights, revision)
    elif revision is not None:
        field = "revision" if name == "target" else f"{name}_revision"
        raise InvalidInput(field, revision, f"{source} is a local folder; leave it out")
    path = folder / "config.json"
    if not path.is_file():
        raise InvalidInput(name, source, "the folder has no config.json; give a Hugging Face checkpoint")
    with refused_as(name, source, "its config.json is damaged or not that of a checkpoint"):
        values = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(values, dict) or not values.get("architectures"):
            raise InvalidInput(name, source, "its config.json names no architecture; give a Hugging Face checkpoint")
        architecture = values["architectures"][0]
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # configurations check themselves, each in its own way
        problem = f"transformers {transformers.__version__} does not know the model in its config.json"
        problem += f": {first_line(error)}"
        raise InvalidInput(name, source, problem) from error
    known = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if known is None or known.__name__ != architecture:
        wanted = f"{config.model_type} has {known.__name__}" if known else f"{config.model_type} has none"
        raise InvalidInput(name, source, f"{architecture} is not a causal language model of its type ({wanted})")
    files = next((files for kind in WEIGHTS if (files := sorted(folder.glob(kind)))), None)
    if size:
        return Checkpoint(name, folder, config, "", origin, size)
    if files is None:
        raise InvalidInput(name, source, f"the folder has no weights ({' or '.join(WEIGHTS)})")
    digest = hashlib.sha256()
    for file in [path, *files]:
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return Checkpoint(name, folder, config, digest.hexdigest(), origin)


def _download(name: str, source: str, weights: bool, revision: str | None) -> tuple[Path, int]:
    """The folder a hub id was downloaded to, and how many bytes of weights were left there."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        common = ["*.json", "tokenizer*", "*.model", "*.txt", "*.jinja"]
        if not weights:
            files = HfApi().model_info(source, revision=revision, files_metadata=True).siblings or []
            sizes = [sum(f.size or 0 for f in files if fnmatch(f.rfilename, kind)) for kind in WEIGHTS]
            if not any(sizes):
                raise InvalidInput(name, source, f"the hub has no weights of it ({' or '.join(WEIGHTS)})")
            return Path(snapshot_download(source, revision=revision, allow_patterns=common)), next(filter(None, sizes))
        for kind in WEIGHTS:
            folder = Path(snapshot_download(source, revision=revision, allow_patterns=[*common, kind]))
            if any(folder.glob(kind)):
                break
        return folder, 0
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        problem = f"no such folder, and the hub request failed: {first_line(error)}"
        raise InvalidInput(name, source, problem) from None
