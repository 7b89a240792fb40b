"""Input tensors of one request to a prompt, decoding parameters and settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mtad.errors import InvalidInput
from mtad.params import DecodingParams
from runtime.llm import Prompt
from runtime.triton.tensors import Convention, Settings, Tensor

Array = NDArray[Any]


@dataclass(frozen=True)
class Question:
    """What one request asks.

    Attributes:
        prompt: text or token ids.
        params: decoding parameters, on top of the pair's.
        settings: of the answer.
        names: what fields of `DecodingParams` are called in the request, where it differs.
    """

    prompt: Prompt
    params: DecodingParams
    settings: Settings
    names: Mapping[str, str] = field(default_factory=dict)


def read(
    tensors: Mapping[str, Array], convention: Convention, defaults: DecodingParams, eos: tuple[int, ...]
) -> Question:
    """Read a request.

    Args:
        tensors: input tensors by name; strings as `bytes` in arrays of objects. A leading batch dimension of 1 is
            as good as none.
        convention: their names.
        defaults: what the request leaves out.
        eos: end-of-sequence tokens of the pair.

    Raises:
        InvalidInput: a tensor cannot be used; its `field` is the tensor's name.
    """
    reader = _Reader(tensors, convention)
    names: dict[str, str] = {}
    parameters: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    prompts: dict[str, Any] = {}
    for tensor, value in reader.values():
        match tensor.role:
            case "prompt":
                prompts[tensor.field], names["prompt"] = value, tensor.name
            case "setting":
                settings[tensor.field] = value
            case "neutral":
                _check_neutral(tensor, value)
            case "end" if value not in eos:
                problem = f"texts end with {' or '.join(map(str, eos))}; leave it out"
                raise InvalidInput(tensor.name, value, problem)
            case "parameter":
                if tensor.field in parameters:
                    raise InvalidInput(tensor.name, value, f"give it or {names[tensor.field]}, not both")
                parameters[tensor.field], names[tensor.field] = value, tensor.name
    asked = Settings(**settings)
    _draft_tokens(asked, parameters, names, convention)
    _guide(asked, parameters, names, convention)
    names = {field: name for field, name in names.items() if field != name}
    try:
        params = DecodingParams.from_dict(parameters, defaults)
    except InvalidInput as error:
        raise renamed(error, names) from None
    return Question(_prompt(prompts), params, asked, names)


def renamed(error: InvalidInput, names: Mapping[str, str]) -> InvalidInput:
    """The same error, by the name its field has in the request."""
    return type(error)(names.get(error.field, error.field), error.value, error.problem)


class _Reader:
    """Tensors to Python values, in the convention's order."""

    def __init__(self, tensors: Mapping[str, Array], convention: Convention) -> None:
        self.tensors = tensors
        self._inputs = convention.inputs

    def values(self) -> list[tuple[Tensor, Any]]:
        """Each input that the request has, with its value."""
        return [(one, self._value(one)) for one in self._inputs if one.name in self.tensors]

    def _value(self, tensor: Tensor) -> Any:
        values = self.tensors[tensor.name].reshape(-1)
        items = [_plain(tensor.name, value) for value in values]
        if tensor.dims == (-1,) and tensor.name != "text_input":
            return tuple(item for item in items if item != "") if tensor.type == "STRING" else tuple(items)
        if len(items) != 1:
            problem = "give one value; several prompts are several requests, and share one batch all the same"
            raise InvalidInput(tensor.name, f"{len(items)} values", problem)
        return _json(tensor, items[0]) if tensor.field == "logit_bias" else items[0]


def _plain(name: str, value: Any) -> Any:
    """A Python value; a 32-bit float becomes the shortest decimal that stands for it, so 0.7 is 0.7."""
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            raise InvalidInput(name, value[:100], f"not UTF-8: {error.reason} at byte {error.start}") from None
    return float(str(value)) if isinstance(value, np.float32) else value.item() if hasattr(value, "item") else value


def _json(tensor: Tensor, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise InvalidInput(tensor.name, text, f'not JSON: {error}; give an object such as {{"17": -5}}') from None


def _check_neutral(tensor: Tensor, value: Any) -> None:
    for one in value if isinstance(value, tuple) else (value,):
        if one not in tensor.neutral:
            raise InvalidInput(tensor.name, one, tensor.problem)


def _draft_tokens(
    settings: Settings, parameters: dict[str, Any], names: dict[str, str], convention: Convention
) -> None:
    """`num_draft_tokens` is `draft_len`; 0 switches drafting off, as it does in TensorRT-LLM."""
    asked = settings.draft_tokens
    if asked is None:
        return
    own = convention.settings["draft_tokens"]
    field = "draft_len" if asked else "method"
    if field in parameters:
        raise InvalidInput(own, asked, f"give it or {names[field]}, not both")
    parameters[field], names[field] = asked or "sample", own


def _guide(settings: Settings, parameters: dict[str, Any], names: dict[str, str], convention: Convention) -> None:
    """`guided_decoding_guide_type` and `guided_decoding_guide` are `json_schema` or `regex`."""
    kind, guide = settings.guide_type, settings.guide
    if kind is None and guide is None:
        return
    type_name, guide_name = convention.settings["guide_type"], convention.settings["guide"]
    field = {"json": "json_schema", "json_schema": "json_schema", "regex": "regex"}.get(kind or "")
    if field is None:
        raise InvalidInput(type_name, kind, "give json, json_schema or regex; a grammar goes into `grammar`")
    if (kind == "json") == (guide is not None):
        raise InvalidInput(guide_name, guide, "give it with json_schema and regex, only there")
    if field in parameters:
        raise InvalidInput(type_name, kind, f"give it or {names[field]}, not both")
    parameters[field], names[field] = guide or '{"type": "object"}', guide_name


def _prompt(prompts: Mapping[str, Any]) -> Prompt:
    if len(prompts) != 1:
        given = "both" if prompts else None
        raise InvalidInput("text_input", given, "give text_input, or token ids as input_ids; one of them")
    return next(iter(prompts.values()))  # type: ignore[no-any-return]
