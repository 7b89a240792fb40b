"""Messages of a chat, the functions that its model may call, and the calls that it made before."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, StringConstraints, field_validator
from pydantic_core import PydanticCustomError, from_json

from mtad.errors import InvalidInput
from runtime.server.strict import Items, StrictModel

MAX_TOOLS = 128
"""Functions per request, and calls per message; OpenAI's limit."""


def _checked(text: str) -> str:
    """The arguments of a call, which may have been cut off; a chat template is given them as an object."""
    with suppress(ValueError):
        if isinstance(_parsed(text), dict):
            return text
    raise PydanticCustomError("arguments", "give a JSON object, as text")


def _parsed(text: str) -> Any:
    found = from_json(text or "{}", allow_partial="trailing-strings")
    return {} if found is None else found


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


class FunctionTyped(StrictModel):
    """An object that says which type of tool it is about; here, functions only."""

    type: Literal["function"]


class Tool(FunctionTyped):
    """Something that the model may call."""

    function: Function


class FunctionName(StrictModel):
    """The function that `tool_choice` asks for."""

    name: str


class NamedTool(FunctionTyped):
    """The function that is to be called."""

    function: FunctionName


class FunctionCall(FunctionName):
    """A call that the model made before."""

    arguments: Annotated[str, AfterValidator(_checked)]
    parsed_arguments: Any = Field(None, description="accepted and ignored: the openai package adds it")


class ToolCall(FunctionTyped):
    """The same, with the id that its result refers to."""

    id: str
    index: int | None = Field(None, description="accepted and ignored: streams have it")
    function: FunctionCall

    def plain(self) -> dict[str, Any]:
        """What a chat template gets."""
        function = {"name": self.function.name, "arguments": _parsed(self.function.arguments)}
        return {"id": self.id, "type": "function", "function": function}


class TextPart(StrictModel):
    """Part of a message; text only."""

    type: Literal["text"]
    text: str
    prompt_cache_breakpoint: Any = Field(None, description="accepted and ignored: what may be kept is found anyway")
    cache_control: Any = Field(None, description="the same, in Anthropic's words")


class Message(StrictModel):
    """One message of a chat, with those fields of OpenAI's that its own answers have."""

    role: Literal["developer", "system", "user", "assistant", "tool"]
    content: str | Items[TextPart] | None = None
    name: str | None = None
    reasoning_content: str | None = Field(None, description="the thought that an answer began with")
    reasoning: str | None = Field(None, description="the same, under vLLM's newer name")
    parsed: Any = Field(None, description="accepted and ignored: the openai package adds it")
    refusal: Literal[""] | None = None
    annotations: Annotated[Items[Any], Field(max_length=0)] | None = None
    tool_calls: Annotated[Items[ToolCall], Field(max_length=MAX_TOOLS)] | None = None
    tool_call_id: str | None = Field(None, description="the call that a tool's message is the result of")

    def plain(self) -> dict[str, Any]:
        """What a chat template gets."""
        if self.content is None and self.role != "assistant":
            raise InvalidInput("messages", self.role, "the message has no content; give text")
        others = {
            "name": self.name,
            "reasoning_content": self.reasoning_content or self.reasoning,
            "tool_call_id": self.tool_call_id,
            "tool_calls": [one.plain() for one in self.tool_calls or []],
        }
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or ())
        return {"role": self.role, "content": text} | {name: value for name, value in others.items() if value}


ChatMessage = Annotated[Message, AfterValidator(Message.plain)]
"""A message, once checked, as a chat template gets it: the garbage collector skips dictionaries of text."""
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""How much a model is to think, in vLLM's words."""
Tools = Annotated[Items[Tool], Field(max_length=MAX_TOOLS)]
ToolChoice = Literal["none", "auto", "required"] | NamedTool
