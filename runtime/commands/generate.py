"""`mtad-generate`: text from a pair of engines."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from mtad.errors import InvalidInput
from mtad.params import DecodingParams
from runtime.commands.entry import Parser, command
from runtime.commands.placement_options import add_placement, placement_of


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
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--rows", type=int, help="prompts decoded at once (default: what the pair was exported with)")
    group.add_argument("--memory", help="as many rows as fit, for example 4GiB")
    parser.add_argument(
        "--tensor-parallel", type=int, default=1, help="GPUs the target is divided over (default %(default)s)"
    )
    add_placement(parser)
    types = {
        **dict.fromkeys(("int", "int | None"), int),
        **dict.fromkeys(("float", "float | None"), float),
        "tuple[int, ...]": _integers,
        "Mapping[int, float]": _mapping,
    }
    for field in fields(DecodingParams):
        option = "--" + field.name.replace("_", "-")
        if field.name == "stop":
            parser.add_argument(option, action="append", help="string that ends the text; may be repeated")
        elif field.type == "bool":
            parser.add_argument(option, action="store_true", default=None, help=f"see DecodingParams.{field.name}")
        else:
            kind: Any = types.get(str(field.type), str)
            parser.add_argument(option, type=kind, help=f"see DecodingParams.{field.name}")
    options = parser.parse_args()
    if options.tensor_parallel > 1:
        from engines.parallel.engine import follow_if_told

        follow_if_told()  # one process prints
    given = {f.name: getattr(options, f.name) for f in fields(DecodingParams) if getattr(options, f.name) is not None}
    DecodingParams.from_dict(given)  # bad parameters are refused before the engines are opened
    prompts = [*options.prompt, *(_read(path) for path in options.file)] or [_read(None)]

    import torch

    from engines.pytorch.hook import quiet_transformers
    from runtime.llm import LLM

    quiet_transformers()

    torch.set_num_threads(1)  # the loop's own tensors are small; the cores belong to the engines
    size = {"rows": options.rows, "memory": options.memory, "tensor_parallel": options.tensor_parallel}
    llm = LLM(options.pair, **size, **placement_of(options))
    params = DecodingParams.from_dict(given, llm.pair.defaults)
    for prompt in prompts:
        llm.requests(prompt, params)  # refuses what is unusable before anything is said
    print(llm.memory, file=sys.stderr)
    show = len(prompts) > 1 and sys.stderr.isatty()
    for result in llm.generate(prompts, params, progress=show):
        print(json.dumps(result.to_dict(), ensure_ascii=False) if options.json else result.text)


def _integers(text: str) -> tuple[int, ...]:
    """Integers separated by commas."""
    try:
        return tuple(map(int, text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not integers such as 2,2,1") from None


def _mapping(text: str) -> dict[str, float]:
    """A JSON object, for options that map token ids to numbers."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'{text!r} is not a JSON object such as {{"5": -100}}')
    return value


def _read(path: Path | None) -> str:
    """A prompt from a file, or from standard input."""
    try:
        return path.read_text(encoding="utf-8") if path else sys.stdin.read()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput("file", str(path or "standard input"), f"cannot be read: {error}") from None


if __name__ == "__main__":
    main()
