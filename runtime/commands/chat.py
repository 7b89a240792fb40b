"""`mtad chat`: a conversation in the terminal, in which drafted tokens and the target's own differ in colour."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mtad.errors import CapacityExceeded, InvalidInput
from mtad.params import DecodingParams
from runtime.commands.entry import Parser, add_decoding, add_options, command, given_options
from runtime.commands.pair_source import add_pair, check_room, find_pair
from runtime.commands.terminal import answer, waiting, warn_of_unused
from runtime.config import RuntimeConfig, use_torch
from runtime.scheduler.request import RequestFailed

if TYPE_CHECKING:
    from runtime.async_llm import AsyncLLM
    from runtime.llm import LLM
    from runtime.server.chat import ChatTemplate

HELP = "/clear begins a new conversation, /quit or Ctrl-D ends it"


@command
def main() -> None:
    """Entry point of `mtad chat`."""
    about = """Hold a conversation. Drafted text is green, the target's own tokens are cyan. Each answer ends with its
    tokens per second and per pass of the target. The oldest messages are left out where the context is full. /clear
    begins a new conversation; /quit or Ctrl-D ends it."""
    parser = Parser(brief=True, prog="mtad chat", usage="%(prog)s PAIR [options]", description=about)
    add_pair(parser)
    parser.add_argument("--chat-template", type=Path, help="file with a Jinja chat template, in place of the pair's")
    parser.add_argument("--system", help="a system message that the conversation begins with")
    add_options(parser.add_argument_group("where it runs"), RuntimeConfig)
    add_decoding(parser, but=("n", "top_logprobs", "prompt_logprobs", "draft_details"))
    options = parser.parse_args()
    config = RuntimeConfig(**{"rows": 1, **given_options(options, RuntimeConfig)})  # one conversation
    given = given_options(options, DecodingParams)
    DecodingParams.from_dict(given)
    folder = find_pair(options)
    check_room(folder, config, given.get("max_tokens"))

    with waiting("opening the pair"):
        from runtime.async_llm import AsyncLLM
        from runtime.pair import open_tokenizer
        from runtime.server.chat import ChatTemplate, read_template

        use_torch()
        tokenizer = open_tokenizer(folder / "target")
        source = read_template(options.chat_template, tokenizer) if options.chat_template else None
        template = ChatTemplate(tokenizer, source, str(folder))
        messages = [{"role": "system", "content": options.system}] if options.system else []
        hello = [*messages, {"role": "user", "content": "Hello"}]
        asyncio.run(template.render(hello))  # a pair that cannot chat is not opened
        engine = AsyncLLM(folder, config)
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # `input` edits a line with it
        print(HELP, file=sys.stderr)
    sys.stdin.reconfigure(errors="surrogateescape")  # type: ignore[union-attr]  # no line takes others along
    params = DecodingParams.from_dict(given, engine.llm.pair.defaults)
    warn_of_unused(given, params)
    asyncio.run(converse(engine, template, messages, params))


async def converse(
    engine: AsyncLLM, template: ChatTemplate, messages: list[dict[str, str]], params: DecodingParams
) -> None:
    """Read questions from standard input and print answers as they come, until there are no more questions."""
    colour, first = sys.stdout.isatty(), list(messages)
    async with engine:
        while (question := _ask()) not in (None, "/quit"):
            if question in ("", "/clear", "/help"):
                messages = list(first) if question == "/clear" else messages
                print(HELP, file=sys.stderr)
                continue
            asked = [*messages, {"role": "user", "content": question}]
            try:
                ids = await fitting_prompt(engine.llm, template, asked, len(first), params.max_tokens)
                text = await answer(engine, ids, params, colour, fit=True)
            except (InvalidInput, RequestFailed) as error:
                if engine.cause:  # it answers nobody any more
                    raise
                print(f"not answered: {error}", file=sys.stderr, flush=True)
                continue
            messages = [*asked, {"role": "assistant", "content": text}]


async def fitting_prompt(
    llm: LLM, template: ChatTemplate, messages: list[dict[str, str]], kept: int, max_tokens: int | None
) -> list[int]:
    """The prompt of a conversation that leaves room for an answer; the oldest messages go from the list for that.

    Args:
        messages: the question last.
        kept: messages at the beginning that stay, such as the system's.
        max_tokens: of the answer. So much room is left for it, but at most 3/4 of a row; 1/4 where it is None.

    Raises:
        CapacityExceeded: the question alone is too long.
    """
    room, tokenizer = llm.loop.scheduler.room_for_tokens, llm.pair.tokenizer.backend_tokenizer
    room -= room // 4 if max_tokens is None else min(max_tokens, 3 * room // 4)
    before = len(messages)
    while len(ids := tokenizer.encode(await template.render(messages), add_special_tokens=False).ids) > room:
        if len(messages) <= kept + 1:
            raise CapacityExceeded("question", f"{len(ids)} tokens", f"give at most {room} tokens")
        del messages[kept : kept + 2]  # a question and its answer
    if left := before - len(messages):
        print(f"the context is full: the {left} oldest messages are left out", file=sys.stderr, flush=True)
    return list(ids)


def _ask() -> str | None:
    try:
        return input("> " if sys.stdin.isatty() and sys.stdout.isatty() else "").strip()
    except EOFError:
        return None
