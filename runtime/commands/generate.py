"""`mtad-generate`: text from a pair of engines."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from mtad.errors import InvalidInput
from mtad.params import DecodingParams
from runtime.commands.entry import Parser, command
from runtime.commands.options import add_options, given_options
from runtime.config import RuntimeConfig


@command
def main() -> None:
    """Entry point of `mtad-generate`."""
    parser = Parser(
        prog="mtad-generate",
        description="Decode prompts with a pair of engines. Parameters not given come from the pair's defaults.",
    )
    parser.add_argument("pair", type=Path, help="pair folder, written by mtad-export")
    parser.add_argument(
        "prompt", nargs="*", help="prompts; with neither prompt nor --file, standard input is one prompt"
    )
    parser.add_argument(
        "--file", type=Path, action="append", default=[], help="file that holds one prompt; may be repeated"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a prompt: text, tokens, statistics")
    add_options(parser.add_argument_group("decoding"), DecodingParams)
    add_options(parser.add_argument_group("runtime"), RuntimeConfig)
    options = parser.parse_args()
    config = RuntimeConfig(**given_options(options, RuntimeConfig))
    if config.tensor_parallel > 1:
        from engines.parallel.engine import follow_if_told

        follow_if_told()  # one process prints
    given = given_options(options, DecodingParams)
    DecodingParams.from_dict(given)  # bad parameters are refused before the engines are opened
    prompts = [*options.prompt, *(_read(path) for path in options.file)] or [_read(None)]

    import torch

    from engines.pytorch.hook import quiet_transformers
    from runtime.llm import LLM

    quiet_transformers()

    torch.set_num_threads(1)  # the loop's own tensors are small; the cores belong to the engines
    llm = LLM(options.pair, config)
    params = DecodingParams.from_dict(given, llm.pair.defaults)
    for prompt in prompts:
        llm.requests(prompt, params)  # refuses what is unusable before anything is said
    print(llm.memory, file=sys.stderr)
    show = len(prompts) > 1 and sys.stderr.isatty()
    for result in llm.generate(prompts, params, progress=show):
        print(json.dumps(result.to_dict(), ensure_ascii=False) if options.json else result.text)


def _read(path: Path | None) -> str:
    """A prompt from a file, or from standard input."""
    try:
        return path.read_text(encoding="utf-8") if path else sys.stdin.read()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput("file", str(path or "standard input"), f"cannot be read: {error}") from None


if __name__ == "__main__":
    main()
