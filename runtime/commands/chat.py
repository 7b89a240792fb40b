"""`mtad chat`: a conversation in the terminal, in which drafted tokens and the target's own differ in colour."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mtad.params import DecodingParams
from runtime.commands.entry import Parser, add_decoding, add_options, command, given_options
from runtime.commands.pair_source import add_pair, check_room, find_pair
from runtime.commands.terminal import answer
from runtime.config import RuntimeConfig, use_torch

if TYPE_CHECKING:
    from runtime.async_llm import AsyncLLM
    from runtime.server.chat import ChatTemplate


@command
def main() -> None:
    """Entry point of `mtad chat`."""
    parser = Parser(
        brief=True,
        prog="mtad chat",
        usage="%(prog)s PAIR [options]",
        description="Hold a conversation. Drafted text is green, the target's own tokens are cyan. Each answer ends "
        "with its tokens per second and its block efficiency. An empty line or Ctrl-D ends the conversation.",
    )
    add_pair(parser)
    parser.add_argument("--chat-template", type=Path, help="file with a Jinja chat template, in place of the pair's")
    parser.add_argument("--system", help="a system message that the conversation begins with")
    add_options(parser.add_argument_group("where it runs"), RuntimeConfig)
    add_decoding(parser, but=("n", "top_logprobs", "prompt_logprobs", "draft_details"))
    options = parser.parse_args()
    config = RuntimeConfig(**given_options(options, RuntimeConfig))
    given = given_options(options, DecodingParams)
    DecodingParams.from_dict(given)
    folder = find_pair(options)
    check_room(folder, config, given.get("max_tokens", 0))

    from runtime.async_llm import AsyncLLM
    from runtime.pair import open_tokenizer
    from runtime.server.chat import ChatTemplate, read_template

    use_torch()
    tokenizer = open_tokenizer(folder / "target")
    source = read_template(options.chat_template, tokenizer) if options.chat_template else None
    template = ChatTemplate(tokenizer, source, str(folder))
    messages = [{"role": "system", "content": options.system}] if options.system else []
    asyncio.run(
        template.render([*messages, {"role": "user", "content": "Hello"}])
    )  # a pair that cannot chat is not opened
    engine = AsyncLLM(folder, config)
    asyncio.run(converse(engine, template, messages, DecodingParams.from_dict(given, engine.llm.pair.defaults)))


async def converse(
    engine: AsyncLLM, template: ChatTemplate, messages: list[dict[str, str]], params: DecodingParams
) -> None:
    """Read questions from standard input and print answers as they come, until there are no more questions."""
    colour = sys.stdout.isatty()
    async with engine:
        while question := await asyncio.to_thread(_ask):
            messages.append({"role": "user", "content": question})
            ids = engine.llm.tokenize(await template.render(messages), special_tokens=False)
            text = await answer(engine, ids, params, colour)
            messages.append({"role": "assistant", "content": text})


def _ask() -> str:
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return ""
