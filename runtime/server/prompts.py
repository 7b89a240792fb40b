"""Requests' prompts, made in threads: messages go through the chat template, texts through the tokenizer."""

from __future__ import annotations

from collections.abc import Sequence

from runtime.async_llm import AsyncLLM
from runtime.llm import Prompt
from runtime.server.chat import ChatTemplate
from runtime.server.messages import Chat, Message, Tool
from runtime.server.schema import Body, CompletionRequest


class Prompts:
    """Makes the prompts of one engine's requests."""

    def __init__(self, engine: AsyncLLM, template: ChatTemplate) -> None:
        self._engine, self._template = engine, template

    async def of(self, body: Body, chat: Chat | None, size: int) -> list[Prompt]:
        """What a request continues: `chat`, if it is one."""
        found: list[Prompt]
        if chat:
            tools = () if chat.choice == "none" else chat.tools
            found = [await self.chat(chat.messages, body.add_special_tokens or False, size, tools)]
        else:
            assert isinstance(body, CompletionRequest)
            found = list(body.prompts)
            if body.add_special_tokens is not None or body.truncate_prompt_tokens is not None:
                found = [await self.tokenized(prompt, body.add_special_tokens is not False) for prompt in found]
        return [prompt[-(body.truncate_prompt_tokens or 0) :] for prompt in found]

    async def chat(
        self, messages: Sequence[Message], special_tokens: bool, size: int, tools: Sequence[Tool] = ()
    ) -> list[int]:
        """Token ids of a chat's prompt, in which the model is told of the tools; `size` is that of the request."""

        def tokenize() -> list[int]:
            told = [tool.model_dump(exclude={"function": {"strict"}}) for tool in tools]
            text = self._template.render([message.plain() for message in messages], told)
            return self._engine.llm.tokenize(text, special_tokens)

        return await self._engine.in_thread(size, tokenize)

    async def tokenized(self, prompt: Prompt, special_tokens: bool = True) -> Sequence[int]:
        """Token ids of a prompt."""
        if not isinstance(prompt, str):
            return prompt
        return await self._engine.in_thread(len(prompt), self._engine.llm.tokenize, prompt, special_tokens)
