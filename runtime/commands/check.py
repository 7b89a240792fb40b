"""`mtad check`: does an engine compute what its checkpoint computes, or what another engine does?"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mtad.errors import InvalidInput
from runtime.commands.entry import Parser, command
from runtime.config import check_least

if TYPE_CHECKING:
    from export.verification.check import Check


@command
def main() -> None:
    """Entry point of `mtad check`."""
    parser = Parser(
        prog="mtad check",
        description="Compare an engine with the checkpoint it was exported from, or with another engine of the same "
        "model in another format or precision. The batch has rows of different lengths, a chain and a random tree. "
        "For a pair folder, checks both engines. Exit code 0: same within the tolerance; 1: different; 2: bad input.",
    )
    parser.add_argument("engine", type=Path, help="engine folder (PAIR/target), or pair folder")
    parser.add_argument(
        "other", type=Path, nargs="?", help="engine or pair folder to compare with (default: the checkpoint)"
    )
    parser.add_argument("--checkpoint", help="folder or hub id (default: where the engine was exported from)")
    parser.add_argument(
        "--layers", action="store_true", help="compare the output of every module; name the first that differs"
    )
    parser.add_argument("--tolerance", type=float, help="allowed difference of a logit (default: by dtype)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random tokens and trees (default %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    check_least(options, threads=1, tolerance=0)
    if not 0 <= options.seed < 2**63:
        raise InvalidInput("seed", options.seed, "give 0 to 2**63 - 1")
    folders = _folders(options.engine, options.other, options.checkpoint)
    import torch
    from tqdm import tqdm

    from engines.quiet import quiet_transformers
    from export.verification.check import check

    quiet_transformers()
    torch.set_num_threads(options.threads)
    checks, asked = [], {name: getattr(options, name) for name in ("checkpoint", "layers", "seed", "threads")}
    for engine, other in folders:
        with tqdm(desc=f"check {engine.name}", unit="text", file=sys.stderr, disable=None, leave=False) as bar:

            def progress(total: int, done: int, bar: tqdm = bar) -> None:
                bar.total = total
                bar.update(done)

            checks.append(check(engine, other, **asked, allowed=options.tolerance, progress=progress))
    same = all(found.same for found in checks)
    if options.json:
        print(json.dumps({"same": same, "checks": [found.to_dict() for found in checks]}, allow_nan=False))
    else:
        print("\n\n".join(map(describe, checks)))
    sys.exit(0 if same else 1)


def _folders(engine: Path, other: Path | None, checkpoint: str | None) -> list[tuple[Path, Path | None]]:
    if not (engine / "pair.json").is_file():
        return [(engine, other)]
    if checkpoint is not None:
        raise InvalidInput("checkpoint", checkpoint, "works on one engine; give the pair's target or auxiliary folder")
    if other is not None and not (other / "pair.json").is_file():
        raise InvalidInput("other", str(other), "is not a pair folder, but the first folder is")
    return [(engine / name, other and other / name) for name in ("target", "auxiliary")]


def describe(found: Check) -> str:
    """A check for people: a table of the modules if they were compared, the logits, the verdict."""
    lines = [f"{found.engine}\nagainst {found.reference}", ""]
    logits = found.outputs[-1]
    if found.layer_tolerance is not None:
        width = max(len(output.name) for output in found.outputs)
        lines.append(f"{'module':{width}}  {'max error':>9}  {'of largest':>10}  {'allowed':>8}")
        for output in found.outputs[:-1]:
            share = output.error / output.largest if output.largest else output.error
            mark = "" if output.same else "  DIFFERENT"
            lines.append(
                f"{output.name:{width}}  {output.error:9.2e}  {share:10.2e}  {found.layer_tolerance:8.0e}{mark}"
            )
        lines.append("")
    lines.append(
        f"logits: largest difference {logits.error:.3g} (allowed {found.tolerance:g}), mean {logits.mean_error:.2g}; "
        f"the same likeliest token at {found.argmax_agreement:.1%} of {found.positions} positions"
    )
    first = found.first_different
    if first is None:
        lines.append("same")
    elif found.layer_tolerance is None:
        lines.append("DIFFERENT; --layers says where it begins")
    else:
        place = first.place
        where = f", written by node {place.node} ({place.operator}) to {place.tensor}" if place else ""
        lines.append(f"DIFFERENT, first in {first.name}{where}: off by {first.error:.3g}, allowed {first.allowed:.3g}")
    return "\n".join(lines)
