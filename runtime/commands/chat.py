"""`mtad chat`: a conversation in the terminal, in which drafted tokens and the target's own differ in colour."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mtad.params import DecodingParams
from runtime.commands.entry import Parser, command
from runtime.commands.options import add_options, given_options
from runtime.config import RuntimeConfig

if TYPE_CHECKING:
    from runtime.async_llm import AsyncLLM
    from runtime.scheduler.request import Result
    from runtime.server.chat import ChatTemplate

DRAFTED, TARGET, FAINT, RESET = "\x1b[32m", "\x1b[36m", "\x1b[2m", "\x1b[0m"
"""Colours of text that was drafted, of the target's own tokens, and of figures."""


@command
def main() -> None:
    """Entry point of `mtad chat`."""
    parser = Parser(
        prog="mtad chat",
        description="Hold a conversation. Text that was drafted is green, the target's own tokens are cyan. Each answer "
        "ends with its tokens per second and its block efficiency. An empty line or Ctrl-D ends the conversation.",
    )
    parser.add_argument("pair", type=Path, help="pair folder, written by mtad export")
    parser.add_argument("--system", help="a system message that the conversation begins with")
    add_options(parser.add_argument_group("decoding"), DecodingParams, but=("n", "top_logprobs"))
    add_options(parser.add_argument_group("runtime"), RuntimeConfig)
    options = parser.parse_args()
    config = RuntimeConfig(**given_options(options, RuntimeConfig))
    given = given_options(options, DecodingParams)
    DecodingParams.from_dict(given)

    import torch

    from engines.pytorch.hook import quiet_transformers
    from runtime.async_llm import AsyncLLM
    from runtime.server.chat import ChatTemplate

    quiet_transformers()
    torch.set_num_threads(1)  # the loop's own tensors are small; the cores belong to the engines
    engine = AsyncLLM(options.pair, config)
    template = ChatTemplate(engine.llm.pair.tokenizer, None, str(options.pair))
    messages = [{"role": "system", "content": options.system}] if options.system else []
    template.render([*messages, {"role": "user", "content": "Hello"}])  # a pair that cannot chat says so at once
    asyncio.run(converse(engine, template, messages, DecodingParams.from_dict(given, engine.llm.pair.defaults)))


async def converse(
    engine: AsyncLLM, template: ChatTemplate, messages: list[dict[str, str]], params: DecodingParams
) -> None:
    """Read questions from standard input and print answers as they come, until there are no more questions.

    Args:
        engine: not started yet.
        template: makes a prompt of the messages.
        messages: what the conversation begins with; it grows.
        params: of each answer.
    """
    colour = sys.stdout.isatty()
    async with engine:
        while question := await asyncio.to_thread(_ask):
            messages.append({"role": "user", "content": question})
            ids = await engine.tokenize(template.render(messages), special_tokens=False)
            text = await answer(engine, ids, params, colour)
            messages.append({"role": "assistant", "content": text})


async def answer(engine: AsyncLLM, prompt: list[int], params: DecodingParams, colour: bool) -> str:
    """Stream one answer to standard output, and its figures to standard error; returns the text."""
    stream, text = await engine.submit(prompt, params), ""
    starts: list[tuple[int, str]] = []  # the character at which each token begins, and its colour
    async for delta in stream:
        kinds = [DRAFTED] * delta.accepted + [TARGET] * (len(delta.token_ids) - delta.accepted)
        starts += zip(delta.offsets, kinds, strict=True)
        print(_coloured(delta.text, len(text), starts) if colour else delta.text, end="", flush=True)
        text += delta.text
    print(flush=True)
    print_figures([await stream.result()], params)
    return text


def _coloured(text: str, at: int, starts: list[tuple[int, str]]) -> str:
    """`text`, which begins at character `at` of the answer, with the colour of the token each character is part of."""
    shown, before = "", ""
    for index, character in enumerate(text, at):
        kind = next((kind for start, kind in reversed(starts) if start <= index), "")
        shown += character if kind == before else kind + character
        before = kind
    return shown + RESET if text else ""


def print_figures(results: Sequence[Result], params: DecodingParams) -> None:
    """Print what answers cost to standard error, and whether one of them was cut."""
    seconds = max(
        (r.statistics.draft_seconds + r.statistics.score_seconds + r.statistics.commit_seconds) for r in results
    )
    tokens, passes = sum(r.statistics.tokens for r in results), sum(r.statistics.target_passes for r in results)
    figures = f"{tokens / max(seconds, 1e-9):.0f} tokens/s, {tokens / max(passes, 1):.2f} tokens per pass"
    cut = sum(result.finish_reason == "length" for result in results)
    if cut:
        figures += f"; {cut} of {len(results)} texts cut at --max-tokens {params.max_tokens}"
    print(f"{FAINT}{figures}{RESET}" if sys.stderr.isatty() else figures, file=sys.stderr, flush=True)


def _ask() -> str:
    """The next question; empty at the end."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return ""
