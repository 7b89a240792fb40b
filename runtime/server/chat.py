"""Messages to one prompt, by a tokenizer's chat template, and prompts to text."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic_core import to_json
from transformers import PreTrainedTokenizerBase

from mtad.errors import InvalidInput, read_text, refused_as
from runtime.constraints.trials import Pool
from runtime.prompts import Prompt

_RESERVED = {*inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters, "messages"}


class ChatTemplate:
    """A chat template, in the sandbox that transformers runs templates in, in a process of its own.

    Args:
        tokenizer: for its own template and the special tokens templates name.
        source: Jinja text in place of the tokenizer's own.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, source: str | None, pair: str) -> None:
        self._tokenizer, self._source, self._pair = tokenizer, source, pair
        self.pool = Pool("the chat template", self._settings, gives_way=False)

    @property
    def available(self) -> bool:
        return bool(self._source or self._tokenizer.chat_template)

    def source(self, tools: Sequence[Any]) -> str:
        """The template that is used with or without tools: some tokenizers have one for each; empty without any."""
        if not self.available:
            return ""
        return str(self._tokenizer.get_chat_template(self._source, tools=list(tools) or None))

    async def render(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[dict[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
        effort: str | None = None,
    ) -> str:
        """The prompt, up to where the assistant's answer begins; special tokens are in the text.

        Args:
            messages: role and content of each, and what else OpenAI's have.
            tools: functions that the model may call, in OpenAI's shape.
            variables: further ones of the template, such as enable_thinking.
            effort: how much to think; "none" for not at all.

        Raises:
            InvalidInput: there is no template, it refuses these messages, it has no such variable, or it breaks a limit
                of the process.
            Failed: the pool was closed.
        """
        if not self.available:
            problem = "its tokenizer has no chat template; give one with --chat-template, or use completions"
            raise InvalidInput("messages", self._pair, problem)
        source = self.source(tools)
        if "tool_calls" not in source and any(one["role"] == "tool" or "tool_calls" in one for one in messages):
            problem = "the chat template has no place for calls and their results; give another with --chat-template"
            raise InvalidInput("messages", "tool_calls", problem)
        if "developer" not in source:  # such a template leaves these messages out, without a word
            messages = [one | {"role": "system"} if one["role"] == "developer" else one for one in messages]
        given = dict(variables or {})
        for name, value in given.items():
            if name in _RESERVED or not re.search(rf"\b{re.escape(name)}\b", source):
                raise InvalidInput("chat_template_kwargs", {name: value}, f"no variable {name} is a request's to set")
        if effort:
            own = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
            own = {name: value for name, value in own.items() if name in source}
            if not own:
                raise InvalidInput("reasoning_effort", effort, "the model has no such setting; leave it out")
            given = own | given
        chat = {"messages": messages, "tools": tools, "template": int(bool(tools)), "variables": given}
        with refused_as("messages", None, "the chat template cannot read them"):  # such as half of a surrogate pair
            text = to_json(chat).decode()
        found = await self.pool.run_soon(lambda trials: trials.run("messages", text))
        for problem in found["problems"]:
            raise InvalidInput("messages", [m["role"] for m in messages], f"the chat template refuses them: {problem}")
        return str(found["text"])

    def _settings(self) -> dict[str, object]:
        templates = [self.source(()), self.source(({},))]
        return {"templates": templates, "special_tokens": self._tokenizer.special_tokens_map}


def read_template(path: Path, tokenizer: PreTrainedTokenizerBase) -> str:
    """A template from a file, tried on one message.

    Raises:
        InvalidInput: it cannot be read, or is not a template.
    """
    source = read_text("chat-template", path)
    template = ChatTemplate(tokenizer, source, str(path))
    try:
        asyncio.run(template.render([{"role": "user", "content": "Hello"}]))
    except InvalidInput as error:
        raise InvalidInput("chat-template", str(path), error.problem) from None
    finally:
        template.pool.close()
    return source


def prompt_text(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> str:
    """A prompt as text; its token ids must exist, which queuing it checks."""
    if isinstance(prompt, str):
        return prompt
    return str(tokenizer.backend_tokenizer.decode(list(prompt), skip_special_tokens=True))
