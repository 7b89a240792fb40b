"""What a request's body may hold: OpenAI's fields, and every field of `DecodingParams` under its own name.

The decoder's fields are read off `DecodingParams`, so a new one is served, documented and advertised without a word
here. What is neither is refused by name; null means "not given".
"""

from __future__ import annotations

import functools
import json
import operator
from collections.abc import Mapping
from dataclasses import fields
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from pydantic import Field, create_model

from mtad.errors import InvalidInput
from mtad.methods import METHODS
from mtad.params import DecodingParams
from runtime.config import describe
from runtime.prompts import several
from runtime.server.messages import ChatMessage, Effort, ToolChoice, Tools
from runtime.server.strict import MAX_ENTRIES, STOP_STRINGS, Items, StrictModel

Token = Annotated[int, Field(ge=0)]
Prompt = str | Items[str] | Items[Token] | Items[Items[Token]]

_TYPES: dict[str, Any] = {  # where JSON has another type than Python
    "method": Annotated[str, Field(json_schema_extra={"enum": [*METHODS]})],  # the error says what to use instead
    "stop": str | Annotated[Items[str], Field(max_length=STOP_STRINGS)],
    "stop_token_ids": Annotated[Items[Token], Field(max_length=MAX_ENTRIES)],
    "bad_words": Annotated[Items[str], Field(max_length=MAX_ENTRIES)],
    "logit_bias": Annotated[dict[str, float], Field(max_length=MAX_ENTRIES)],
    "json_schema": str | dict[str, Any],
}

DESCRIPTIONS = describe(DecodingParams)
PARAMETERS = [one.name for one in fields(DecodingParams)]


def _json_type(hint: Any) -> Any:
    """A type with lists for tuples, which JSON does not have."""
    if get_origin(hint) is tuple:
        return Items[get_args(hint)[0]]  # type: ignore[misc]
    if isinstance(hint, UnionType):
        return functools.reduce(operator.or_, map(_json_type, get_args(hint)))
    return hint


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


if TYPE_CHECKING:
    _Parameters = StrictModel
else:
    _HINTS = get_type_hints(DecodingParams)
    _FIELDS = {
        name: (_TYPES.get(name, _json_type(_HINTS[name])) | None, Field(None, description=DESCRIPTIONS.get(name, "")))
        for name in PARAMETERS
        if name != "top_logprobs"  # completions have `logprobs` for it
    }
    _Parameters = create_model("_Parameters", __base__=StrictModel, **_FIELDS)


class Body(_Parameters):
    """What both kinds of request share: every field of `DecodingParams` but `top_logprobs`, and OpenAI's."""

    other_words: ClassVar = True
    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    user: str | None = Field(None, description="taken and not heeded")
    priority: int = Field(
        0, ge=-(2**31), lt=2**31, description="larger ones overtake those that wait, where the server allows it"
    )
    cache_salt: str | None = Field(None, min_length=1, description="prompts are reused with the same salt only")
    return_token_ids: bool = Field(False, description="token ids of prompts and choices, as `token_ids`")

    @property
    def renamed(self) -> dict[str, str]:
        """What fields of `DecodingParams` are called here, where it differs."""
        return {"json_schema": "response_format"} if self.response_format else {}

    @property
    def alternatives(self) -> int | None:
        """Likeliest tokens to report at each token; None for no log-probabilities at all."""
        return None

    @property
    def prompt_alternatives(self) -> int | None:
        """Likeliest tokens to report at each token of the prompts; None for no log-probabilities of prompts."""
        wanted: int | None = getattr(self, "prompt_logprobs", None)
        if wanted is not None and self.stream:
            raise InvalidInput("prompt_logprobs", wanted, "only with stream = false")
        return wanted

    def parameters(self, defaults: DecodingParams) -> DecodingParams:
        """The decoding parameters it asks for, on top of the pair's.

        Raises:
            InvalidInput: they cannot be used, or contradict each other.
        """
        values = {name: getattr(self, name) for name in self.model_fields_set.intersection(PARAMETERS)}
        values["top_logprobs"] = self.alternatives or 0
        longest = getattr(self, "max_completion_tokens", None)
        if longest is not None and values.setdefault("max_tokens", longest) != longest:
            raise InvalidInput("max_completion_tokens", longest, "max_tokens says something else; give one of them")
        if self.prompt_alternatives is not None:
            values["prompt_logprobs"] = self.prompt_alternatives
        if isinstance(values.get("json_schema"), Mapping):
            values["json_schema"] = json.dumps(values["json_schema"])
        if self.response_format and self.response_format.language is not None:
            if "json_schema" in values:
                raise InvalidInput("response_format", self.response_format.type, "give it or json_schema, not both")
            values["json_schema"] = self.response_format.language
        if self.stream_options and not self.stream:
            raise InvalidInput("stream_options", self.stream_options.model_dump(), "only with stream = true")
        return DecodingParams.from_dict(values, defaults)


