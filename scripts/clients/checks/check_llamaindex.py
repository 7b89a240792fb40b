"""LlamaIndex: `OpenAILike`, for completions and for chats."""

from __future__ import annotations

from typing import Any

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

from scripts.clients.checks.report import MODEL, PROMPT, URL, check

known: Any = {"api_base": f"{URL}/v1", "api_key": "none", "model": MODEL, "max_retries": 0, "max_tokens": 16}
known |= {"context_window": 512, "additional_kwargs": {"seed": 1}}


@check("complete: whole and streamed alike")
def _() -> None:
    model = OpenAILike(**known, is_chat_model=False)
    text = model.complete(PROMPT).text
    assert text
    assert list(model.stream_complete(PROMPT))[-1].text == text


@check("chat: whole and streamed alike")
def _() -> None:
    model = OpenAILike(**known, is_chat_model=True)
    messages = [ChatMessage(role="user", content="How many singers are there?")]
    text = model.chat(messages).message.content
    assert text
    assert list(model.stream_chat(messages))[-1].message.content == text
