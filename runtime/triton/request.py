"""Input tensors of one request to a prompt, decoding parameters and settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mtad.errors import InvalidInput
from mtad.params import DecodingParams
from runtime.prompts import Prompt
from runtime.triton.tensors import INPUTS, OutputSettings, TritonTensor

Array = NDArray[Any]

MOST_TEXTS = 8192
"""Most texts in one tensor, empty ones included. No field takes as many, and each takes a microsecond to read."""


@dataclass(frozen=True)
class TritonRequest:
    """What one request asks.

    Attributes:
        names: what fields of `DecodingParams` are called in the request, where it differs.
    """

    prompt: Prompt
    params: DecodingParams
    settings: OutputSettings
    names: Mapping[str, str]


def read(tensors: Mapping[str, Array], defaults: DecodingParams, eos: tuple[int, ...]) -> TritonRequest:
    """Read a request.

    Args:
        tensors: input tensors by name; strings as `bytes` in arrays of objects. A leading batch dimension of 1 is
            as good as none.

    Raises:
        InvalidInput: a tensor cannot be used; its `field` is the tensor's name.
    """
    names, parameters, settings, prompts = dict[str, str](), dict[str, Any](), dict[str, Any](), dict[str, Any]()
    for tensor in INPUTS:
        if tensor.name not in tensors:
            continue
        value = _value(tensor, tensors[tensor.name])
        match tensor.role:
            case "prompt":
                prompts[tensor.field], names["prompt"] = value, tensor.name
            case "setting":
                settings[tensor.field] = value
            case "neutral":
                if value not in tensor.neutral:
                    raise InvalidInput(tensor.name, value, tensor.problem)
            case "end" if value not in eos:
                raise InvalidInput(tensor.name, value, f"texts end with {' or '.join(map(str, eos))}; leave it out")
            case "parameter" | "drafted" as role:
                field, own = tensor.field, value
                if role == "drafted" and not value:  # it switches drafting off, as in TensorRT-LLM
                    field, own = "method", "sample"
                if field in parameters:
                    raise InvalidInput(tensor.name, value, f"give it or {names[field]}, not both")
                parameters[field], names[field] = own, tensor.name
    names = {field: name for field, name in names.items() if field != name}
    try:
        params = DecodingParams.from_dict(parameters, defaults)
    except InvalidInput as error:
        raise type(error)(names.get(error.field, error.field), error.value, error.problem) from None
    if len(prompts) != 1:
        given = "both" if prompts else None
        raise InvalidInput("text_input", given, "give either text_input, or token ids as input_ids")
    return TritonRequest(next(iter(prompts.values())), params, OutputSettings(**settings), names)


def _value(tensor: TritonTensor, values: Array) -> Any:
    """One Python value, or a tuple of them where the tensor may have any length."""
    if tensor.dims == (-1,):
        if tensor.type != "STRING":
            return tuple(values.reshape(-1).tolist())
        if values.size > MOST_TEXTS:
            raise InvalidInput(tensor.name, f"{values.size} texts", f"give at most {MOST_TEXTS}")
        return tuple(text for value in values.reshape(-1) if (text := _plain(tensor.name, value)) != "")
    if values.size != 1:
        problem = "give one value; send several prompts as several requests, which share one batch"
        raise InvalidInput(tensor.name, f"{values.size} values", problem)
    item = _plain(tensor.name, values.reshape(-1)[0])
    if tensor.field != "logit_bias":
        return item
    try:
        return json.loads(item)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(tensor.name, item, f'not JSON: {error}; give an object such as {{"17": -5}}') from None


def _plain(name: str, value: Any) -> Any:
    """A Python value; a 32-bit float becomes the shortest decimal that stands for it, so 0.7 is 0.7."""
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            raise InvalidInput(name, value[:100], f"not UTF-8: {error.reason} at byte {error.start}") from None
    return float(str(value)) if isinstance(value, np.float32) else value.item() if hasattr(value, "item") else value
