"""What a request to `/v1/responses` may contain."""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

from pydantic import Field, model_validator

from mtad.errors import InvalidInput
from mtad.params import DecodingParams
from runtime.server.messages import (
    MAX_TOOLS,
    Arguments,
    Chat,
    Content,
    Effort,
    Function,
    FunctionCall,
    FunctionName,
    FunctionTyped,
    Message,
    NamedTool,
    Tool,
    ToolCall,
    ToolChoice,
    text_of,
)
from runtime.server.schema import DESCRIPTIONS, Body, JsonSchema, ResponseFormat
from runtime.server.strict import Items, StrictModel


class Item(StrictModel):
    """A message, a call that the model made before, or the result of one."""

    type: Literal["message", "function_call", "function_call_output"] = "message"
    id: str | None = Field(None, description="taken and not heeded, like `status`: nothing is stored")
    status: str | None = None
    role: Literal["developer", "system", "user", "assistant"] | None = None
    content: Content | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: Arguments | None = None
    output: Content | None = None

    @property
    def message(self) -> Message:
        """The same as a message of a chat.

        Raises:
            InvalidInput: something is missing.
        """
        needed = {
            "message": ("role", "content"),
            "function_call": ("call_id", "name", "arguments"),
            "function_call_output": ("call_id", "output"),
        }[self.type]
        for name in needed:
            if getattr(self, name) is None:
                raise InvalidInput("input", self.type, f"the item has no {name}; give {', '.join(needed)}")
        if self.type == "function_call":
            function = FunctionCall.model_construct(name=self.name, arguments=self.arguments)
            call = ToolCall.model_construct(id=self.call_id, type="function", function=function)
            return Message.model_construct(role="assistant", tool_calls=[call])
        text = text_of(self.content if self.type == "message" else self.output)
        return Message.model_construct(role=self.role or "tool", content=text, tool_call_id=self.call_id)


class ResponseTool(Function, FunctionTyped):
    """A function that the model may call."""


class ResponseToolChoice(FunctionName, FunctionTyped):
    """The function that is to be called."""


class TextFormat(JsonSchema):
    """Which texts are allowed: any, JSON objects, or those of a JSON schema."""

    type: Literal["text", "json_object", "json_schema"]


class TextOptions(StrictModel):
    """What the text is to be."""

    format: TextFormat | None = None


class Reasoning(StrictModel):
    """How much to think."""

    effort: Effort | None = None


class ResponseRequest(Body):
    """A request to `/v1/responses`, as OpenAI defines it."""

    input: Annotated[Items[Item], Field(min_length=1, description="or a text, a user's")]
    instructions: str | None = Field(None, description="a system message before the input")
    max_output_tokens: int | None = Field(None, description=f"max_tokens: {DESCRIPTIONS['max_tokens']}")
    text: TextOptions | None = None
    tools: Annotated[Items[ResponseTool], Field(max_length=MAX_TOOLS)] = Field([])
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice = "auto"
    parallel_tool_calls: bool = True
    reasoning: Reasoning | None = Field(None, description="how much to think, where the chat template knows it")

    @classmethod
    def translated(cls, values: dict[str, Any]) -> dict[str, Any]:
        found = super().translated(values)
        if isinstance(found.get("input"), str):
            found["input"] = [{"role": "user", "content": found["input"]}]
        elif isinstance(found.get("input"), list):  # thoughts of earlier answers are not shown to the model again
            found["input"] = [i for i in found["input"] if not isinstance(i, dict) or i.get("type") != "reasoning"]
        return found

    @property
    def prompt_alternatives(self) -> int | None:
        wanted = super().prompt_alternatives
        if wanted is not None:
            raise InvalidInput("prompt_logprobs", wanted, "responses have no place for them; ask for a completion")
        return None

    @property
    def renamed(self) -> dict[str, str]:
        format = {"json_schema": "text"} if self.text else {}
        return super().renamed | {"prompt": "input", "messages": "input", "reasoning_effort": "reasoning"} | format

    @model_validator(mode="after")
    def _formatted(self) -> ResponseRequest:
        if self.text and self.text.format:
            if self.response_format:
                raise InvalidInput("text", self.text.format.type, "give it or response_format, not both")
            schema = self.text.format if self.text.format.type == "json_schema" else None
            self.response_format = ResponseFormat.model_construct(type=self.text.format.type, json_schema=schema)
        return self

    @property
    def chat(self) -> Chat:
        found = [Message.model_construct(role="system", content=self.instructions)] if self.instructions else []
        for message in (item.message for item in self.input):
            if message.tool_calls and found and found[-1].tool_calls:  # calls of one answer
                found[-1].tool_calls += message.tool_calls
            else:
                found.append(message)
        tools = [Tool.model_construct(type="function", function=tool) for tool in self.tools]
        named = isinstance(self.tool_choice, ResponseToolChoice)
        choice = NamedTool.model_construct(type="function", function=self.tool_choice) if named else self.tool_choice
        effort = self.reasoning.effort if self.reasoning else None
        return Chat(found, tools, cast("ToolChoice", choice), self.parallel_tool_calls, effort=effort)

    def parameters(self, defaults: DecodingParams) -> DecodingParams:
        params = super().parameters(defaults)
        if params.n > 1:
            raise InvalidInput("n", params.n, "a response has one answer; leave it out, or use chat completions")
        return params
