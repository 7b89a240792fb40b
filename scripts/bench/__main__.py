"""Measure the runtime on the demo pair.

    python -m scripts.bench peers        tokens per second, by requests in flight, of our methods and of other libraries
    python -m scripts.bench steps        what a step of each engine costs, by rows, tokens and size of the model
    python -m scripts.bench overhead     what of a block is spent outside the two engines
    python -m scripts.bench drafts       drafts of the auxiliary, looked-up drafts and both, by kind of text

Each has options of its own (`peers --help`), prints its tables, and writes them to docs/results: NAME.json, and where
there is a plot, a picture of the same name. With --quick it takes a minute or less, to see that it works, and writes to
build/results.
"""

from __future__ import annotations

import importlib
import sys
from argparse import RawDescriptionHelpFormatter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mtad.errors import InvalidInput
from mtad.methods import METHODS
from runtime.commands.entry import Parser, command
from scripts.bench.peers.catalog import OURS, PEERS, PRECISIONS, SIZES
from scripts.paths import RESULTS, ROOT

MODULES = {"peers": "peers.compare", "steps": "steps", "overhead": "overhead", "drafts": "drafts"}


def tables(figures: Mapping[str, Any]) -> Any:
    """The tables of one run, whose figures stand below the command's name."""
    ((name, own),) = figures.items()
    return importlib.import_module(f"scripts.bench.{MODULES[name]}").tables(own)


def parser(name: str) -> Parser:
    own = Parser(prog=f"scripts.bench {name}")
    add = own.add_argument
    if name in ("peers", "steps"):
        add("--sizes", nargs="+", choices=SIZES, default=list(SIZES[:3]), help="of the pair (default %(default)s)")
    if name == "peers":
        add("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS)[:2], help="(default %(default)s)")
        add("--methods", nargs="+", default=list(OURS), help="ours, beside sample (default %(default)s)")
        add("--peers", nargs="*", choices=PEERS, default=list(PEERS), help="none, if no name follows (default all)")
        add("--peer-temperature", type=float, help="peers with draft models also run at this one")
        add(
            "--edit", action="store_true", help="greedy copies of files with drafts that are looked up, ours and theirs"
        )
        add("--loads", nargs="+", type=int, default=[1, 4, 8, 16], help="requests in flight (default %(default)s)")
        add("--rounds", type=int, default=8, help="slices of each system at each load (default %(default)s)")
        add("--tokens", type=int, default=100, help="of each text (default %(default)s)")
    if name == "steps":
        add("--rows", nargs="+", type=int, default=[1, 8, 32], help="(default %(default)s)")
    if name in ("overhead", "drafts"):
        add("--pair", type=Path, default=ROOT / "build" / "demo-pair", help="pair folder (default %(default)s)")
    if name == "overhead":
        add("--vocabulary", type=int, help="instead of --pair, a random pair with so many tokens, such as 128256")
        methods = ["sample", "speculative", "mtad", "mmtad"]
        add("--methods", nargs="+", choices=tuple(METHODS), default=methods, help="(default %(default)s)")
        add("--provider", default="auto", help="of both engines, such as cpu or openvino (default %(default)s)")
    if name == "drafts":
        add("--rows", type=int, default=1, help="requests at once (default %(default)s)")
        add("--threads", type=int, default=1, help="CPU threads (default %(default)s)")
        add("--batches", type=int, default=60, help="of prompts, for each kind and temperature (default %(default)s)")
    add("--quick", action="store_true", help="a minute or less, to see that it works")
    add("--results", type=Path, help="folder to write to (default docs/results)")
    return own


@command
def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in MODULES:
        own = Parser(prog="scripts.bench", description=__doc__, formatter_class=RawDescriptionHelpFormatter)
        own.add_argument("command", choices=tuple(MODULES))
        own.parse_args()
    options = parser(name).parse_args(sys.argv[2:])
    for field, given in vars(options).items():
        if (
            field in ("loads", "rows", "rounds", "tokens", "batches")
            and min(given if isinstance(given, list) else [given]) < 1
        ):
            raise InvalidInput(field, given, "give at least 1")
    module = importlib.import_module(f"scripts.bench.{MODULES[name]}")
    figures = module.run(options)
    from scripts.results import save, table

    folder = options.results or (ROOT / "build" / "results" if options.quick else RESULTS)
    file = "-".join([name, *(other for other in ("vocabulary", "edit") if getattr(options, other, None))])
    save(folder / f"{file}.json", "scripts.bench.__main__", {name: figures})
    print(*(f"\n{table(rows)}" for rows in module.tables(figures).values()), f"\nwritten to {folder}", sep="\n")
    if hasattr(module, "plot"):
        module.plot(figures, folder / f"{file}.png")


if __name__ == "__main__":
    main()
