"""What clients of OpenAI and of other engines send, in the words of `runtime.server.schema`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from mtad.errors import InvalidInput

IGNORED_DEFAULTS: dict[str, tuple[Any, ...]] = {
    "store": (False,),
    "metadata": ({},),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none",),
    "parallel_tool_calls": (True, False),
    "service_tier": ("auto", "default"),
    "modalities": (["text"],),
    "suffix": ("",),
    "background": (False,),
    "include": ([],),
    "truncation": ("disabled",),
}
"""Values of fields of OpenAI's that ask for nothing; clients send them."""
IGNORED_FIELDS = ("safety_identifier", "prompt_cache_key")
"""Fields of OpenAI's that are about its own service; any text is accepted and ignored."""
MINUS_ONE_MEANS: dict[str, int | None] = {"top_k": 0, "seed": None, "truncate_prompt_tokens": None}
"""Meaning of -1 in clients of other engines, by field."""
MIN_TEMPERATURE = 0.01
"""A temperature above 0 and below this means 0, as some clients say it."""
VLLM_LANGUAGES = {"json": "json_schema", "regex": "regex", "grammar": "grammar"}
"""Fields of vLLM's `structured_outputs`, and of `guided_...`, by what they are called here."""


def translate(values: dict[str, Any], known: Collection[str] = ()) -> dict[str, Any]:
    """A request's fields under our names, without those by which clients say that they ask for nothing.

    Args:
        known: those that the request has a meaning for.

    Raises:
        InvalidInput: one thing is asked for under two names, or in a form that is not known.
    """
    found = {
        name: value
        for name, value in values.items()
        if not (name in IGNORED_FIELDS and isinstance(value, str))
        and not any(
            name not in known and type(value) is type(one) and value == one for one in IGNORED_DEFAULTS.get(name, ())
        )
    }
    if type(found.get("best_of")) is int and found["best_of"] == (found.get("n") or 1):
        del found["best_of"]
    for name, ours in MINUS_ONE_MEANS.items():
        if type(found.get(name)) is int and found[name] == -1:
            found[name] = ours
    temperature = found.get("temperature")
    if isinstance(temperature, float) and 0 < temperature < MIN_TEMPERATURE:
        found["temperature"] = 0.0
    structured = found.pop("structured_outputs", None)
    structured = {} if structured is None else structured
    if not isinstance(structured, dict):
        raise InvalidInput("structured_outputs", structured, "give an object with json, regex or grammar")
    for theirs, known in VLLM_LANGUAGES.items():
        given = {f"guided_{theirs}": found.pop(f"guided_{theirs}", None), known: structured.pop(theirs, None)}
        for field, value in given.items():
            if value is not None and found.get(known) is not None:
                raise InvalidInput(field, value, f"{known} says what is allowed already; give one of them")
            if value is not None:
                found[known] = value
    for name, value in structured.items():
        raise InvalidInput(f"structured_outputs.{name}", value, "give json, regex or grammar")
    return found
