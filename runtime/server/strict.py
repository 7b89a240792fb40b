"""What all objects of a request's body have in common: limits, and that nothing unknown is let through.

A body may have 50,000 wrong values (`runtime.server.bodies`), and pydantic makes an error for each. So only the first
one is looked for: lists are `Items`, other collections have a `max_length`, objects are a `StrictModel`.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from mtad.errors import InvalidInput

UNSUPPORTED = {
    "best_of": "ask for n choices and choose by their logprobs",
    "suffix": "text is continued, not filled in",
    **dict.fromkeys(("tools", "tool_choice", "parallel_tool_calls"), "only chats have tools"),
    **dict.fromkeys(("functions", "function_call"), "give tools and tool_choice"),
    **dict.fromkeys(("audio", "modalities"), "text only"),
    **dict.fromkeys(("store", "metadata", "background", "conversation", "previous_response_id"), "nothing is stored"),
    **dict.fromkeys(("reasoning", "reasoning_effort", "verbosity"), "the model has no such setting"),
    "prediction": "drafts come from the auxiliary model; see draft_len and beam_width",
    "service_tier": "see priority",
    "web_search_options": "there is no web search",
    "logprobs_mode": "log-probabilities are the target's, unprocessed",
}
"""Fields of OpenAI's that cannot be honoured, and why."""

STOP_STRINGS, STOP_CHARACTERS = 16, 4096
"""Most stop strings of a request, and most characters of all of them together; or of all bad words."""
MAX_ENTRIES = 1024
"""Most entries of `logit_bias`, `stop_token_ids` or `bad_words`."""

Item = TypeVar("Item")
Items = Annotated[list[Item], Field(fail_fast=True)]
"""A list that is looked at up to its first wrong item: there may be hundreds of thousands."""


class StrictModel(BaseModel):
    """A JSON object whose unknown fields are refused by name."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: Any) -> Any:
        """Null is "not given", for OpenAI's fields that are not supported too; those are refused otherwise.

        What is unknown is refused here, the first of it: pydantic would make an error for every unknown field.
        """
        if not isinstance(values, dict):
            return values
        values = cls.translated(values)
        known = cls.model_fields
        aliases = {field.alias for field in known.values()}
        for name, reason in UNSUPPORTED.items():
            if name not in known and values.get(name) is not None:
                raise InvalidInput(name, values[name], f"not supported: {reason}")
        for name in values:
            if name not in known and name not in aliases and name not in UNSUPPORTED:
                raise PydanticCustomError("unknown_field", "unknown field", {"name": name})
        return {name: value for name, value in values.items() if value is not None}

    @classmethod
    def translated(cls, values: dict[str, Any]) -> dict[str, Any]:
        """The object in our own words; by default, as it is."""
        return values
