"""`mtad generate`: text from a pair of engines."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mtad.errors import InvalidInput, read_text
from mtad.params import DecodingParams
from runtime.commands.entry import Parser, add_decoding, add_options, command, given_options
from runtime.commands.pair_source import add_pair, check_room, find_pair
from runtime.commands.terminal import answer, print_figures, waiting, warn_of_unused
from runtime.config import RuntimeConfig, use_torch

if TYPE_CHECKING:
    from runtime.async_llm import AsyncLLM


@command
def main() -> None:
    """Entry point of `mtad generate`."""
    about = "Decode prompts with a pair of engines. Parameters not given come from the pair's defaults."
    usage = "%(prog)s PAIR [PROMPT ...] [options]"
    parser = Parser(brief=True, prog="mtad generate", usage=usage, description=about)
    add_pair(parser)
    parser.add_argument("prompt", nargs="*", help="prompts; without one or --file, standard input is read")
    parser.add_argument("--file", type=Path, action="append", default=[], help="a prompt's file; may be repeated")
    parser.add_argument("--json", action="store_true", help="one JSON object per prompt: text, tokens, statistics")
    add_options(parser.add_argument_group("where it runs"), RuntimeConfig)
    add_decoding(parser)
    options = parser.parse_args()
    config = RuntimeConfig(**given_options(options, RuntimeConfig))
    if config.tensor_parallel > 1:
        from engines.parallel.engine import follow_if_launched

        follow_if_launched()  # one process prints
    given = given_options(options, DecodingParams)
    DecodingParams.from_dict(given)  # bad parameters are refused before the engines are opened
    for name in {"top_logprobs", "prompt_logprobs", "draft_details"} & given.keys() if not options.json else ():
        print(f"{parser.prog}: warning: --{name.replace('_', '-')} has no effect without --json", file=sys.stderr)
    prompts = [*options.prompt, *(read_text("file", path) for path in options.file)]
    folder = find_pair(options)
    check_room(folder, config, given.get("max_tokens"))
    prompts = prompts or [_read_standard_input()]

    with waiting("opening the pair"):
        from runtime.async_llm import AsyncLLM
        from runtime.llm import LLM

        use_torch()
        llm = LLM(folder, config)
    params = DecodingParams.from_dict(given, llm.pair.defaults)
    warn_of_unused(given, params)
    for prompt in prompts:
        llm.requests(prompt, params)  # refuses what is unusable before anything is said
    print(*filter(None, (llm.pair.runs_on, llm.memory)), sep="\n", file=sys.stderr)
    if len(prompts) == params.n == 1 and sys.stdout.isatty() and not options.json:
        asyncio.run(_stream(AsyncLLM(llm), prompts[0], params))
        return
    results = llm.generate(prompts, params, progress=len(prompts) > 1 and sys.stderr.isatty())
    for number, result in enumerate(results, 1):
        if options.json:
            print(json.dumps(result.to_dict(), ensure_ascii=False))
        else:
            print(f"--- {number} of {len(results)}\n{result.text}" if len(results) > 1 else result.text)
    print_figures(results, params, llm.loop.totals)


async def _stream(engine: AsyncLLM, prompt: str, params: DecodingParams) -> None:
    async with engine:
        await answer(engine, prompt, params, colour=True)


def _read_standard_input() -> str:
    if sys.stdin.isatty():
        print("reading the prompt from standard input, up to Ctrl-D", file=sys.stderr)
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise InvalidInput("prompt", "standard input", f"cannot be read: {error}") from None
