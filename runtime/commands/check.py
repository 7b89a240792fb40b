"""`mtad check`: does an engine compute what its checkpoint computes, or what another engine does?"""

from __future__ import annotations

import sys
from pathlib import Path

from mtad.errors import InvalidInput
from runtime.commands.entry import Parser, command
from runtime.commands.terminal import waiting
from runtime.config import check_least


@command
def main() -> None:
    """Entry point of `mtad check`."""
    about = """Compare an engine with the checkpoint it was exported from, or with another engine of the same model in
    another format or precision. The batch has rows of different lengths, a chain and a random tree. For a pair folder,
    checks each engine. Exit code 0: same within the tolerance; 1: different; 2: bad input."""
    parser = Parser(prog="mtad check", description=about)
    parser.add_argument("engine", type=Path, help="engine folder (PAIR/target), or pair folder")
    parser.add_argument("other", type=Path, nargs="?", help="folder to compare with (default: the checkpoint)")
    parser.add_argument("--checkpoint", help="folder or hub id (default: where the engine was exported from)")
    parser.add_argument("--tolerance", type=float, help="allowed difference of a logit (default: by dtype and size)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default %(default)s)")
    options = parser.parse_args()
    check_least(options, threads=1, tolerance=0)
    engine, other = options.engine, options.other
    folders = [(engine, other)]
    if (engine / "pair.json").is_file():
        if options.checkpoint is not None:
            problem = "works on one engine; give the pair's target or auxiliary folder"
            raise InvalidInput("checkpoint", options.checkpoint, problem)
        if other is not None and not (other / "pair.json").is_file():
            raise InvalidInput("other", str(other), "is not a pair folder, but the first folder is")
        from runtime.pair import read_description

        folders = [(engine / name, other and other / name) for name in read_description(engine)["engines"]]
    with waiting("comparing"):
        import torch

        from engines.quiet import quiet_transformers
        from export.verification.check import check

        quiet_transformers()
        torch.set_num_threads(options.threads)
        asked = {"checkpoint": options.checkpoint, "allowed": options.tolerance, "threads": options.threads}
        checks = [check(*one, **asked) for one in folders]
    print("\n\n".join(map(str, checks)))
    sys.exit(0 if all(found.same for found in checks) else 1)
