"""Reading Hugging Face checkpoints: a local folder, a hub id, a GGUF file, or a LoRA adapter of a checkpoint.

There is no list of architectures. A checkpoint of any causal language model that transformers knows is tried: its shape
is found by running it once without weights through the hook, its engine is compared with it before it is kept.
"""

from __future__ import annotations

import copy
import json
import logging
import platform
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from engines.base import DTYPES, KV_PAGE, EngineSpec
from engines.kinds import FORMATS, PRECISIONS
from engines.placement import versions
from engines.pytorch.hook import cache_shape
from engines.quiet import quiet
from export.checkpoint.packed import Packing
from export.checkpoint.vocabulary import within
from export.checkpoint.weights import Weights, empty_model, stored_weights
from mtad.errors import InvalidInput, refused_as
from mtad.params import SAMPLING, DecodingParams

log = logging.getLogger(__name__)

WEIGHTS = ("[!c]*.safetensors", "pytorch_model*.bin", "adapter_model.bin")
"""Files with weights; the first kind that is there is read. Those that begin with c are left out: Mistral's
`consolidated*` are the same ones once more. The last kind is an adapter's."""

ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}
"""Types of layers that keep keys and values of each token, and nothing else."""


def opening(file: str | None) -> dict[str, Any]:
    """How transformers is to open a folder, or its GGUF `file`."""
    return {"local_files_only": True, "trust_remote_code": False, **({"gguf_file": file} if file else {})}


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was found and may be exported.

    Attributes:
        name: which option it came from, `target` or `auxiliary`; for messages.
        digest: sha256 over configuration and weights.
        source: where it was found: an absolute folder, or a hub id.
        download: bytes of weights that are still on the hub; 0 if they are here.
        file: of `folder`, the GGUF file that is the checkpoint.
        adapter: folder of a LoRA adapter, which is merged into the checkpoint in `folder`.
        packing: how its matrices are packed, if they are; `config` does not say so then.
    """

    name: str
    folder: Path
    config: PretrainedConfig
    digest: str
    source: str
    download: int = 0
    file: str | None = None
    adapter: Path | None = None
    packing: Packing | None = None

    @property
    def plain(self) -> bool:
        """Whether it is a folder of unpacked weights that other libraries read as well."""
        return self.file is None and self.adapter is None and self.packing is None

    @property
    def size(self) -> int:
        """Bytes of its weights, as they are stored."""
        kinds = [self.file] if self.file else WEIGHTS
        return next(filter(None, (sum(file.stat().st_size for file in self.folder.glob(kind)) for kind in kinds)), 0)

    @property
    def positions(self) -> int | None:
        """Longest sequence one engine may hold, in tokens; None if the model sets no limit.

        An engine ends where longer texts begin to be computed otherwise, and what is in its cache cannot follow: where
        rotary embeddings turn keys by other factors ("longrope"), where layers forget what lies before the last border
        of a chunk, and where Llama 4 scales queries by their position.
        """
        text = copy.deepcopy(self.config).get_text_config()
        if getattr(text, "rope_parameters", None):
            text.standardize_rope_params()  # as the model's rotary embedding does
        limits = [getattr(text, name, None) for name in ("max_position_embeddings", "attention_chunk_size")]
        if getattr(text, "attn_temperature_tuning", False):
            limits.append(text.floor_scale - 1)
        most = min(filter(None, limits), default=None)
        rotary = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
        for kind in (rotary, *(v for v in rotary.values() if isinstance(v, dict))):
            if "longrope" in (kind.get("rope_type"), kind.get("type")):
                original = getattr(text, "original_max_position_embeddings", most)
                most = kind.get("original_max_position_embeddings", original)
        return most

    def load(self, dtype: torch.dtype | str) -> PreTrainedModel:
        """The model on the CPU, in `dtype`, or "auto": that of its files."""
        with refused_as(self.name, str(self.folder), "its weights cannot be loaded"):
            model = self._unpacked(dtype) if self.packing is not None else self._loaded(dtype)
        if self.adapter is not None:
            with refused_as(self.name, str(self.adapter), "the adapter cannot be merged"), warnings.catch_warnings():
                from peft import PeftModel

                warnings.filterwarnings("error", "Found missing adapter keys")  # of which nothing would be merged
                ends = {model.get_input_embeddings(), model.get_output_embeddings()}
                adapted = PeftModel.from_pretrained(model, str(self.adapter))  # which does not say what it left out
                renamed = getattr(model, "_checkpoint_conversion_mapping", None)  # in transformers 4
                found = adapted.load_adapter(str(self.adapter), "default", key_mapping=renamed)
                if unknown := [name for name in found.unexpected_keys if "lora_" in name]:
                    raise ValueError(f"its base model has no place for {len(unknown)} weights, such as {unknown[0]}")
                old = {getattr(m, kind, None) for m in adapted.modules() for kind in ("base_layer", "original_module")}
                if self.config.get_text_config().tie_word_embeddings and not ends.isdisjoint(old):
                    raise ValueError("it changes embeddings that are tied; give the merged model")
                model = adapted.merge_and_unload()
        return model.eval()

    def _loaded(self, dtype: torch.dtype | str) -> PreTrainedModel:
        given = opening(self.file)
        if self.file:  # `find` has completed what transformers reads of it
            given["config"] = self.config
        if self.file and hasattr(transformers, "GgufConfig"):  # not in transformers 4
            given["quantization_config"] = transformers.GgufConfig(dequantize=True)
        elif getattr(self.config, "quantization_config", None):
            given["quantization_config"] = transformers.Mxfp4Config(dequantize=True)
        model, found = AutoModelForCausalLM.from_pretrained(self.folder, dtype=dtype, output_loading_info=True, **given)
        if found["missing_keys"]:  # transformers would go on with random ones
            missing = sorted(found["missing_keys"])
            raise InvalidInput(self.name, str(self.folder), f"{len(missing)} weights are missing, such as {missing[0]}")
        return model

    def _unpacked(self, dtype: torch.dtype | str) -> PreTrainedModel:
        weights = self._stored()
        assert weights is not None
        model = AutoModelForCausalLM.from_config(self.config, dtype=dtype, trust_remote_code=False)
        model.load_state_dict({name: weights(name) for name in model.state_dict()})
        return model

    def empty(self, dtype: str) -> PreTrainedModel:
        """The model without weights; see `export.checkpoint.weights.empty_model`."""
        return empty_model(self.config, DTYPES[dtype])

    def weights(self) -> Weights:
        """Its weights as they are stored: one at a time where the files allow it, else from memory."""
        found = None if self.file or self.adapter else self._stored()
        if found is not None:
            return found
        loaded: dict[str, torch.Tensor] = self.load(torch.float32 if self.file or self.adapter else "auto").state_dict()
        log.warning("%s: these weights are converted while they are loaded, all at once", self.name)
        return loaded.__getitem__

    def _stored(self) -> Weights | None:
        """Its weights as its files have them; None if transformers has to convert them."""
        with refused_as(self.name, str(self.folder), "its weights cannot be loaded"):
            found = stored_weights(self.folder, self.empty("float32"), self.packing)
        if found is None and self.packing is not None:
            problem = f"what {self.packing.method} has packed is not every weight of {self.config.architectures[0]}"
            raise InvalidInput(self.name, str(self.folder), problem)
        return found

    def is_packed(self, precision: str) -> bool:
        """Whether its matrices are in a precision already, and are taken over as they are."""
        return self.packing is not None and self.adapter is None and precision == "int4"

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer in its folder."""
        with refused_as(self.name, str(self.folder), "its tokenizer cannot be loaded"):
            own = self.adapter is not None and (self.adapter / "tokenizer_config.json").is_file()
            found = AutoTokenizer.from_pretrained(self.adapter if own else self.folder, **opening(self.file))
            size = self.config.get_text_config().vocab_size
            return within(found, size) if self.file or max(found.added_tokens_decoder, default=0) >= size else found

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
            known = path.is_file() and not self.file  # beside which it may be another model's
            return {**json.loads(path.read_text(encoding="utf-8"))} if known else {}

    def spec(self, rows: int, capacity: int, precision: str, format: str) -> EngineSpec:
        """The engine this checkpoint becomes.

        Raises:
            InvalidInput: the model is of a kind that cannot become one, or has fewer positions than `capacity`.
        """
        if self.positions is not None and capacity > self.positions:
            most = self.positions // KV_PAGE * KV_PAGE
            problem = f"the {self.name} has {self.positions} positions; give at most {most}"
            raise InvalidInput("capacity", capacity, problem)
        text = self.config.get_text_config()
        if others := sorted({*(getattr(text, "layer_types", None) or ())} - ATTENTION):
            kept = f"its layers of {' and '.join(others)} keep more than keys and values, or a state"
            problem = f"{kept}, which cannot go back over tokens that are rejected"
            raise InvalidInput(self.name, str(self.folder), problem)
        window = getattr(text, "sliding_window", None)
        if window and window < KV_PAGE:  # of which drafts are never deeper
            problem = f"its sliding window of {window} is below the minimum, {KV_PAGE}"
            raise InvalidInput(self.name, str(self.folder), problem)
        if self.packing is not None and self.is_packed(precision) and not self.packing.in_order:
            problem = f"{self.packing.method} ordered its columns by activations, which the engine cannot; give float32"
            raise InvalidInput("precision" if self.name == "target" else f"{self.name}_precision", precision, problem)
        if not self.download and self.packing is not None:
            self._stored()  # says what is missing
        problem = f"{self.config.architectures[0]} does not run with an explicit cache, mask and positions"
        with refused_as(self.name, str(self.folder), problem), quiet(), FakeTensorMode():
            model = AutoModelForCausalLM.from_config(copy.deepcopy(self.config), trust_remote_code=False)
            layers, kv_heads, head_dim, vocab_size = cache_shape(model)
        return EngineSpec(
            architecture=self.config.architectures[0],
            layers=layers,
            kv_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=vocab_size,
            dtype=PRECISIONS[precision],
            precision=precision,
            rows=rows,
            capacity=capacity + FORMATS[format].spare_columns,
            eos_token_ids=self.eos_token_ids(),
            format=format,
            checkpoint_hash=self.digest,
            versions={
                "python": platform.python_version(),
                **versions("mtad", "torch", "transformers", "onnx", "onnxscript"),
            },
            source=self.source,
        )
