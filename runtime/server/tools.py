"""What clients say about functions that a chat's model may call, and about calls that it made before."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, StringConstraints, field_validator
from pydantic_core import PydanticCustomError, from_json

from runtime.server.strict import Items, StrictModel

MOST_TOOLS = 128
"""Functions per request, and calls per message; OpenAI's limit."""


def _of_an_object(text: str) -> str:
    """The arguments of a call; a chat template is given them as an object."""
    try:
        fine = isinstance(from_json(text or "{}"), dict)
    except ValueError:
        fine = False
    if not fine:
        raise PydanticCustomError("arguments", "give a JSON object, as text")
    return text


class Function(StrictModel):
    """A function as its caller describes it."""

    name: Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str = ""
    parameters: dict[str, Any] = Field({"type": "object", "properties": {}}, description="JSON schema of the arguments")
    strict: bool = Field(
        False, description="refuse a schema with parts that cannot be enforced; otherwise they only inform the model"
    )

    @field_validator("parameters")
    @classmethod
    def _with_a_type(cls, schema: dict[str, Any]) -> dict[str, Any]:
        if schema.setdefault("type", "object") != "object":
            raise PydanticCustomError("parameters", "arguments are an object: give a JSON schema of type object")
        return schema


class Tool(StrictModel):
    """Something that the model may call; functions only."""

    type: Literal["function"]
    function: Function


class FunctionName(StrictModel):
    """Names a function."""

    name: str


class NamedTool(StrictModel):
    """The function that is to be called."""

    type: Literal["function"]
    function: FunctionName


class FunctionCall(StrictModel):
    """A call that the model made before."""

    name: str
    arguments: Annotated[str, AfterValidator(_of_an_object)]


class ToolCall(StrictModel):
    """The same, with the id that its result refers to."""

    id: str
    type: Literal["function"]
    function: FunctionCall

    def plain(self) -> dict[str, Any]:
        """What a chat template gets."""
        function = {"name": self.function.name, "arguments": from_json(self.function.arguments or "{}")}
        return {"id": self.id, "type": "function", "function": function}


Tools = Annotated[Items[Tool], Field(max_length=MOST_TOOLS)]
ToolCalls = Annotated[Items[ToolCall], Field(max_length=MOST_TOOLS)]
ToolChoice = Literal["none", "auto", "required"] | NamedTool
