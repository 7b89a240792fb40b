"""What clients of OpenAI and of other engines send, in the words of `runtime.server.schema`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from mtad.errors import InvalidInput

HARMLESS: dict[str, tuple[Any, ...]] = {
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
UNHEEDED = ("safety_identifier", "prompt_cache_key")
"""Fields of OpenAI's that are about its own service; any text is taken and not looked at."""
OFF: dict[str, int | None] = {"top_k": 0, "seed": None, "truncate_prompt_tokens": None}
"""What -1 means, by field, in clients of other engines."""
COLDEST = 0.01
"""Temperatures below this are some clients' way to say 0."""
LANGUAGES_ELSEWHERE = {"json": "json_schema", "regex": "regex", "grammar": "grammar"}
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
        if not (name in UNHEEDED and isinstance(value, str))
        and not any(name not in known and type(value) is type(one) and value == one for one in HARMLESS.get(name, ()))
    }
    if type(found.get("best_of")) is int and found["best_of"] == (found.get("n") or 1):
        del found["best_of"]
    for name, ours in OFF.items():
        if type(found.get(name)) is int and found[name] == -1:
            found[name] = ours
    temperature = found.get("temperature")
    if isinstance(temperature, float) and 0 < temperature < COLDEST:
        found["temperature"] = 0.0
    structured = found.pop("structured_outputs", None)
    structured = {} if structured is None else structured
    if not isinstance(structured, dict):
        raise InvalidInput("structured_outputs", structured, "give an object with json, regex or grammar")
    for theirs, known in LANGUAGES_ELSEWHERE.items():
        given = {f"guided_{theirs}": found.pop(f"guided_{theirs}", None), known: structured.pop(theirs, None)}
        for field, value in given.items():
            if value is not None and found.get(known) is not None:
                raise InvalidInput(field, value, f"{known} says what is allowed already; give one of them")
            if value is not None:
                found[known] = value
    for name, value in structured.items():
        raise InvalidInput(f"structured_outputs.{name}", value, "give json, regex or grammar")
    return found
