"""`mtad triton`: a pair of engines as a model of Triton Inference Server."""

from __future__ import annotations

import argparse
from pathlib import Path

from runtime.commands.entry import Parser, add_options, command, given_options
from runtime.config import RuntimeConfig
from runtime.triton.options import TritonOptions


def parser() -> argparse.ArgumentParser:
    """The options of `mtad triton`."""
    about = "Write the directory of a Triton model (Python backend, decoupled) that serves a pair of engines."
    described = Parser(prog="mtad triton", usage="%(prog)s PAIR REPOSITORY [options]", description=about)
    described.add_argument("pair", help="pair folder, written by mtad export")
    described.add_argument("repository", type=Path, help="model repository to write into")
    described.add_argument("--model", default="mtad", help="name of the model (default %(default)s)")
    described.add_argument("--environment", help="virtual environment to run in (default: Triton's own Python)")
    described.add_argument("--copy", action="store_true", help="put a copy of the pair into the directory")
    described.add_argument("--overwrite", action="store_true", help="replace an earlier directory")
    add_options(described, TritonOptions, only=("request_seconds",))
    add_options(described.add_argument_group("runtime"), RuntimeConfig)
    return described


@command
def main() -> None:
    """Entry point of `mtad triton`."""
    given = parser().parse_args()
    from runtime.triton.repository import write_model

    options = TritonOptions(**given_options(given, TritonOptions))
    print(write_model(given.repository, given.model, options, given.environment, given.copy, given.overwrite))
