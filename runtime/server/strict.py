"""What all objects of a request's body have in common: limits, refused fields, and fields under other names.

A body may have 50,000 wrong values (`runtime.server.bodies`), and pydantic makes an error for each. So only the first
one is looked for: lists are `Items`, other collections have a `max_length`, objects are a `StrictModel`.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from functools import cache
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from mtad.errors import InvalidInput

_CHATS, _TOOLS, _TEXT, _STORED = "only chats have tools", "give tools and tool_choice", "text only", "nothing is stored"
_NO_SETTING = "the model has no such setting"
UNSUPPORTED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "best_of": ("ask for n choices and choose by their logprobs", (1,)),
    "suffix": ("text is continued, not filled in", ("",)),
    **dict.fromkeys(("tools", "tool_choice", "parallel_tool_calls"), (_CHATS, ([], "none", True, False))),
    **dict.fromkeys(("functions", "function_call"), (_TOOLS, ([], "none"))),
    **dict.fromkeys(("audio", "input_audio", "image_url", "video_url", "file", "modalities"), (_TEXT, (["text"],))),
    **dict.fromkeys(("store", "metadata"), (_STORED, (False, {}))),
    **dict.fromkeys(("reasoning", "reasoning_effort"), (_NO_SETTING, ())),
    "verbosity": (_NO_SETTING, ("medium",)),
    "prediction": ("put it into the prompt, where draft lookup finds it; see draft", ()),
    "service_tier": ("see priority", ("auto", "default")),
}
"""Fields of OpenAI's that cannot be honoured: why, and values that ask for nothing, which clients send."""
IGNORED_FIELDS = ("safety_identifier", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options")
"""Fields of OpenAI's that are about its own service; any text or object is accepted and ignored."""
MINUS_ONE_MEANS: dict[str, int | None] = {"top_k": 0, "seed": None}
"""Meaning of -1 in clients of other engines, by field."""
MIN_TEMPERATURE = 0.01
"""A temperature above 0 and below this means 0, as some clients say it."""
VLLM_LANGUAGES = {"json": "json_schema", "regex": "regex", "grammar": "grammar"}
"""Fields of vLLM's `structured_outputs`, by what they are called here."""

STOP_STRINGS = 16
"""Most stop strings of a request."""
MAX_ENTRIES = 1024
"""Most entries of `logit_bias`, `stop_token_ids` or `bad_words`."""

Item = TypeVar("Item")
Items = Annotated[list[Item], Field(fail_fast=True)]
"""A list that is looked at up to its first wrong item: there may be hundreds of thousands."""


class StrictModel(BaseModel):
    """A JSON object whose unknown fields are refused by name."""

    model_config = ConfigDict(extra="forbid", strict=True)
    other_words: ClassVar = False  # whether some fields may have other engines' names and values

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: Any) -> Any:
        """Null is "not given", for OpenAI's fields that are not supported too; those are refused otherwise.

        What is unknown is refused here, the first of it: pydantic would make an error for every unknown field.
        """
        if not isinstance(values, dict):
            return values
        names = _names(cls)
        if cls.other_words:
            values = translate(values, names)
        for name, value in values.items():
            if value is not None and name not in names:
                reason = f"not supported: {UNSUPPORTED[name][0]}" if name in UNSUPPORTED else "unknown field"
                raise PydanticCustomError("unknown_field", "{reason}", {"name": name, "reason": reason})
        return {name: value for name, value in values.items() if value is not None}


@cache
def _names(model: type[BaseModel]) -> frozenset[str]:
    """What its fields may be called."""
    fields = model.model_fields
    return frozenset([*fields, *(field.alias for field in fields.values() if field.alias)])


def translate(values: dict[str, Any], known: Collection[str]) -> dict[str, Any]:
    """A request's fields under our names, without those by which clients say that they ask for nothing.

    Args:
        known: those that the request has a meaning for.

    Raises:
        InvalidInput: one thing is asked for under two names, or in a form that is not known.
    """
    found = dict(values)
    for name, value in values.items():
        ignored = UNSUPPORTED[name][1] if name in UNSUPPORTED and name not in known else ()
        asks_nothing = any(type(value) is type(one) and value == one for one in ignored)
        if asks_nothing or (name in IGNORED_FIELDS and isinstance(value, (str, dict))):
            del found[name]
    for name, meaning in MINUS_ONE_MEANS.items():
        if type(found.get(name)) is int and found[name] == -1:
            found[name] = meaning
    temperature = found.get("temperature")
    if isinstance(temperature, float) and 0 < temperature < MIN_TEMPERATURE:
        found["temperature"] = 0.0
    structured = found.pop("structured_outputs", None)
    if not isinstance(structured, dict | None):
        raise InvalidInput("structured_outputs", structured, "give an object with json, regex, grammar or choice")
    for name, value in (structured or {}).items():
        if value is None:
            continue
        texts = value if name == "choice" and isinstance(value, list) else ()
        ours = "grammar" if texts and all(isinstance(one, str) for one in texts) else VLLM_LANGUAGES.get(name)
        if ours is None or any(found.get(one) is not None for one in VLLM_LANGUAGES.values()):
            raise InvalidInput(f"structured_outputs.{name}", value, "give one language: json, regex, grammar or choice")
        found[ours] = "start: " + " | ".join(map(json.dumps, texts)) if texts else value
    return found
