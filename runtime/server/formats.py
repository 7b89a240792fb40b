"""What requests say about the form of their answers."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import Field

from mtad.errors import InvalidInput
from runtime.server.strict import StrictModel


class StreamOptions(StrictModel):
    """What a stream has beside its choices."""

    include_usage: bool = Field(False, description="a last chunk with the usage of the whole request")
    continuous_usage_stats: bool = Field(False, description="the usage so far, in every chunk")
    include_obfuscation: bool = Field(False, description="taken and not heeded: chunks are not padded")


class JsonSchema(StrictModel):
    """A JSON schema that the text must satisfy, in OpenAI's envelope."""

    name: str = ""
    description: str = ""
    schema_: dict[str, Any] = Field(default_factory=dict, alias="schema")
    strict: bool = Field(True, description="the text always satisfies the schema: false cannot be told from true")


class ResponseFormat(StrictModel):
    """Which texts are allowed: any, JSON objects, or those of a JSON schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @property
    def language(self) -> str | None:
        """The JSON schema it comes to, as JSON text."""
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise InvalidInput("response_format", self.type, "give `json_schema` with the type json_schema, only there")
        if self.type == "text":
            return None
        return json.dumps(self.json_schema.schema_) if self.json_schema else '{"type": "object"}'