class CompletionRequest(Body):
    """A request to `/v1/completions`, as OpenAI defines it."""

    prompt: Prompt
    echo: bool = Field(False, description="repeat the prompt before the text, with its logprobs where those are wanted")
    logprobs: int | None = Field(None, ge=0, le=20, description="log-probabilities, with so many alternatives each")

    @property
    def renamed(self) -> dict[str, str]:
        echoed = {"prompt_logprobs": "echo"} if self.echo and "prompt_logprobs" not in self.model_fields_set else {}
        return super().renamed | {"top_logprobs": "logprobs"} | echoed

    @property
    def alternatives(self) -> int | None:
        return self.logprobs

    @property
    def prompt_alternatives(self) -> int | None:
        wanted = super().prompt_alternatives
        if self.echo and (self.logprobs is not None or getattr(self, "max_tokens", None) == 0):
            return max(wanted or 0, self.logprobs or 0)
        return wanted

    @property
    def prompts(self) -> list[Any]:
        return list(several(self.prompt))


class ChatCompletionRequest(Body):
    """A request to `/v1/chat/completions`, as OpenAI defines it."""

    messages: Items[ChatMessage] = Field(min_length=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, description=DESCRIPTIONS["top_logprobs"])
    max_completion_tokens: int | None = Field(None, description=f"max_tokens: {DESCRIPTIONS['max_tokens']}")
    tools: Tools = Field([], description="functions that the model may call")
    tool_choice: ToolChoice = Field("auto", description="whether it may, must not or must call one, or which one")
    parallel_tool_calls: bool = Field(True, description="whether an answer may have several calls")
    reasoning_effort: Effort | None = Field(None, description="how much to think, where the chat template knows it")
    chat_template_kwargs: dict[str, Any] = Field({}, description="variables of the template, such as enable_thinking")

    @property
    def renamed(self) -> dict[str, str]:
        longest = {"max_tokens": "max_completion_tokens"} if self.max_completion_tokens is not None else {}
        return super().renamed | longest | {"prompt": "messages"}

    def plain(self) -> tuple[list[Any], list[dict[str, Any]]]:
        """The messages and the tools that a chat template gets."""
        tools = () if self.tool_choice == "none" else self.tools
        return self.messages, [tool.model_dump(exclude={"function": {"strict"}}) for tool in tools]

    @property
    def alternatives(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise InvalidInput("top_logprobs", self.top_logprobs, "only with logprobs = true")
        return (self.top_logprobs or 0) if self.logprobs else None


def advertised(defaults: DecodingParams) -> dict[str, dict[str, Any]]:
    """The decoder's fields for `/v1/models`: JSON schema of each with the pair's default; null stands for what fits."""
    properties = ChatCompletionRequest.model_json_schema()["properties"]
    found = {}
    for name in PARAMETERS:
        schema = {key: value for key, value in properties[name].items() if key not in ("title", "default")}
        value = getattr(defaults, name)
        found[name] = schema | {"default": list(value) if isinstance(value, tuple) else value}
    return found
